"""The loss of a model with a large vocabulary, without holding all of its logits in memory.

In a module that contains a model and its `Loss`, the parameters have two names, and torch would write both to the state
dict. This module writes only the shorter name, and loading accepts either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from tfkit.arguments import INT64, Limit, checked, unknown_argument, value_text
from tfkit.building.builder import graph_of, inputs_of
from tfkit.building.model import BuiltModel, call_in_forward, explained_error, is_sharded
from tfkit.errors import listing
from tfkit.learning.chunked_loss import ChunkedLoss, chunk_count
from tfkit.learning.output_term import OutputConfig
from tfkit.learning.without_head import Ends, built_model, find_ends, write_trunk
from tfkit.torch_private.sharding import local_part
from tfkit.torch_private.tensors import has_state_dict_hook, storage_key
from tfkit.torch_private.transforms import is_transformed


@dataclass
class _Load:
    """A call of `load_state_dict`, identified by its list of missing keys, and the names of the model that it loads."""

    missing: list[str]
    loaded: dict[str, bool] = field(default_factory=dict)


_LOADS: WeakKeyDictionary[nn.Module, _Load] = WeakKeyDictionary()


def keep_once(model: nn.Module) -> None:
    """Write a model only once into state dicts, and accept a state dict that has it under any of its names."""
    if not has_state_dict_hook(model, _drop_copies):
        model.register_state_dict_post_hook(_drop_copies)
        model.register_load_state_dict_pre_hook(_note_loaded_prefix)
        model.register_load_state_dict_post_hook(_drop_missing_copies)


def _drop_copies(model: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Keep the shorter of two names of the model in a state dict: `prefix`, and a name that was written before."""
    values = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    name = next(iter(values), None)
    if name is None:
        return
    prefixes = [key.removesuffix(name) for key in state if key.endswith(f".{name}") or key == name]
    for other in prefixes:
        if other == prefix or not all(
            _has_same_memory(state.get(other + suffix), value) for suffix, value in values.items()
        ):
            continue
        for suffix in values:
            del state[(other if len(other) > len(prefix) else prefix) + suffix]
        return


def _has_same_memory(value: object, other: object) -> bool:
    """Return True if two values of a state dict share their memory; for a `DTensor`, if its local tensors do."""
    value, other = local_part(value), local_part(other)
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return value is other
    return value.shape == other.shape and storage_key(value) == storage_key(other)


def _note_loaded_prefix(model: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    missing: list[str] = rest[2]
    if model not in _LOADS or _LOADS[model].missing is not missing:
        _LOADS[model] = _Load(missing)
    _LOADS[model].loaded[prefix] = any(key.startswith(prefix) for key in state)


def _drop_missing_copies(model: nn.Module, _incompatible: Any) -> None:
    """Do not report the keys of one name of the model as missing if a different name was loaded."""
    load = _LOADS[model]
    if any(load.loaded.values()):
        absent = tuple(prefix for prefix, loaded in load.loaded.items() if not loaded)
        load.missing[:] = [key for key in load.missing if not key.startswith(absent)]


Inputs: TypeAlias = Tensor | Mapping[str, Tensor | None]
Targets: TypeAlias = Tensor | Mapping[str, Tensor]
Outputs: TypeAlias = Annotated[Mapping[str, Any], "a mapping of outputs to weights, or to `weight` and `shift`"]
Reduction: TypeAlias = Literal["mean", "sum"]
Ignored: TypeAlias = Annotated[int, INT64]
ChunkCount: TypeAlias = Annotated[int, Limit(minimum=1, maximum=2**16)]
Smoothing: TypeAlias = Annotated[float, Limit(minimum=0, maximum=1)]
Weight: TypeAlias = Annotated[float, Limit(minimum=0, maximum=1)]


class HeadInput(NamedTuple):
    """The state of a model's computation when its head is reached.

    Attributes:
        hidden: the input of the head: [b, t, width], or [b, width] if it reads one vector per sequence.
        mask: the padding mask of that input, [b, t]; None without padding.
        tokens: the tokens at the same positions, [b, t]; None for a head without tokens.
        extra: additional arguments of the head.
    """

    hidden: Tensor
    mask: Tensor | None
    tokens: Tensor | None
    extra: Mapping[str, Any]


class Loss(nn.Module):
    """The cross-entropy of a built model as a module, for a training loop to call, compile or distribute.

        loss = tfkit.Loss(model)
        loss(tokens).backward()                               # the next token is the target

        loss = tfkit.Loss(encoder_decoder)                    # several inputs: all of them by name
        loss({"source": source, "target": target}).backward() # the next token of `target`
        loss({"source": source, "target": target}, labels)    # or targets of your own, [b, t]

        loss = tfkit.Loss(model, outputs={"logits": 1.0, "later": {"weight": 0.3, "shift": 2}})  # several outputs
        loss(tokens).backward()                               # the next token, and the token after it
        loss(tokens, {"logits": labels, "later": classes})    # or targets by name

    The loss equals `F.cross_entropy` of the model's logits in value and gradients, but is 0 if no position counts. The
    module computes the logits chunk by chunk and, with each chunk, the gradients of the head's input and weights, which
    are kept until `backward`. The result is float32 if the model has half precision. `torch.compile(loss)` has no graph
    break; if `chunks` is set, the compiled code does not depend on the number of tokens. The module calls the nodes of
    the model, not the model, so hooks on the model do not run: compile the loss instead, or wrap the loss for
    distributed training (`docs/around.md`). In a module that contains the model and its loss, the state dict has the
    weights once.

    b batch, t length.

    Args:
        model: the result of `tfkit.build`; it returns logits, from a head that computes each position independently.
        outputs: the outputs in the loss, each with its weight, or with `weight` and `shift`, the distance of the tokens
            that it predicts. The loss is the weighted sum of their means. By default the only output.
        ignore_index: the target of positions that do not count.
        label_smoothing: the fraction of every target that is distributed evenly over the vocabulary.
        z_loss: the weight of log(Z)^2, added for each position that counts, where Z is the sum of the exponentials of
            its logits (https://arxiv.org/abs/2204.02311): it keeps logits from drifting.
        reduction: the mean over the positions that count; or their sum, if batches of unequal size form one step: with
            `outputs`, the sum of each without its weight, [n].
        chunks: the number of chunks; by default, enough that the logits take little memory. More chunks take less
            memory and more time.

    Raises:
        TypeError: an argument is unknown, or has a wrong type.
        ValueError: the model was not built by tfkit or is wrapped, does not return logits or returns more than them;
            an argument is out of its range.
    """

    @checked
    def __init__(
        self,
        model: BuiltModel,
        *,
        outputs: Outputs | None = None,
        ignore_index: Ignored = -100,
        label_smoothing: Smoothing = 0.0,
        z_loss: Weight = 0.0,
        reduction: Reduction = "mean",
        chunks: ChunkCount | None = None,
    ) -> None:
        super().__init__()
        built = built_model(model)
        self.model: fx.GraphModule = built
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.reduction = reduction
        self.chunks = chunks
        self.in_pieces: Callable[..., ChunkedLoss] = ChunkedLoss
        self.ends: dict[str, Ends] = find_ends(built, outputs)
        self.terms: dict[str, OutputConfig] = {
            name: _output_term(name, outputs[name] if outputs else 1.0) for name in self.ends
        }
        main = next(iter(self.ends.values()), None)
        for name, end in self.ends.items():
            if end.tokens is None and self.terms[name].shift > 1 and main is not None:  # it may read the next token
                self.ends[name] = replace(end, tokens=main.tokens)
        self._named = outputs is not None
        self._trunk = write_trunk(built, list(self.ends.values()))
        self._names = inputs_of(built)
        self._required = [name for name, signal in graph_of(built).inputs.items() if not signal.optional]
        keep_once(built)

    if TYPE_CHECKING:

        def __call__(self, inputs: Inputs, targets: Targets | None = None) -> Tensor: ...

    def forward(self, inputs: Inputs, targets: Targets | None = None) -> Tensor:
        """Return the loss, a scalar, or the sums of several outputs.

        Args:
            inputs: tokens [b, t]; or all inputs of the model, by name, such as `source`, `target` and `target_mask`.
            targets: the ids to predict at each position, [b, t], or [b] if the head reads one vector per sequence; with
                `outputs`, by their names. By default, the next token. Padding does not count, neither as a position
                nor as a next token.

        Raises:
            TypeError: an input is missing, unknown, or not a tensor.
            ValueError: targets are missing and the model may attend to the next tokens, or a sequence has only one
                token; targets have a wrong shape, or are not ids of the vocabulary; or `torch.func` transforms the
                loss.
        """
        if not torch.compiler.is_compiling() and is_transformed():
            raise ValueError("torch.func cannot follow this loss: use `F.cross_entropy` of the model's logits")
        return call_in_forward(self.model, lambda: self.of(self.read(inputs), targets))

    def read(self, inputs: Inputs) -> dict[str, HeadInput]:
        """Run the model up to its heads, and return the state at each by the name of the output."""
        args, named = self._as_call(inputs)
        try:
            states = self._trunk(self.model, *args, **named)
            return {name: HeadInput(*state) for name, state in zip(self.ends, states, strict=True)}
        except Exception as error:
            raise explained_error(error, self.model, args, named)  # noqa: B904  it has its cause

    def of(self, reads: Mapping[str, HeadInput], targets: Targets | None = None) -> Tensor:
        """Return the loss for the states that `read` returned; targets and errors as in `forward`."""
        by_output = targets if isinstance(targets, Mapping) else dict.fromkeys(reads, targets)
        if unknown := [name for name in by_output if name not in reads]:
            raise ValueError(f"`{unknown[0]}` is not an output in the loss, which has {listing(reads)}")
        if self._named and isinstance(targets, Tensor):
            raise TypeError(f"the targets of several outputs must be a mapping, by {listing(reads)}; got a tensor")
        losses = [self._of_output(name, read, by_output.get(name)) for name, read in reads.items()]
        if not self._named:
            return losses[0]
        if self.reduction == "sum":
            return torch.stack(losses)
        return torch.stack([self.terms[name].weight * loss for name, loss in zip(reads, losses, strict=True)]).sum()

    def _of_output(self, name: str, read: HeadInput, targets: Tensor | None) -> Tensor:
        """Return the loss of an output, without its weight."""
        (hidden, mask, tokens, extra), shift = read, self.terms[name].shift
        targets = self._targets(tokens, mask, shift) if targets is None else _checked_targets(targets)
        if targets.shape != hidden.shape[:-1]:
            positions, shape = tuple(hidden.shape[:-1]), tuple(targets.shape)
            raise ValueError(f"targets must have the shape {positions}, one for each position of the head; got {shape}")
        if mask is not None:
            targets = targets.masked_fill(~_token_mask(mask), self.ignore_index)
        options = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
        head = self.in_pieces(self._head(name), extra, options, self.z_loss)
        rows = hidden.flatten(0, -2)
        try:
            total = head(rows, targets.flatten().long(), self._count_chunks(rows, name))
        except IndexError as error:
            message = f"targets must be ids of the vocabulary, from 0 to {self.ends[name].vocab_size - 1}"
            raise ValueError(f"{message}, or {self.ignore_index} for none") from error
        return total if self.reduction == "sum" else total / (targets != self.ignore_index).sum().clamp(min=1)

    def logits(self, reads: Mapping[str, HeadInput]) -> dict[str, Iterator[Tensor]]:
        """Return the logits of each output in the chunks in which the loss computes them, [n, v], for all positions."""
        return {name: self._chunks(name, read) for name, read in reads.items()}

    def _chunks(self, name: str, read: HeadInput) -> Iterator[Tensor]:
        rows, head = read.hidden.flatten(0, -2), self._head(name)
        for chunk in rows.tensor_split(self._count_chunks(rows, name)):
            yield head(chunk, **read.extra)

    def _count_chunks(self, rows: Tensor, name: str) -> int:
        return self.chunks or chunk_count(rows.size(0), self.ends[name].vocab_size)

    def _as_call(self, inputs: object) -> tuple[tuple[Tensor, ...], Mapping[str, Tensor | None]]:
        """Return the inputs as arguments of the model, by position and by name; raise TypeError if they do not fit."""
        if isinstance(inputs, Tensor) and len(self._required) == 1:
            return (inputs,), {}
        if isinstance(inputs, Mapping) and all(name in self._names for name in inputs):
            return (), inputs
        raise TypeError(self._misfit(inputs))

    def _misfit(self, inputs: object) -> str:
        """Explain why the model cannot take the inputs, and suggest the intended call."""
        call = f"loss({{{', '.join(f'{name!r}: {name}' for name in self._required)}}})"
        if isinstance(inputs, Tensor):
            return f"the model takes {listing(self._required)}: pass them by name, `{call}`"
        if not isinstance(inputs, Mapping):
            return (
                f"the inputs of a loss must be tokens [b, t], or all inputs by name, `{call}`; got {value_text(inputs)}"
            )
        unknown = next(str(name) for name in inputs if name not in self._names)
        if unknown in ("targets", "labels"):
            return f"`{unknown}` is not an input: targets come after the inputs, `{call[:-1]}, {unknown})`"
        return unknown_argument("the model", unknown, self._names)

    def _head(self, name: str) -> nn.Module:
        head = self.model.get_submodule(self.ends[name].head)
        if not torch.compiler.is_compiling() and is_sharded(head):
            raise ValueError(f"`{name}` must not be sharded separately: shard it with the root, `fully_shard(model)`")
        return head

    def _targets(self, tokens: Tensor | None, mask: Tensor | None, shift: int) -> Tensor:
        """Return the token `shift` after each position, if it may attend to it; the last positions have no target."""
        if tokens is None:
            raise ValueError("targets are missing: the model may attend to the next tokens, or has no token input")
        if tokens.size(1) <= shift:
            requirement = "two tokens" if shift == 1 else f"{shift + 1} tokens"
            raise ValueError(f"there is nothing to predict: a sequence must have at least {requirement}")
        following = tokens[:, shift:]
        if mask is not None:
            read = mask[:, shift:] if mask.dim() == 2 else mask.diagonal(-shift, dim1=1, dim2=2)
            following = following.masked_fill(~read, self.ignore_index)
        return F.pad(following, (0, shift), value=self.ignore_index)


def _output_term(name: str, value: float | OutputConfig | Mapping[str, Any]) -> OutputConfig:
    """Return the term of an output; raise ValueError for a weight or a shift that it cannot have."""
    if isinstance(value, OutputConfig):
        return value
    try:
        return OutputConfig(**(value if isinstance(value, Mapping) else {"weight": value}))
    except (ValueError, TypeError) as error:
        message = f"`{name}` must have a weight above 0 and a shift of at least 1; got {value}"
        raise ValueError(message) from error


def _token_mask(mask: Tensor) -> Tensor:
    """Return True for each position with a token, [b, t]; in a mask of pairs, for each that may attend to itself."""
    return mask if mask.dim() == 2 else mask.diagonal(dim1=1, dim2=2)


def _checked_targets(targets: object) -> Tensor:
    """Return the targets; raise TypeError if they cannot be ids."""
    if not isinstance(targets, Tensor) or targets.dtype.is_floating_point or targets.dtype.is_complex:
        received = str(targets.dtype) if isinstance(targets, Tensor) else value_text(targets)
        raise TypeError(f"targets must be a tensor of ids, which are integers; got {received}")
    return targets


@checked
def loss(
    model: BuiltModel,
    inputs: Inputs,
    targets: Targets | None = None,
    *,
    outputs: Outputs | None = None,
    ignore_index: Ignored = -100,
    label_smoothing: Smoothing = 0.0,
    z_loss: Weight = 0.0,
    reduction: Reduction = "mean",
    chunks: ChunkCount | None = None,
) -> Tensor:
    """Compute `Loss(model, ...)(inputs, targets)` for a single step.

        tfkit.loss(model, tokens).backward()                  # tokens [b, t]; the next token is the target

    Returns a scalar, or with `reduction="sum"` and `outputs` the sum of each output, [n]. See `Loss` for the arguments
    and errors; create a `Loss` to compile or distribute it.
    """
    module = Loss(
        model,
        outputs=outputs,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
        chunks=chunks,
    )
    return module(inputs, targets)
