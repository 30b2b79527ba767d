"""The contract between tfkit and a component: what a config declares, and what it is given to build.

A component is a pydantic config and the `nn.Module` that the config builds. The base class of the config names the slot
that the component fills, its `kind` is the name under which a spec asks for it, and its fields are the keys of the YAML
mapping. Nothing here imports torch: a spec is checked before any tensor exists.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self, TypeVar, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from tfkit.errors import Invalid

if TYPE_CHECKING:
    import torch
    from torch import nn

T = TypeVar("T")


@dataclass(frozen=True)
class SharedMarker:
    """Marks a field that takes its value from the enclosing parts of the spec when it is not given."""


@dataclass(frozen=True)
class WireMarker:
    """Marks a field that names a node or an input of the graph.

    `value` says what travels: the node's output, or the weight of its token table. `mask` says whether the padding mask
    of that output comes with it, as the next argument of the module's `forward`.
    """

    value: Literal["output", "table"] = "output"
    mask: bool = False


@dataclass(frozen=True)
class PatchMarker:
    """Marks a mapping whose values are patches: each is merged into the mapping that encloses the marked field's."""


def marker(field: FieldInfo, of: type[T]) -> T | None:
    """The marker of a field, wherever in its annotation it stands."""
    pending: list[Any] = [*field.metadata, field.annotation]
    while pending:
        part = pending.pop()
        if isinstance(part, of):
            return part
        pending += [*getattr(part, "__metadata__", ()), *get_args(part)]
    return None


Shared = Annotated[T, SharedMarker()]
Wire = Annotated[str, WireMarker()]
MaskedWire = Annotated[str, WireMarker(mask=True)]
TableWire = Annotated[str, WireMarker(value="table")]

Dim = Annotated[int, Field(gt=0, le=2**26)]
Count = Annotated[int, Field(gt=0, le=4096)]
Extent = Annotated[int, Field(ge=0, le=2**31)]
Probability = Annotated[float, Field(ge=0, lt=1)]
PositiveFloat = Annotated[float, Field(gt=0)]


def slot(default: str) -> Any:
    """A field that the kind `default` fills when the spec does not say.

    The kind is looked up when a spec is read, so that a default may come from any plugin. A field that must be filled
    has no default, and one that may stay empty has the default None.
    """
    return Field(json_schema_extra={"default_kind": default})


def optional_slot(implied: str) -> Any:
    """A field that may stay empty, and where a mapping without a kind is of the kind `implied`."""
    return Field(default=None, json_schema_extra={"implied_kind": implied})


class Config(BaseModel):
    """A mapping of a spec: frozen, strict, without unknown keys."""

    word_key: ClassVar[str | None] = None
    """The key that a bare word stands for; None where only a mapping will do."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Raise `Invalid` when the fields contradict each other. Overriding methods call `super().check()`."""


class Component(Config):
    """A config that fills a slot. Subclasses set `kind: Literal["name"] = "name"` and write `build`."""

    word_key = "kind"
    slot: ClassVar[str]
    role: ClassVar[str] = "has a place of its own"
    """Where in the model it acts, for slots whose components act in different places."""

    @classmethod
    def kind_name(cls) -> str:
        """The name under which a spec asks for this component."""
        return str(cls.model_fields[str(cls.word_key)].default)


class Make(Protocol):
    """What `build` is given: calls the `build` of a child's config, and remembers what the child is."""

    def __call__(self, config: Component, /, *args: Any, **given: Any) -> nn.Module:
        """Build `config`; the further arguments are those that its slot's `build` takes."""


class ActivationConfig(Component):
    """Slot `activation`: an elementwise function, [...] -> [...]."""

    slot = "activation"

    @abstractmethod
    def build(self, make: Make) -> nn.Module:
        """Build the module; its `forward` takes one tensor of any shape and keeps the shape."""


class NormConfig(Component):
    """Slot `norm`: normalizes the last axis, [..., width] -> [..., width]."""

    slot = "norm"

    @abstractmethod
    def build(self, make: Make, width: int) -> nn.Module:
        """Build the module for a last axis of `width`."""


class FFNConfig(Component):
    """Slot `ffn`: acts on each position alone, [batch, length, d_model] -> the same."""

    slot = "ffn"
    d_model: Shared[Dim]
    """Width of the residual stream."""

    @abstractmethod
    def build(self, make: Make) -> nn.Module:
        """Build the module."""


class MaskConfig(Config):
    """How many keys on each side of its own position a query may read; null is no limit.

    Causal is `right: 0`. A sliding window of w keys, the query's own among them, is `{left: w - 1, right: 0}`.
    """

    left: Extent | None = None
    """Keys before the query's position."""
    right: Extent | None = None
    """Keys after it."""

    @property
    def causal(self) -> bool:
        """Whether no query reads a later key."""
        return self.right == 0


class AttentionConfig(Component):
    """Slot `attention`: mixes positions, [batch, queries, d_model] -> the same.

    The module's `forward(x, context)` gets a `tfkit.nn.Context`: mask, rotary table, memory.
    """

    slot = "attention"

    d_model: Shared[Dim]
    """Width of the residual stream."""
    n_heads: Count
    """Query heads."""
    d_head: Dim | None = None
    """Width of one head; d_model / n_heads unless given."""
    dropout: Shared[Probability] = 0.0
    """Dropout on the attention weights."""
    position: AttentionPositionConfig | None = None
    """Positions that act inside attention: rope, alibi, t5."""
    mask: MaskConfig | None = None
    """Extent of the attention; unlimited in an encoder, causal in a decoder unless given."""

    def check(self) -> None:
        """Refuse heads that do not divide the width, and positions that do not suit the attention."""
        super().check()
        if self.d_head is None and self.d_model % self.n_heads:
            raise Invalid(
                "n_heads",
                f"d_model ({self.d_model}) must be a multiple of n_heads ({self.n_heads})",
                notes=[f"divisors of {self.d_model}: {divisors(self.d_model)}"],
                help="give d_head to make the heads' width independent of d_model",
            )
        if self.position is not None:
            self.position.check_attention(self)

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.d_head or self.d_model // self.n_heads

    @property
    def causal_flag(self) -> bool:
        """Whether the module can be told `causal` instead of being handed the causal mask.

        Every other kind gets its mask written out, so that one that knows nothing of flags is never silently
        bidirectional.
        """
        return False

    @abstractmethod
    def build(self, make: Make, *, d_memory: int | None, causal: bool) -> nn.Module:
        """Build the module.

        `d_memory` is the width of the sequence that cross-attention reads, None for self-attention. `causal` says
        that a `context.mask` of None stands for the causal mask; it is only set where `causal_flag` is.
        """


class RopeScalingConfig(Component):
    """Slot `rope_scaling`: stretches the rotary frequencies to lengths beyond those of the training."""

    slot = "rope_scaling"

    @property
    def attention_factor(self) -> float:
        """Multiplies cos and sin."""
        return 1.0

    def check_rope(self, width: int, theta: float) -> None:
        """Raise `Invalid` when this scaling cannot serve that many channels per head, or that base."""

    @abstractmethod
    def build(self, make: Make, width: int, theta: float) -> nn.Module:
        """Build the module: (n_keys, device) -> the frequencies [width / 2], float32."""


class PositionConfig(Component):
    """Slot `position`: where a token stands. One of the two subclasses below says where it acts."""

    slot = "position"


class InputPositionConfig(PositionConfig):
    """Positions that are added to the embedding."""

    role = "is added to the embedding"

    def check_width(self, width: int) -> None:
        """Raise `Invalid` when these positions cannot have that width."""

    @abstractmethod
    def build(self, make: Make, width: int) -> nn.Module:
        """Build the module: positions [batch or 1, length] -> [batch or 1, length, width]."""


class AttentionPositionConfig(PositionConfig):
    """Positions that act inside attention; computed once per forward by the stack and passed to every layer."""

    role = "acts inside attention"

    def check_attention(self, attention: AttentionConfig) -> None:
        """Raise `Invalid` when these positions cannot serve that attention."""


class RotaryConfig(AttentionPositionConfig):
    """Positions that turn queries and keys."""

    @abstractmethod
    def build(self, make: Make, attention: AttentionConfig) -> nn.Module:
        """Build the table: (positions [length], n_keys) -> a float tensor that the rotation understands."""

    @abstractmethod
    def build_rotation(self, attention: AttentionConfig) -> nn.Module:
        """Build the rotation: (x [batch, heads, length, d_head], table) -> the same shape."""


class ScoreBiasConfig(AttentionPositionConfig):
    """Positions that are added to the attention scores."""

    @abstractmethod
    def build(self, make: Make, attention: AttentionConfig, causal: bool) -> nn.Module:
        """Build the bias: (query positions [queries], key positions [keys]) -> [1, heads, queries, keys]."""


class InitConfig(Component):
    """Slot `init`: fills the weights of linear layers and tables; everything else resets itself."""

    slot = "init"

    @abstractmethod
    def linear(self, weight: torch.Tensor, *, residual: bool, n_layers: int | None, generator: torch.Generator) -> None:
        """Fill `weight` [out, in] in place.

        `residual` says that its output is added to the residual stream of a stack of `n_layers`.
        """

    @abstractmethod
    def bias(self, bias: torch.Tensor, *, fan_in: int, generator: torch.Generator) -> None:
        """Fill the `bias` [out] of a linear layer in place."""

    @abstractmethod
    def table(self, weight: torch.Tensor, *, generator: torch.Generator) -> None:
        """Fill the `weight` [rows, width] of an embedding table in place."""


@dataclass(frozen=True)
class Signal:
    """What flows along a wire of the graph, known before any tensor exists."""

    type: Literal["tokens", "lengths", "sequence", "vector", "logits", "table"]
    """tokens [b, t] int, lengths [b] int, sequence [b, t, width], vector [b, width], logits [..., width],
    table [rows, width]."""
    width: int | None = None
    """Size of the last axis; None for tokens and lengths."""
    rows: int | None = None
    """Rows of a table."""
    mask: str | None = None
    """The name of the padding mask that goes with it; `OWN_MASK` where the block returns (value, mask)."""
    optional: bool = False
    """Whether the model may be called without it."""

    def __str__(self) -> str:
        return self.type if self.width is None else f"{self.type} of width {self.width}"

    def in_words(self) -> str:
        """What it is, as a sentence says it: `a sequence of width 512`."""
        article = "a " if self.type in ("sequence", "vector", "table") else ""
        rows = "" if self.rows is None else f" of {self.rows} rows"
        return f"{article}{self.type}{rows}{'' if self.width is None else f' of width {self.width}'}"


OWN_MASK = "own"

Signals = Mapping[str, Any]
"""The signals of a block's wires by field name; a list of them where the field is a list."""


class BlockConfig(Component):
    """Slot `block`: a node of the graph. Fields marked as wires name the nodes or inputs that it reads.

    The module's `forward` gets the value of `input` (or the list of `inputs`) in front and the other wires that are
    connected as keywords. Each `MaskedWire` brings its padding mask too: `mask` for `input`, else `<field>_mask`.
    """

    slot = "block"
    word_key = "block"

    @abstractmethod
    def output(self, inputs: Signals) -> Signal:
        """What the block gives for these inputs; raises `Invalid` when they do not fit."""

    @abstractmethod
    def build(self, make: Make, inputs: Signals) -> nn.Module:
        """Build the module."""

    def table(self) -> Signal | None:
        """The token table that other nodes may tie to; the block's module holds it as `tokens.weight`."""
        return None


def expect(inputs: Signals, field: str, *types: str, width: int | None = None) -> Signal:
    """The signal of wire `field`, checked for its type and width; raises `Invalid`."""
    signal: Signal = inputs[field]
    if signal.type not in types:
        takes = " or ".join(Signal(cast(Any, one)).in_words() for one in types)
        help = "put an `embedding` between the two" if signal.type == "tokens" and "sequence" in types else None
        raise Invalid(field, f"`{field}` takes {takes}, not {signal.in_words()}", help=help)
    if signal.optional:
        help = "remove `optional: true` from the input"
        raise Invalid(field, f"`{field}` must always be there, and the input that it names is optional", help=help)
    if width is not None and signal.width != width:
        raise Invalid(
            field,
            f"widths disagree: d_model is {width}, and `{field}` brings {signal.in_words()}",
            help="set d_model of one of the two nodes, or put a `linear` node between them",
        )
    return signal


def divisors(number: int, limit: int = 16) -> str:
    """The divisors of `number` in words, at most `limit` of them."""
    found: Sequence[int] = [d for d in range(1, min(number, 65536) + 1) if number % d == 0]
    return ", ".join(map(str, found[:limit])) + (", ..." if len(found) > limit else "")


AttentionConfig.model_rebuild()
