"""Incremental decoding: the model processes each token once, and caches the tensors that later tokens need.

Caches are arguments of modules. Each attention declares the tensors that it caches (`AttentionConfig.cached`), and each
block the arguments that it takes for decoding (`BlockConfig.decoding`). `CachedModel` splits the graph into nodes that
run once, such as an encoder, and nodes that run at every step, and calls the model's modules for both, so there is no
second implementation that could differ. Modules have no state, so the stepping module can be compiled, scripted and
exported like the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from tfkit.arguments import Positive, checked, value_text
from tfkit.building.builder import graph_of, inputs_of
from tfkit.building.model import (
    BuiltModel,
    call_in_forward,
    input_errors,
    is_sharded,
    name_layer,
    sharded_dtype,
    unwrapped_model,
)
from tfkit.component import Cached, Decoding, State
from tfkit.decoding.modules import cache_sizes, initial_value_names, reading_module, stepping_module
from tfkit.errors import listing
from tfkit.graph.decode_split import memory_field, reduce_to_output, split_for_decoding
from tfkit.graph.expand import Graph
from tfkit.graph.input_shapes import fixed_lengths, max_len, max_len_text
from tfkit.nn import Past, as_padding_mask, check_length
from tfkit.nn.kernels import ask_once, decoding
from tfkit.torch_private import compiler
from tfkit.torch_private.tensors import map_nested, tensors_in


class CachedModel:
    """A built model that processes sequences incrementally, with the same results as one full forward.

        cached = tfkit.CachedModel(model.eval(), length=256)
        logits = cached(prompt)                               # [b, t, vocab_size]
        logits = cached(logits[:, -1:].argmax(dim=-1))        # [b, 1, vocab_size]

    The caches are created once for `length` tokens; a sliding window caches the tokens within it. Padding is not
    cached: each sequence of a batch has the positions that it would have alone. `stepping` is the module that reads
    a piece, which can be scripted or exported: it takes the inputs, a `tfkit.Past`, the caches by name, and the number
    of positions to keep.

    Args:
        model: the result of `tfkit.build`, in eval mode; wrapped or sharded as `docs/around.md` says.
        length: the most tokens that a sequence may have, padding included; the model's `max_len` unless given. Rotary
            scalings that depend on the length of the sequence take this one.
        output: the output to compute, if the model has several; all of them unless given.
        compile: if true, compile the step of one token with `torch.compile`. It reads all of the caches, so that its
            shapes stay the same and it is compiled once. A text is a mode of `torch.compile`: with `reduce-overhead`, a
            CUDA graph runs the step without any Python code.

    Raises:
        SpecError: the model needs whole sequences, as an encoder does.
        ValueError: it is in train mode, or has no such output; `length` is missing, or beyond the model's `max_len`.
    """

    output: str | None = None
    """The output that it computes; None for all of them."""

    @checked
    def __init__(
        self,
        model: BuiltModel,
        *,
        length: Positive | None = None,
        output: str | None = None,
        compile: bool | str = False,
    ) -> None:
        model = unwrapped_model(model)
        graph = graph_of(model) if output is None else reduce_to_output(graph_of(model), output)
        self._prepare(model, graph, length, compile)
        self.output = output

    @classmethod
    def of_graph(cls, model: BuiltModel, graph: Graph, length: int) -> CachedModel:
        """Return the modules of a model with caches, for a graph of some of its nodes."""
        cached = cls.__new__(cls)
        cached._prepare(unwrapped_model(model), graph, length, False)
        return cached

    def _prepare(self, model: fx.GraphModule, graph: Graph, length: int | None, compile: bool | str) -> None:
        mode = _checked_mode(compile)
        if compile and is_sharded(model):
            raise ValueError("compile cannot be combined with `fully_shard`, which gathers parameters at each step")
        if any(module.training for module in model.modules()):
            raise ValueError("the model is in train mode, and dropout would act: call `model.eval()` first")
        self.length: int = _checked_length(length, graph)
        self.used: int = 0
        self._parts = split_for_decoding(graph)
        self._graph = graph
        self.model = model
        self._reading = reading_module(model, graph, self._parts) if self._parts.initial_nodes else None
        self.stepping: fx.GraphModule = stepping_module(model, graph, self._parts)
        self._takes = inputs_of(self.stepping)
        self._compiled = torch.compile(self.stepping, fullgraph=True, dynamic=False, mode=mode) if compile else None
        self._batch = self._asked_for = 0
        self._cache: dict[str, list[list[Tensor]]] = {}
        self._lengths: Tensor | None = None
        self._first: dict[str, Tensor] = {}
        self._always: dict[str, Tensor] = {}
        self._blocks: dict[str, list[int]] = {}
        """The number of the block of the last token of each row, by the names of inputs."""

    @checked
    @torch.no_grad()
    def start(self, batch: Positive, /, **inputs: Tensor) -> None:
        """Begin new sequences, and read the inputs that are given once: an encoder's input, a prefix.

        Args:
            batch: number of sequences.
            inputs: by the names of the spec, a padding mask as `NAME_mask`.

        Raises:
            ValueError: an input is missing, unknown, or of another batch.
        """
        names = self._parts.initial_inputs
        _check_names(inputs, [name for name in names if not self._graph.inputs[name].optional], names)
        fixed = fixed_lengths(self._graph)
        for name, value in inputs.items():
            if value.dim() == 0:
                raise ValueError(f"`{name}` has no rows: it is a single number")
            hidden = inputs.get(name.removesuffix("_mask"), value).shape[:2]
            if value.size(0) != batch:
                raise ValueError(f"`{name}` has {value.size(0)} rows, but the batch has {batch}")
            if value.dim() > 1 and value.shape[:2] != hidden:
                shape = tuple(value.shape[:2])
                raise ValueError(f"`{name}` is {shape}, but the input that it masks is {tuple(hidden)}")
            if name in fixed and value.dim() > 1:
                check_length(value, fixed[name], f"`{name}`")
        values = dict(inputs)
        if self._reading is not None:
            taken = inputs_of(self._reading)
            arguments = {name: value for name, value in inputs.items() if name in taken}
            with self._explained(inputs):
                outputs = call_in_forward(self.model, partial(self._reading, **arguments))
            values |= {
                n: value
                for n, value in zip(initial_value_names(self._parts), outputs, strict=True)
                if value is not None
            }
        self._batch, self.used, self._lengths, self._blocks = batch, 0, None, {}
        always = {name for name in values if name.endswith("_mask")}.union(self._parts.repeated_sources)
        self._always = {n: x for n, x in values.items() if n in self._takes and n in always}
        self._first = {n: x for n, x in values.items() if n in self._takes and n not in self._always}
        self._make_caches(batch)

    @torch.no_grad()
    def __call__(self, tokens: Tensor, mask: Tensor | None = None, /, *, keep: int = 0, **inputs: Tensor) -> Tensor:
        """Read the next piece of each sequence.

        Args:
            tokens: [b, t], the next tokens.
            mask: bool [b, t], True where there is a token. Padding may stand anywhere.
            keep: number of last positions to make logits of; 0: all.
            inputs: further inputs that are read incrementally, by the names of the spec.

        Returns:
            Logits [b, t or keep, vocab_size], or whatever the model returns.

        Raises:
            ValueError: no place is left, or the number of rows differs from the number of sequences.
        """
        _check_call(tokens, mask, keep)
        if not self._batch:
            self.start(tokens.size(0))
        mask = as_padding_mask(mask, "mask")
        self._check_piece(tokens, mask, inputs)
        if self._lengths is None and (mask is not None or self._compiled is not None):
            self._lengths = torch.full((tokens.size(0),), self.used, device=tokens.device)
        arguments = self._always | inputs | (self._first if self.used == 0 else {})
        main = self._parts.step_inputs[0]
        arguments[main] = tokens
        mask_name = self._graph.inputs[main].mask
        if mask is not None and mask_name in self._takes:
            arguments[mask_name] = mask
        with self._explained({main: tokens, **inputs}):
            result = self._step(arguments, tokens.size(1), keep)
        self.used += tokens.size(1)
        if self._lengths is not None:
            self._lengths = self._lengths + (tokens.size(1) if mask is None else mask.sum(dim=1))
        return result

    @contextmanager
    def _explained(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Replace an error that invalid inputs cause by a clear error; add the failing module to any other error."""
        try:
            yield
        except Exception as error:
            for input_error in input_errors(self._graph, inputs, next(self.model.parameters(), None)):
                raise input_error from error
            name_layer(error, self.model)
            raise

    def _step(self, arguments: dict[str, Tensor], t: int, keep: int) -> Any:
        if self._compiled is None or t > 1 or self.used == 0:
            past = Past(self.used, self.length, self._lengths)
            if t == 1 and self._batch != self._asked_for:
                ask_once(self.model, self._batch)
                self._asked_for = self._batch
            step = partial(self.stepping, **arguments, past=past, cache=self._cache, keep=keep)
            with decoding:
                return call_in_forward(self.model, step)
        past = Past(self.length - 1, self.length, self._lengths)
        # Compiled code may overwrite the returned memory in the next step.
        return map_nested(torch.clone, self._compiled(**arguments, past=past, cache=self._cache, keep=0))

    @checked
    def repeat(self, n: Positive) -> None:
        """Continue every sequence `n` times, in rows next to each other: several samples of one prompt.

        Raises:
            ValueError: no sequence was begun.
        """
        if not self._batch:
            raise ValueError("there is no sequence to repeat yet: call `repeat` after a first piece")
        self._batch *= n
        with torch.inference_mode(False):
            self._cache = map_nested(lambda tensor: tensor.repeat_interleave(n, dim=0), self._cache)
        self._stay_where_they_are()
        self._first = {name: value.repeat_interleave(n, dim=0) for name, value in self._first.items()}
        self._always = {name: value.repeat_interleave(n, dim=0) for name, value in self._always.items()}
        self._lengths = None if self._lengths is None else self._lengths.repeat_interleave(n)
        self._blocks = {name: [last for last in rows for _ in range(n)] for name, rows in self._blocks.items()}

    def rewind(self, n: int, mask: Tensor | None = None) -> None:
        """Forget the last `n` columns of every sequence. `mask`, bool [b, n], is False at padding.

        Raises:
            ValueError: more columns than were read, or a tensor of the model cannot go back.
        """
        if not 0 <= n <= self.used:
            raise ValueError(f"rewind must be between 0 and {self.used}, the columns that were read; got {n}")
        check_rewinds(self)
        self._blocks = {}
        self.used -= n
        if self._lengths is not None:
            self._lengths = self._lengths - (n if mask is None else mask.sum(dim=1))

    @property
    def nbytes(self) -> int:
        """Memory of the caches in bytes."""
        return sum(tensor.nbytes for tensor in tensors_in(self._cache))

    def tensors(self) -> Iterator[tuple[str, Cached | State, Tensor]]:
        """Yield the tensors that the model keeps, each with the path of its layer and its declaration."""
        for name, (node, needs) in self._parts.step_nodes.items():
            for key, layers in {name: needs.caches, f"{name}.memory": needs.memory_caches}.items():
                runs = node.stack.runs if node.stack and layers else range(len(layers))
                for number, entries, tensors in zip(runs, layers, self._cache.get(key, []), strict=True):
                    path = f"{name}.layers.{number}"
                    yield from ((path, entry, tensor) for entry, tensor in zip(entries, tensors, strict=True))

    @property
    def step_inputs(self) -> tuple[str, ...]:
        """The inputs that are read at every step; `__call__` takes the first as its tokens."""
        return self._parts.step_inputs

    def step_parts(self) -> Iterator[tuple[str, Decoding]]:
        """Yield the nodes that run at every step, with the arguments that they take for decoding."""
        yield from ((name, needs) for name, (_, needs) in self._parts.step_nodes.items())

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Types of the numbers in the caches."""
        return {tensor.dtype for tensor in tensors_in(self._cache)}

    def _make_caches(self, batch: int) -> None:
        """Create the caches, or reset caches of the right shape to zero, because a mask does not hide NaN."""
        parameter = next(self.model.parameters(), torch.empty(0))
        device, dtype = parameter.device, sharded_dtype(self.model) or parameter.dtype
        if device.type != "meta" and torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        memory = {name: value.size(1) for name, value in self._first.items() if value.dim() > 1}
        sizes = cache_sizes(
            self._parts, batch, self.length, lambda node: memory[str(node.wires[memory_field(node)])], dtype
        )
        for name, layers in sizes.items():
            old = self._cache.get(name, [])
            fits = [[(shape, dtype, device) for shape, dtype in layer] for layer in layers]
            if [[(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors] for tensors in old] == fits:
                for tensor in tensors_in(old):
                    tensor.zero_()
            else:
                with torch.inference_mode(False):  # caches must stay writable outside of inference mode
                    self._cache[name] = [
                        [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in layer] for layer in layers
                    ]
        self._stay_where_they_are()

    def _stay_where_they_are(self) -> None:
        """Mark the caches as tensors with a fixed address, so a CUDA graph can write to them."""
        for tensor in tensors_in(self._cache) if self._compiled is not None else ():
            compiler.stay_in_place(tensor)

    def _check_piece(self, tokens: Tensor, mask: Tensor | None, inputs: Mapping[str, Tensor]) -> None:
        shape, t = tuple(tokens.shape[:2]), tokens.size(1)
        if shape[0] != self._batch:
            raise ValueError(f"{shape[0]} rows of tokens for {self._batch} sequences: call `start`")
        if t == 0:
            raise ValueError("a step must have at least one token")
        if self.used + t > self.length:
            raise ValueError(f"{t} more tokens do not fit: {self.used} of {self.length} positions are used")
        if mask is not None and mask.shape != shape:
            raise ValueError(f"the mask must have the shape of the tokens, {shape}; got {tuple(mask.shape)}")
        names = self._parts.step_inputs[1:]
        _check_names(inputs, [name for name in names if not self._graph.inputs[name].optional], names)
        for name, value in inputs.items():
            if value.shape[:2] != shape:
                raise ValueError(f"`{name}` is {tuple(value.shape[:2])}, and the tokens are {shape}")
        if self.used == 0:
            self._check_prefix(tokens, mask)
        for name in self._parts.block_inputs:
            self._blocks[name] = self._last_blocks(name, block_numbers(self._graph, name, tokens, inputs), mask)

    def _last_blocks(self, name: str, blocks: Tensor, mask: Tensor | None) -> list[int]:
        """Return the block of the last token of each row; raise ValueError if a block of the previous piece continues.

        Earlier tokens of the block would have to attend to the new tokens.
        """
        latest = []
        masks = torch.ones_like(blocks) if mask is None else mask
        for last, numbers, real in zip(
            self._blocks.get(name, [0] * len(blocks)), blocks.tolist(), masks.tolist(), strict=True
        ):
            of_tokens = [last, *(number for number, is_token in zip(numbers, real, strict=True) if is_token)]
            if len(of_tokens) > 1 and 0 < of_tokens[1] == last:
                raise ValueError(
                    f"`{name}` must have all tokens of a block in one piece; got more tokens of block {last}"
                )
            latest.append(of_tokens[-1])
        return latest

    def _check_prefix(self, tokens: Tensor, mask: Tensor | None) -> None:
        """Raise ValueError if a prefix is longer than the first piece, because every query attends to the prefix."""
        counts = [tokens.size(1)] * tokens.size(0) if mask is None else mask.sum(dim=1).tolist()
        for name in self._parts.initial_inputs:
            if self._graph.inputs[name].type != "lengths":
                continue
            for prefix, count in zip(self._always[name].tolist(), counts, strict=True):
                if prefix > count:
                    raise ValueError(
                        f"`{name}` is {prefix}, but the first piece, which must contain it, has {count} tokens"
                    )


def check_rewinds(cached: CachedModel) -> None:
    """Raise ValueError if a cache overwrites what earlier positions need: a state, or a ring of a sliding window."""
    for node, needs in cached.step_parts():
        for entry in (entry for layer in needs.caches for entry in layer):
            if isinstance(entry, State):
                raise ValueError(f"`{node}` has a state, which cannot go back to an earlier token")
            if entry.tokens(cached.length) < cached.length:
                raise ValueError(
                    f"`{node}` has a sliding window of {entry.window} tokens, whose cache cannot go back "
                    "to an earlier token"
                )


def _checked_mode(compile: bool | str) -> str | None:
    """Return the mode for `torch.compile`; None if `compile` is True or False."""
    if isinstance(compile, bool):
        return None
    modes = compiler.compile_modes()
    if compile not in modes:
        raise ValueError(
            f"`compile` must be True, False or a mode of torch.compile, one of {', '.join(modes)}; "
            f"got {value_text(compile)}"
        )
    return compile


def _checked_length(length: int | None, graph: Graph) -> int:
    limit = max_len(graph)
    length = limit if length is None else length
    if length is None:
        raise ValueError(f"`{graph.name}` has no max_len: set the maximum length of sequences, `length=...`")
    if limit is not None and length > limit:
        raise ValueError(f"a length of {length} tokens is more than {max_len_text(limit)}")
    return length


def _check_call(tokens: object, mask: object, keep: object) -> None:
    """Raise TypeError or ValueError for arguments of the wrong type. The checks are few: every token runs them."""
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        description = list(tokens.shape) if isinstance(tokens, Tensor) else value_text(tokens)
        raise TypeError(
            f"the tokens of a piece must be a tensor [b, t], or [b, t, width] of vectors; got {description}"
        )
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(f"the mask of a piece must be a tensor [b, t]; got {value_text(mask)}")
    if not isinstance(keep, int) or keep < 0:
        raise ValueError(f"keep must be an integer of 0 or more; got {value_text(keep)}")


def _check_names(inputs: Mapping[str, Tensor], required: Collection[str], names: Collection[str]) -> None:
    """Raise ValueError if an input is missing or unknown. Each input may come with its mask."""
    if missing := [name for name in required if name not in inputs]:
        raise ValueError(f"missing: {listing(missing)}")
    if unknown := [name for name in inputs if name.removesuffix("_mask") not in names]:
        raise ValueError(f"unknown inputs: {listing(unknown)}; possible inputs: {listing(names) or 'none'}")


def block_numbers(graph: Graph, name: str, tokens: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the block of each token, [b, t], from an input or a node that finds placeholders; 0 for none."""
    if name in graph.inputs:
        return inputs.get(name, torch.zeros_like(tokens))
    token = next(iter(graph.node(name).config.placeholders().values()), -1)
    return (tokens == token).long()
