"""Generation: process the prompts once, then one token per step until every row has ended."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from tfkit.arguments import INT64, Natural, Positive, Seed, check_argument, checked, is_allowed_value, value_text
from tfkit.building.builder import evaluation_mode, graph_of
from tfkit.building.model import BuiltModel, check_values, input_errors, unwrapped_model
from tfkit.decoding.cached import CachedModel
from tfkit.decoding.drafts import Drafts
from tfkit.decoding.foreign import no_argument
from tfkit.decoding.masked_diffusion import MaskedDiffusion
from tfkit.decoding.sampling import Draws, Penalty, Sampler, Sampling, Share, Temperature
from tfkit.errors import SpecError, listing
from tfkit.graph.decode_split import reduce_to_output, split_for_decoding
from tfkit.graph.expand import Graph
from tfkit.graph.input_shapes import max_len
from tfkit.nn import as_padding_mask

End: TypeAlias = Literal["stop", "length"]
Id: TypeAlias = Annotated[int, INT64, "a token id"]
Tokens: TypeAlias = Annotated[
    Tensor | Sequence[Sequence[Id]], "a tensor [b, t] or a list of lists of token ids (one prompt is [[1, 2, 3]])"
]
Stop: TypeAlias = Annotated[
    Iterable[Id | Sequence[Id]], "a list of token ids, or of lists of them (one token is [50256])"
]
OnToken: TypeAlias = Callable[[Sequence[int | None]], Iterable[int] | None]
GENERATION = "generation"
"""The entry of a model's `meta` with the way in which it generates tokens by default, which a run sets."""


@dataclass(frozen=True)
class Generated:
    """Continuations of b prompts. Rows are the samples of the first prompt, then the samples of the next.

        result = tfkit.generate(model, [[1, 2, 3], [4]], max_new_tokens=8)
        texts = [tokenizer.decode(row) for row in result.rows()]

    A row includes its stop.
    """

    tokens: Tensor
    """New tokens, [b * n_samples, t], without the prompt, including stops; padded on the right."""
    lengths: tuple[int, ...]
    """Number of new tokens of each row."""
    ended: tuple[End, ...]
    """Reason why each row ended: a stop, or as many new tokens as it may get."""
    forwards: int
    """Number of forwards of the model, including the prompts. The forwards of drafting outputs are not counted."""

    def rows(self) -> list[list[int]]:
        """Return the new tokens of each row without padding."""
        return [row[:length] for row, length in zip(self.tokens.tolist(), self.lengths, strict=True)]


@checked
@torch.no_grad()
def generate(
    model: BuiltModel | CachedModel,
    tokens: Tokens,
    *,
    max_new_tokens: Positive,
    mask: Tensor | None = None,
    temperature: Temperature = 0.0,
    top_k: Positive | None = None,
    top_p: Share | None = None,
    repetition_penalty: Penalty = 1.0,
    stop: Stop = (),
    n_samples: Positive = 1,
    seed: Seed = 0,
    first_prompt: Natural = 0,
    pad: Id = 0,
    on_token: OnToken | None = None,
    length: Positive | None = None,
    output: str | None = None,
    compile: bool | str = False,
    drafts: Sequence[str] = (),
    generation: MaskedDiffusion | None = None,
    **inputs: Any,
) -> Generated:
    """Continue prompts with a model; without dropout, even if the model is in train mode.

    Args:
        model: the result of `build`, wrapped or sharded as `docs/around.md` says; or a `CachedModel` of it, whose
            caches and compiled code are used again.
        tokens: the prompts, [b, t] or a list of lists of token ids. For an encoder-decoder, the decoder's:
            usually only its start token (T5: 0, BART: 2).
        max_new_tokens: the most tokens that a row may get.
        mask: bool [b, t], True where there is a token; padding may stand on either side.
        temperature: see `Sampling`, as for the next three; at 0 the same prompt always gives the same tokens.
        top_k: only the k likeliest tokens.
        top_p: only the likeliest tokens that together have this probability.
        repetition_penalty: above 1, tokens of the prompt and of the row become less likely.
        stop: token ids that end a row, or sequences of them.
        n_samples: rows of each prompt.
        seed: start of the random numbers; each row has its own.
        first_prompt: the number of the first prompt, for a call with a part of a longer list: each prompt then gets the
            random numbers that it gets in a call with the entire list.
        pad: the token that fills places without a token.
        on_token: called after each step with a token id for every row, None for rows that have ended before. It may
            return numbers of rows that end with this token.
        length: the most tokens that prompt and answer may have together, see `CachedModel`.
        output: the output whose logits choose the tokens; by default the first.
        compile: if true, compile the step of one token, see `CachedModel`.
        drafts: outputs that predict the token after the next, the token after that, and so on. They draft tokens,
            which the model verifies in one forward: the tokens are the same with fewer forwards, see `Drafts`.
        generation: the way in which a model generates that attends to later tokens. By default, in a run, the way that
            its loss defines; otherwise, tokens are generated one after the other.
        inputs: further inputs of the model by name, such as `source` and `source_mask` of an encoder-decoder; tokens as
            lists of lists get their mask from this function.

    Raises:
        TypeError: an argument is unknown, or of another type.
        ValueError: a prompt is empty, or longer than the model's `max_len`, or leaves too little room for
            `max_new_tokens`; an argument is out of its range; the logits are NaN; or the model has
            no head.
    """
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty)
    built = model.model if isinstance(model, CachedModel) else unwrapped_model(model)
    generation = generation or built.meta.get(GENERATION)
    if n_samples > 1 and temperature == 0 and (generation is None or generation.remasking != "random"):
        raise ValueError("`n_samples` above 1 needs a temperature above 0: otherwise all samples are equal")
    check_values(built)
    graph = graph_of(built)
    full, graph = graph, reduce_to_output(graph, _output_of(model, graph, output))
    main = _step_input(graph) if generation is None else generation.input_of(graph)
    if generation is not None:
        penalty, caches = repetition_penalty != 1, isinstance(model, CachedModel)
        _check_unused(drafts=drafts, compile=compile, length=length, repetition_penalty=penalty, CachedModel=caches)
    _check_names(graph, main, inputs)
    if (signal := graph.node(graph.outputs[0]).output).type != "logits":
        raise ValueError(f"`{graph.name}` returns {signal.in_words()}, but tokens are chosen from logits")
    ends = _Ends(_stop_sequences(stop), on_token)
    tokens, mask = left_padded(tokens, mask, pad=pad)
    sizes, numbers = (tokens.size(1), max_new_tokens, length), range(first_prompt, first_prompt + tokens.size(0))
    request = _Request(tokens, mask, _padded_inputs(inputs, pad), max_new_tokens, sampling, n_samples, numbers, seed)
    with evaluation_mode(built):
        if generation is not None:
            _checked_room(graph, *sizes)
            steps, forwards = _denoise(built, graph, main, request, generation, ends)
        else:
            drafting = _drafts(model, full, graph, drafts, _checked_room(graph, *sizes), compile) if drafts else None
            cached = drafting.cached if drafting else _cached_model(model, graph, *sizes, compile)
            steps, forwards = _continue(cached, drafting, graph, main, request, ends)
    return ends.generated(torch.stack(steps, dim=1), pad, forwards)


@dataclass(frozen=True)
class _Request:
    """Prompts [b, t] with their padding mask and the further inputs of the model, and what to generate after them."""

    tokens: Tensor
    mask: Tensor | None
    inputs: Mapping[str, Tensor]
    max_new_tokens: int
    sampling: Sampling
    n_samples: int
    numbers: range
    """The numbers of the prompts, which determine the random numbers of their samples."""
    seed: int


def _denoise(
    model: fx.GraphModule, graph: Graph, main: str, request: _Request, generation: MaskedDiffusion, ends: _Ends
) -> tuple[list[Tensor], int]:
    """Generate by masked diffusion. Return the tokens [b] of each position, and the number of forwards."""
    _check_unmasked(request.tokens if request.mask is None else request.tokens[request.mask], generation.mask_token)
    repeated = partial(torch.repeat_interleave, repeats=request.n_samples, dim=0)
    arguments = {name: repeated(value) for name, value in request.inputs.items()}
    mask = None if request.mask is None else repeated(request.mask)
    arguments |= _answer_mask(graph, main, mask, request.max_new_tokens)
    full_model, device = _FullModel(model, graph, main, arguments), next(model.parameters()).device
    draws = Draws(request.numbers, request.n_samples, seed=request.seed, device=device)
    tokens = repeated(request.tokens).to(device)
    blocks = generation.blocks(full_model, tokens, request.max_new_tokens, request.sampling, draws)
    return list(_block_tokens(blocks, ends)), full_model.forwards


def _continue(
    cached: CachedModel, drafting: Drafts | None, graph: Graph, main: str, request: _Request, ends: _Ends
) -> tuple[list[Tensor], int]:
    """Generate one token after the other. Return the tokens [b] of each step, and the number of forwards."""
    for error in input_errors(graph, {main: request.tokens, **request.inputs}):
        raise error
    n_samples, limit = request.n_samples, request.max_new_tokens
    device = next(cached.model.parameters()).device
    cached.start(len(request.tokens), **{name: value.to(device) for name, value in request.inputs.items()})
    tokens, mask = request.tokens.to(device), None if request.mask is None else request.mask.to(device)
    sampler = Sampler(request.sampling, request.numbers, n_samples, limit, seed=request.seed, device=device)
    result = cached(tokens, mask, keep=1)
    logits = (drafting.read(result) if drafting else result)[:, -1]
    if n_samples > 1:
        cached.repeat(n_samples)
        logits, tokens = (tensor.repeat_interleave(n_samples, dim=0) for tensor in (logits, tokens))
        mask = None if mask is None else mask.repeat_interleave(n_samples, dim=0)
    sampler.read(tokens, mask, logits.size(-1))
    if drafting is None:
        steps = list(_step_tokens(cached, logits, sampler, ends, limit))
        return steps, len(steps)
    drafting.start(tokens, mask, n_samples)
    steps = list(_draft_steps(drafting, logits, sampler, ends, limit))
    return steps, drafting.forwards


def _step_input(graph: Graph) -> str:
    """Return the input of the tokens that are generated one after the other."""
    try:
        main, *further = split_for_decoding(graph).step_inputs
    except SpecError as error:
        help = "pass `generation=tfkit.MaskedDiffusion(mask_token)` if the model was trained to predict masked tokens"
        raise SpecError(*(replace(diagnostic, help=help) for diagnostic in error.diagnostics)) from error
    if missing := [name for name in further if not graph.inputs[name].optional]:
        reason = "which `generate` does not have: choose a different output"
        raise ValueError(f"the output `{graph.outputs[0]}` takes {listing(missing)} at every step, {reason}")
    return main


def _check_unused(**values: Any) -> None:
    """Raise ValueError for an argument that has no effect on masked diffusion."""
    if names := [name for name, value in values.items() if value]:
        raise ValueError(f"`{names[0]}` cannot be combined with masked diffusion, which computes full sequences")


def _check_unmasked(tokens: Tensor, mask_token: int) -> None:
    if bool((tokens == mask_token).any()):
        raise ValueError(f"a prompt must not contain the mask token; got {mask_token}")


def _answer_mask(graph: Graph, main: str, mask: Tensor | None, new: int) -> dict[str, Tensor]:
    """Return the padding mask of prompts with their answers, by the name of the input."""
    name = graph.inputs[main].mask
    if mask is None:
        return {}
    if name is None:
        raise ValueError(f"prompts must have equal lengths: `{main}` of `{graph.name}` has no padding mask")
    return {name: F.pad(mask, (0, new), value=True)}


class _FullModel:
    """A model that computes the logits [b, t, V] of full sequences [b, t]. It counts its forwards."""

    def __init__(self, model: fx.GraphModule, graph: Graph, main: str, arguments: Mapping[str, Tensor]) -> None:
        self.forwards = 0
        self._model, self._graph, self._main = model, graph, main
        self._device = next(model.parameters()).device
        self._arguments = {name: value.to(self._device) for name, value in arguments.items()}
        self._output = graph_of(model).outputs.index(graph.outputs[0])

    def __call__(self, tokens: Tensor) -> Tensor:
        inputs = {self._main: tokens, **self._arguments}
        for error in input_errors(self._graph, inputs) if self.forwards == 0 else ():
            raise error
        self.forwards += 1
        result = self._model(**inputs)
        logits: Tensor = result if isinstance(result, Tensor) else result[self._output]
        _check_numbers(logits)
        return logits


def _block_tokens(blocks: Iterable[Tensor], ends: _Ends) -> Iterator[Tensor]:
    """Yield the tokens [b] of each position of the blocks [b, n], as `_step_tokens`."""
    for block in blocks:
        for tokens in block.unbind(dim=1):
            yield tokens
            if ends.after(tokens):
                return


def _output_of(model: BuiltModel | CachedModel, graph: Graph, output: str | None) -> str:
    """Return the output that chooses the tokens."""
    if isinstance(model, CachedModel):
        if output is not None or (model.output is None and len(graph.outputs) > 1):
            raise ValueError("a CachedModel must be created with the output: `CachedModel(model, output=...)`")
        output = model.output
    return output or graph.outputs[0]


def _drafts(
    model: BuiltModel | CachedModel, full: Graph, graph: Graph, names: Sequence[str], length: int, compile: bool | str
) -> Drafts:
    """Return the drafts of further outputs of the graph `full`, for the output of `graph`."""
    if compile or isinstance(model, CachedModel):
        raise ValueError("`drafts` cannot be combined with `compile` or a CachedModel")
    return Drafts(unwrapped_model(model), full, graph.outputs[0], names, length)


def _cached_model(
    model: BuiltModel | CachedModel, graph: Graph, prompt: int, new: int, length: int | None, compile: bool | str
) -> CachedModel:
    """Return a `CachedModel` for prompt and answer; raise ValueError if they are too long for the model."""
    if not isinstance(model, CachedModel):
        return CachedModel(
            model, length=_checked_room(graph, prompt, new, length), output=graph.outputs[0], compile=compile
        )
    if length is not None or compile:
        raise ValueError("length and compile have no effect on a CachedModel: pass them to its constructor")
    _check_room(prompt, new, model.length)
    return model


def _checked_room(graph: Graph, prompt: int, new: int, length: int | None) -> int:
    """Return the length of the caches; raise ValueError if prompt and answer are too long for the model."""
    limits = [limit for limit in (length, max_len(graph)) if limit is not None]
    _check_room(prompt, new, min(limits, default=prompt + new))
    return length or prompt + new


def _step_tokens(cached: CachedModel, logits: Tensor, sampler: Sampler, ends: _Ends, limit: int) -> Iterator[Tensor]:
    """Yield the tokens [b] of each step."""
    _check_numbers(logits)
    for step in range(limit):
        tokens = sampler(logits)
        yield tokens
        if ends.after(tokens) or step == limit - 1:
            break
        logits = cached(tokens[:, None], keep=1)[:, -1]
    _check_numbers(logits)  # NaN persists in the caches, so a single check at the end suffices


def _draft_steps(drafting: Drafts, logits: Tensor, sampler: Sampler, ends: _Ends, limit: int) -> Iterator[Tensor]:
    """Yield the tokens [b] of each step, as `_step_tokens`, and verify drafts of several tokens in one forward.

    The sampler chooses every token from the logits of the model. A draft only decides whether the logits after it are
    already there, so a sampler with the same random numbers chooses the same tokens.
    """
    _check_numbers(logits)
    drafted: list[Tensor] = []
    verified: list[Tensor] = []
    for step in range(limit):
        tokens = sampler(logits)
        yield tokens
        if ends.after(tokens) or step == limit - 1:
            break
        if drafted and bool((ends.running(tokens) & (tokens != drafted[0])).any()):
            drafting.reject(len(drafted))
            drafted, verified = [], []
        drafting.accept(tokens)
        if drafted:
            drafted = drafted[1:]
        else:
            drafted, verified = drafting.verify(limit - step - 2)
        logits, *verified = verified
    _check_numbers(logits)


class _Ends:
    """Records when and why rows end. Without a stop condition, tokens are not copied from the device."""

    def __init__(self, stops: Sequence[tuple[int, ...]], on_token: OnToken | None) -> None:
        self._stops = stops
        self._on_token = on_token
        self._tails: defaultdict[int, list[int]] = defaultdict(list)
        self._lengths: dict[int, int] = {}
        self._longest = max(map(len, stops), default=0)
        self._steps = 0

    def after(self, tokens: Tensor) -> bool:
        """Process the tokens [b] of a step; return True if all rows have ended."""
        self._steps += 1
        if not self._stops and self._on_token is None:
            return False
        ids = tokens.tolist()
        running = [row for row in range(len(ids)) if row not in self._lengths]
        ended = {row for row in running if self._stops_at(row, ids[row])}
        if self._on_token is not None:
            continuing = [None if row in self._lengths else token for row, token in enumerate(ids)]
            ended |= _rows_to_end(self._on_token(continuing), len(ids)) & set(running)
        self._lengths.update(dict.fromkeys(ended, self._steps))
        return len(self._lengths) == len(ids)

    def running(self, tokens: Tensor) -> Tensor:
        """Return bool [b], False for rows that have ended."""
        rows = [row not in self._lengths for row in range(tokens.size(0))]
        return torch.tensor(rows, device=tokens.device)

    def _stops_at(self, row: int, token: int) -> bool:
        tail = self._tails[row]
        tail.append(token)
        del tail[: -self._longest or len(tail)]
        return any(len(tail) >= len(stop) and tuple(tail[-len(stop) :]) == stop for stop in self._stops)

    def generated(self, tokens: Tensor, pad: int, forwards: int) -> Generated:
        """Return the result for the tokens [b, t] of all steps."""
        rows = range(tokens.size(0))
        lengths = tuple(self._lengths.get(row, self._steps) for row in rows)
        ended: tuple[End, ...] = tuple("stop" if row in self._lengths else "length" for row in rows)
        counts = torch.tensor(lengths, device=tokens.device)[:, None]
        padding = torch.arange(tokens.size(1), device=tokens.device) >= counts
        return Generated(tokens.masked_fill(padding, pad), lengths, ended, forwards)


def _rows_to_end(returned: Iterable[int] | None, count: int) -> set[int]:
    """Check the rows that `on_token` returned; raise ValueError for any other value."""
    rows = [] if returned is None else returned
    if not is_allowed_value(rows, Iterable[int]) or not set(rows) <= set(range(count)):
        raise ValueError(
            f"`on_token` must return None or numbers of rows, 0 to {count - 1}; got {value_text(returned)}"
        )
    return set(rows)


def left_padded(tokens: Tokens, mask: Tensor | None = None, *, pad: int = 0) -> tuple[Tensor, Tensor | None]:
    """Move all padding to the left, so the last column has only tokens. Return tokens and mask [b, t].

    The mask is None if there is no padding. Raises ValueError for values that are not sequences of tokens.
    """
    if not isinstance(tokens, Tensor):
        if mask is not None:
            raise ValueError("mask has no effect with lists, which have no padding")
        tokens, mask = _from_lists(tokens, pad)
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.is_complex() or tokens.size(0) == 0:
        shape = ", ".join(map(str, tokens.shape))
        raise ValueError(f"tokens must be integers [b, t]; got {tokens.dtype} [{shape}]")
    tokens = tokens.long()
    real = None if mask is None else as_padding_mask(mask.cpu(), "mask")
    mask = torch.ones_like(tokens, dtype=torch.bool) if real is None else real.to(tokens.device)
    if mask.shape != tokens.shape:
        raise ValueError(f"mask must have the shape of tokens, {list(tokens.shape)}; got {list(mask.shape)}")
    empty = [row for row, count in enumerate(mask.sum(dim=1).tolist()) if count == 0]
    if empty:
        raise ValueError(f"prompt {empty[0] + 1} of {len(tokens)} must have at least one token")
    order = mask.int().argsort(dim=1, stable=True)  # stable: tokens keep their order
    tokens, mask = tokens.gather(1, order).masked_fill(~mask.gather(1, order), pad), mask.gather(1, order)
    first = int(mask.any(dim=0).int().argmax())
    tokens, mask = tokens[:, first:], mask[:, first:]
    return tokens, None if bool(mask.all()) else mask


def _from_lists(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    if not rows:
        raise ValueError("there must be a prompt, for instance [[1, 2, 3]]")
    width = max(map(len, rows))
    tokens = [[pad] * (width - len(row)) + list(row) for row in rows]
    mask = [[False] * (width - len(row)) + [True] * len(row) for row in rows]
    return torch.tensor(tokens, dtype=torch.long, device="cpu"), torch.tensor(mask, dtype=torch.bool, device="cpu")


def _padded_inputs(inputs: Mapping[str, Any], pad: int) -> dict[str, Tensor]:
    """Return the remaining inputs of the model, with masks for inputs that are lists."""
    tensors: dict[str, Tensor] = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif value is not None:
            tensors[name], mask = left_padded(value, pad=pad)
            tensors |= {} if mask is None else {f"{name}_mask": mask}
    return tensors


def _check_names(graph: Graph, main: str, inputs: Mapping[str, Any]) -> None:
    """Raise TypeError for names that are neither arguments of `generate` nor inputs of the model."""
    further = [name for name in graph.inputs if name != main]
    names = [*further, *(f"{name}_mask" for name in further)]
    for name, value in inputs.items():
        if name not in names:
            raise no_argument(name, [*_argument_names(), *names])
        check_argument("generate", name, value, Tokens | None)


def _argument_names() -> list[str]:
    return [name for name in inspect.signature(generate).parameters if name != "inputs"]


def _check_room(prompt: int, new: int, length: int) -> None:
    if prompt >= length:
        raise ValueError(f"a prompt must be shorter than the maximum length of the model, {length}; got {prompt}")
    if prompt + new > length:
        message = f"a prompt of {prompt} tokens with {new} new tokens exceeds the maximum length of the model, {length}"
        raise ValueError(f"{message}: max_new_tokens must be at most {length - prompt}")


def _check_numbers(logits: Tensor) -> None:
    if bool(logits.isnan().any()):
        raise ValueError(f"the logits are NaN in {logits.dtype}: the weights are corrupt, or too large for this type")


def _stop_sequences(stop: Iterable[int | Sequence[int]]) -> list[tuple[int, ...]]:
    sequences = [(item,) if isinstance(item, int) else tuple(item) for item in stop]
    if () in sequences:
        raise ValueError("a stop sequence must have a token")
    return sequences
