"""The slots inside a block: a base class for each, with the fields that its kinds share and the form of `build`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tfkit.component.config import (
    AttentionBackend,
    Changeable,
    Component,
    Config,
    Count,
    Dim,
    Extent,
    Immaterial,
    Make,
    PositiveFloat,
    Probability,
    Shared,
    parts,
)
from tfkit.errors import Invalid

if TYPE_CHECKING:
    import torch
    from torch import nn


class ActivationConfig(Component):
    """Slot `activation`: an elementwise function, [...] -> [...]."""

    slot = "activation"

    @abstractmethod
    def build(self, make: Make) -> nn.Module:
        """Build the module; its `forward` takes one tensor of any shape and keeps the shape."""


class NormConfig(Component):
    """Slot `norm`: normalizes the last axis, [..., width] -> [..., width].

    With `takes_condition`, the module's `forward` takes x and the context, and the norm can only be one of a layer's or
    a stack's.
    """

    slot = "norm"

    @abstractmethod
    def build(self, make: Make, width: int) -> nn.Module:
        """Build the module for a last axis of `width`."""


@dataclass(frozen=True)
class Cached:
    """A cached tensor with an entry for each past token, [b, heads, tokens, width]."""

    heads: int
    width: int
    window: int | None = None
    """Size of the sliding window in tokens, which the stack sets; None: unlimited."""

    def tokens(self, length: int) -> int:
        """Return the maximum number of cached tokens for a sequence of `length` tokens."""
        return length if self.window is None else min(self.window, length)

    def shape(self, length: int) -> tuple[int, int, int]:
        """Return the shape for a single sequence of `length` tokens."""
        return self.heads, self.tokens(length), self.width


@dataclass(frozen=True)
class State:
    """A tensor of fixed size that is updated with each token, [b, heads, rows, width]; zeros before the first token."""

    heads: int
    rows: int
    width: int
    wide: bool = False
    """True if it has at least float32 precision in a model of any dtype, as sums over all tokens need."""

    def shape(self, length: int) -> tuple[int, int, int]:
        """Return the shape for a single sequence of any length."""
        return self.heads, self.rows, self.width


@dataclass(frozen=True)
class InnerValue:
    """A value inside a sublayer that `tfkit.trace` reads: an argument or the output of one of its modules."""

    module: str
    """The path of the module in the sublayer."""
    argument: int | None
    """The position of the argument; None for the output."""
    shape: str
    """The sizes of its axes, such as `[b, 12, t, 64]`."""
    written_out: bool = False
    """True if only the attention backend `eager` computes the value."""
    item: int = 0
    """The index of the value in an output that is a tuple."""
    state: int | None = None
    """The index in `cached` of the `State` that is read after each chunk of tokens; `module` is then empty."""

    def __post_init__(self) -> None:
        values = (("module", str), ("shape", str), ("item", int), ("argument", int | None), ("state", int | None))
        for name, expected in values:
            value = getattr(self, name)
            if not isinstance(value, expected) or (isinstance(value, int) and value < 0):
                text = "a text" if expected is str else "an integer of at least 0" + ", or None" * (expected is not int)
                raise TypeError(f"`{name}` of an InnerValue must be {text}; got {value!r}")


class SublayerConfig(Component):
    """A component that a layer runs, [b, t, d_model] -> [b, t, d_model]. The layer's field gives it its name."""

    takes_context: ClassVar[bool] = True
    """False if the module's `forward` takes x alone, because it computes each position independently."""
    untrained: ClassVar[tuple[str, ...]] = ()
    """Paths of modules inside the sublayer whose parameters get no gradient, by design."""
    score_parameters: ClassVar[tuple[str, ...]] = ()
    """Paths of the parameters that compute scores by which a token chooses keys or experts, with a row for each head or
    expert. `tfkit check` sets all rows but the first to zero: many scores are then equal."""
    chunk_attributes: ClassVar[tuple[str, ...]] = ()
    """Paths of the module's attributes that are the number of positions of a chunk, such as `chunk` or `rule.chunk`. No
    output may depend on them. `tfkit check` sets them to 5: its short sequences then have several chunks."""
    restarts: ClassVar[bool] = False
    """True if its states restart with each of the `documents` of a `Context`, as packed rows need."""
    causal: ClassVar[bool] = True
    """False if outputs depend on later positions, whatever a mask allows: such a sublayer belongs in an encoder."""

    def check(self) -> None:
        """Raise `Invalid` for a norm inside the sublayer that takes a condition: only norms of layers get it."""
        super().check()
        for path, part in parts((), self):
            if isinstance(part, NormConfig) and part.takes_condition:
                message = f"norm `{part.kind_name()}` takes a condition: it must be a norm of a layer or a stack"
                raise Invalid(".".join(path), message)

    @property
    def cached(self) -> tuple[Cached | State, ...] | None:
        """Tensors that the module keeps between decoding steps.

        They are in `context.cache.tensors`, in this order. The module passes each `Cached` to `tfkit.nn.update_cache`
        before it uses the tensor, as `mha` does with keys and values. In cross-attention, the module takes them from
        the cache if `context.memory` is None. It updates a `State` in place. None means that the module cannot be
        decoded token by token.
        """
        return None

    @property
    def gives(self) -> tuple[str, ...]:
        """Names of tensors for later sublayers. If there are any, the module returns (y, {name: tensor})."""
        return ()

    @property
    def takes(self) -> tuple[str, ...]:
        """Names of the tensors that the module takes from `context.wires`, each given by the latest such sublayer."""
        return ()

    def check_giver(self, name: str, giver: SublayerConfig) -> None:
        """Raise `Invalid` if the sublayer cannot take the tensor `name` from `giver`."""

    @property
    def inner_values(self) -> Mapping[str, InnerValue]:
        """Values inside the module that `tfkit.trace` reads and writes, by name.

        `router_logits` of an FFN, the output of a module, is also what transformers records as router logits.
        """
        return {}


class FFNConfig(SublayerConfig):
    """Slot `ffn`: acts on each position independently, [batch, length, d_model] -> [batch, length, d_model]."""

    slot = "ffn"
    takes_context = False
    d_model: Shared[Dim]
    """Width of the residual stream."""

    @property
    def hidden_width(self) -> int | None:
        """Width of the hidden layer; None if there is not exactly one."""
        return None

    @abstractmethod
    def build(self, make: Make) -> nn.Module:
        """Build the module."""


class MixerConfig(SublayerConfig):
    """Slot `mixer`: mixes positions by a recurrence or a convolution, [batch, length, d_model] -> the same.

    The module's `forward(x, context)` gets the tokens of each row first, then padding. `context.padding` is True at
    tokens, [b, t], or None if there is no padding. What the module computes at padding is ignored, but padding must not
    enter a state; all tensors in `cached` are states. docs/mixers.md has the contract, and a complete mixer.
    """

    slot = "mixer"
    free_length: ClassVar[bool] = True
    """False if a Python loop over positions or chunks fixes the sequence length of a program of `torch.export`."""
    d_model: Shared[Dim]
    """Width of the residual stream."""

    @abstractmethod
    def build(self, make: Make) -> nn.Module:
        """Build the module."""


class MaskRuleConfig(Component):
    """Slot `mask_rule`: a condition on the positions of query and key, in addition to the extents of a mask.

    Positions are counted without padding, and in each document from 0.
    """

    slot = "mask_rule"

    @property
    def reach(self) -> int | None:
        """Number of latest keys, including the query's, that contain all earlier keys a query may attend to.

        This bounds the cache. None: unlimited.
        """
        return None

    def check_mask(self, mask: MaskConfig) -> None:
        """Raise `Invalid` if the rule does not suit the extents of its mask."""

    @abstractmethod
    def build(self, make: Make) -> nn.Module:
        """Build the module: positions of queries and of keys, int [b or 1, q, 1] and [b or 1, 1, k] -> bool.

        Its `forward` must be elementwise, and must accept scalars, as FlexAttention passes them. An empty cache slot
        has a negative position and is masked.
        """


StreamPart = Literal["enter", "read", "write", "leave"]
"""The modules of a residual."""


class StreamConfig(Component):
    """Slot `residual`: takes the input of a sublayer from the residual stream, and puts its output y into the stream.

    `build` is called for each of these modules, the first and the last only if `enters`:

        enter  x [b, t, d_model] -> stream                before the first layer
        read   stream, context -> (x, list of tensors)    before the norm of each sublayer
        write  stream, y, list of tensors -> stream       after each sublayer, with the tensors of its `read`
        leave  stream -> [b, t, d_model]                  before the stack's last norm
    """

    slot = "residual"
    enters: ClassVar[bool] = False
    """True if the stream is not [b, t, d_model] but a tensor [b, t, ...] that `enter` returns."""
    reads: ClassVar[bool] = True
    """False if `read` returns the stream and an empty list, so that `write` can be a node of a graph."""

    @abstractmethod
    def build(self, make: Make, part: StreamPart, width: int) -> nn.Module:
        """Build one of the modules, for a `d_model` of `width`."""


class MaskConfig(Config):
    """Number of keys on each side of its position that a query may attend to; null: unlimited.

    Causal is `right: 0`. A sliding window of w keys, the query's own among them, is `{left: w - 1, right: 0}`.
    """

    left: Changeable[Extent] | None = None
    """Number of keys before the query's position."""
    right: Changeable[Extent] | None = None
    """Number of keys after the query's position."""
    rule: MaskRuleConfig | None = None
    """Rule that a query and a key must also satisfy."""

    def check(self) -> None:
        """Raise `Invalid` for a rule that does not suit the extents."""
        super().check()
        if self.rule is not None:
            self.rule.check_mask(self)

    @property
    def window(self) -> int | None:
        """Number of latest keys that contain all earlier keys a query may attend to; None: unlimited."""
        limits = (None if self.left is None else self.left + 1, None if self.rule is None else self.rule.reach)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def causal(self) -> bool:
        """True if no query attends to a later key."""
        return self.right == 0


class TemperatureConfig(Config):
    """Queries times 1 + beta * log(1 + floor((position + offset) / original_max_len)).

    An attention with a `query_temperature` takes the factors from its context.
    """

    beta: PositiveFloat
    """Growth of the factors."""
    original_max_len: Dim
    """Number of positions with an equal factor; it is 1 for the first ones."""
    offset: Literal[0, 1] = 0
    """Number to add to the position: 1 if the first token counts as position 1."""


class GateConfig(Config):
    """Factors of the heads' outputs, computed from the input: a linear layer without bias, and an activation."""

    word_key: ClassVar[str | None] = "activation"

    activation: ActivationConfig
    """Activation of the linear layer's output."""
    per: Literal["channel", "head"] = "channel"
    """A factor for each channel, or a factor for each head."""

    def factors_of(self, d_head: int) -> int:
        """Return the number of factors of a head of `d_head` channels."""
        return d_head if self.per == "channel" else 1


class AttentionConfig(SublayerConfig):
    """Slot `attention`: mixes positions, [batch, queries, d_model] -> [batch, queries, d_model].

    The module's `forward(x, context)` gets a `tfkit.nn.Context`: mask, rotary table, memory, cache.
    """

    slot = "attention"
    derived: ClassVar[Mapping[str, str]] = MappingProxyType({"d_head": "d_model // n_heads"})
    self_attention_only: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "position": "cross-attention has no positions: queries and keys count in two different sequences",
            "mask": "cross-attention attends to the full memory: it has no extent to the left or right",
        }
    )
    """Fields that cross-attention cannot have, with reasons. Cross-attention derived from self-attention omits them."""
    takes_memory: ClassVar[bool] = True
    """False if the attention is self-attention only, so that it cannot attend to a memory."""
    chooses_keys: ClassVar[bool] = False
    """True if a query attends to only some of the keys that its mask allows, depending on the tokens."""
    reads_neighbors: ClassVar[bool] = False
    """True if the module also reads the tokens next to a query: its context then has `padding`, `order` and
    `documents`, as with a state."""

    d_model: Shared[Dim]
    """Width of the residual stream."""
    n_heads: Count
    """Number of query heads."""
    d_head: Dim | None = None
    """Width of one head; d_model / n_heads unless given."""
    dropout: Shared[Immaterial[Changeable[Probability]]] = 0.0
    """Dropout on the attention weights."""

    def softmax_values(self, module: str) -> dict[str, InnerValue]:
        """Return scores and weights for `inner_values`, from the path of the attention's `tfkit.nn.Softmax`."""
        shape = f"[b, {self.n_heads}, t, k]"
        return {name: InnerValue(module, i, shape, written_out=True) for name, i in (("scores", 0), ("weights", None))}

    position: AttentionPositionConfig | None = None
    """Positions that act inside attention: rope, alibi, t5, disentangled."""
    mask: MaskConfig | None = None
    """Extent of the attention; unlimited in an encoder, causal in a decoder unless given."""

    def check(self) -> None:
        """Raise `Invalid` if the heads do not divide the width, or if the positions do not suit the attention."""
        super().check()
        if self.d_head is None and self.d_model % self.n_heads:
            raise Invalid(
                "n_heads",
                f"d_model ({self.d_model}) must be a multiple of n_heads ({self.n_heads})",
                notes=[f"divisors of {self.d_model}: {divisors(self.d_model)}"],
                help="set d_head to make the width of a head independent of d_model",
            )
        if self.position is not None:
            self.position.check_attention(self)

    def material(self) -> Mapping[str, Any]:
        """Return the fields, including the width of a head even if it follows from other fields."""
        values = super().material()
        return {**values, "d_head": self.head_width} if "d_head" in values else values

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.d_head or self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads."""
        return self.n_heads

    @property
    def score_width(self) -> int:
        """Number of channels over which the score of a query and a key is a sum."""
        return self.head_width

    @property
    def score_scale(self) -> float | None:
        """The factor of the scores, which a field `scale` may set; None if there is no such factor."""
        return None

    @property
    def pattern_sizes(self) -> Mapping[str, int]:
        """Sizes by letter: h query heads, g key-value heads, r query heads for each of them, d the width of a head."""
        return {"h": self.n_heads, "g": self.kv_heads, "r": self.n_heads // self.kv_heads, "d": self.head_width}

    @property
    def rotary(self) -> RotaryConfig | None:
        """The position if it is rotary; the context then has its table."""
        return self.position if isinstance(self.position, RotaryConfig) else None

    @property
    def score_bias(self) -> ScoreBiasConfig | None:
        """The position if it is a bias of the scores; the context's mask then includes it."""
        return self.position if isinstance(self.position, ScoreBiasConfig) else None

    @property
    def content_scores(self) -> ContentScoreConfig | None:
        """The position if it adds scores that depend on the tokens; the context's `relative` then has its rows."""
        return self.position if isinstance(self.position, ContentScoreConfig) else None

    @property
    def adds_content_scores(self) -> bool:
        """True if the module adds the scores of a `ContentScoreConfig`."""
        return False

    @property
    def query_temperature(self) -> TemperatureConfig | None:
        """The temperature of the queries; the context then has the factors of the new tokens."""
        return None

    @property
    def counts_tokens(self) -> bool:
        """True if scores depend on the positions of two tokens and not only on their distance.

        Positions are then counted without padding, so padding before the tokens has no effect. A temperature always
        needs this, and a score bias never does.
        """
        return False

    def causal_flag(self, backend: AttentionBackend) -> bool:
        """Return True if the module can be built with `causal` instead of getting the causal mask.

        By default the module gets its mask as a tensor, so a kind that ignores the flag cannot become bidirectional
        silently. `backend` is the attention backend of the model; a kind may ignore it.
        """
        return False

    def flex_mask(self, backend: AttentionBackend) -> bool:
        """Return True if the module takes a rule for FlexAttention as its mask, instead of a tensor."""
        return False

    @abstractmethod
    def build(self, make: Make, *, d_memory: int | None, causal: bool) -> nn.Module:
        """Build the module.

        `d_memory` is the width of the sequence that cross-attention attends to; None for self-attention. With `causal`,
        a `context.mask` of None stands for the causal mask; it is set only if `causal_flag` returned True.
        """


class RopeScalingConfig(Component):
    """Slot `rope_scaling`: stretches the rotary frequencies to lengths beyond the trained length."""

    slot = "rope_scaling"

    @property
    def attention_factor(self) -> float:
        """Factor of cos and sin."""
        return 1.0

    def check_rope(self, width: int, theta: float) -> None:
        """Raise `Invalid` if this scaling does not support `width` channels per head, or the base `theta`."""

    @abstractmethod
    def build(self, make: Make, width: int, theta: float) -> nn.Module:
        """Build the module: (n_keys, device) -> the frequencies [width / 2], float32."""


class PositionConfig(Component):
    """Slot `position`: encodes the position of each token. The two subclasses below act in different places."""

    slot = "position"


class InputPositionConfig(PositionConfig):
    """Positions that are added to the embedding."""

    role = "is added to the embedding"

    @property
    def longest(self) -> int | None:
        """The longest sequence that these positions support; None: unlimited."""
        return None

    def check_width(self, width: int) -> None:
        """Raise `Invalid` if these positions do not support `width`."""

    @abstractmethod
    def build(self, make: Make, width: int) -> nn.Module:
        """Build the module: positions [batch or 1, length] -> [batch or 1, length, width]."""


class AttentionPositionConfig(PositionConfig):
    """Positions that act inside attention. The stack computes them once per forward for all layers.

    All attentions of a stack with equal positions, masks and heads share a module. Of its argument `attention`, `build`
    may therefore use only the number and the width of the heads.
    """

    role = "acts inside attention"

    @property
    def is_shared(self) -> bool:
        """True if all attentions with equal positions share a module; False if each layer has a separate module."""
        return True

    @property
    def only_length(self) -> int | None:
        """The only length of a sequence that these positions support, such as a grid of patches; None: any length."""
        return None

    @property
    def axes(self) -> int | None:
        """Number of axes of the positions, which are then an input of the stack; None: each position is one number."""
        return None

    def check_attention(self, attention: AttentionConfig) -> None:
        """Raise `Invalid` if these positions do not support that attention."""


class RotaryConfig(AttentionPositionConfig):
    """Positions that rotate queries and keys."""

    @abstractmethod
    def build(self, make: Make, attention: AttentionConfig) -> nn.Module:
        """Build the table: (positions [batch or 1, length], n_keys) -> a float tensor, an input of the rotation.

        With `axes`, the positions may also be [batch, length, axes].

        `n_keys` is the length of the sequence; in decoding, the maximum length that it may reach.
        """

    @abstractmethod
    def build_rotation(self, attention: AttentionConfig) -> nn.Module:
        """Build the rotation: (x [batch, heads, length, d_head], table) -> [batch, heads, length, d_head]."""


class ScoreBiasConfig(AttentionPositionConfig):
    """Positions that are added to the attention scores."""

    @abstractmethod
    def build(self, make: Make, attention: AttentionConfig, causal: bool) -> nn.Module:
        """Build the bias: positions of queries and of keys -> [batch or 1, heads, queries, keys].

        The positions are [batch or 1, queries] and [batch or 1, keys]. In a cache, keys are in any order, and empty
        slots have negative positions and are masked.
        """

    def slopes(self, attention: AttentionConfig) -> Sequence[float] | None:
        """Return the slope of each head if the bias is -slope * |distance|; None for any other bias.

        FlexAttention computes such a bias in its kernel without materializing a matrix.
        """
        return None


class ContentScoreConfig(AttentionPositionConfig):
    """Positions that are added to the attention scores as products with queries and keys.

    A table has a row for each class of distances. The context's `relative` holds these rows, and the index of the row
    for each pair of query and key.
    """

    @property
    def n_terms(self) -> int:
        """Number of products that the default scale of the scores counts, (d_head * (1 + n_terms)) ** -0.5."""
        return 0

    def check_attention(self, attention: AttentionConfig) -> None:
        """Raise `Invalid` if the attention does not add such scores."""
        if not attention.adds_content_scores:
            kinds = f"`{attention.kind_name()}` cannot have the position `{self.kind_name()}`"
            raise Invalid("position", f"attention {kinds}: it does not add scores of positions and tokens")

    @abstractmethod
    def build(self, make: Make, attention: AttentionConfig, causal: bool) -> nn.Module:
        """Build the table: positions of queries and of keys -> rows [1, n, width] and integer indices [b or 1, q, k].

        The positions are [b or 1, q] and [b or 1, k]. In a cache, keys are in any order, and empty slots have negative
        positions and are masked. With `causal`, no query attends to a later key, so no row is needed for one.
        """

    @abstractmethod
    def build_projection(self, attention: AttentionConfig) -> nn.Module | None:
        """Build the module: rows -> their queries and keys, [1, heads or 1, n, d] each, and any third tensor.

        If this returns None, the attention projects the rows as it projects tokens.
        """

    @abstractmethod
    def build_scores(self, attention: AttentionConfig, scale: float) -> nn.Module:
        """Build the module: queries and keys of the tokens, then of the rows, and the indices -> [b, h, q, k]."""


class InitConfig(Component):
    """Slot `init`: fills the weights of linear layers and tables. All other modules reset their own parameters."""

    slot = "init"

    @abstractmethod
    def linear(self, weight: torch.Tensor, *, residual: bool, n_layers: int | None, generator: torch.Generator) -> None:
        """Fill `weight` [out, in] in place.

        `residual` is true if the output of the layer is added to the residual stream of a stack of `n_layers`.
        """

    @abstractmethod
    def bias(self, bias: torch.Tensor, *, fan_in: int, generator: torch.Generator) -> None:
        """Fill the `bias` [out] of a linear layer in place."""

    @abstractmethod
    def table(self, weight: torch.Tensor, *, generator: torch.Generator) -> None:
        """Fill the `weight` [rows, width] of an embedding table in place."""

    def tied_table(self, weight: torch.Tensor, *, generator: torch.Generator) -> None:
        """Fill a token table that is also the output matrix of a head. The default is to call `table`."""
        self.table(weight, generator=generator)


def divisors(number: int, limit: int = 16) -> str:
    """Format the divisors of a number for an error, at most `limit` of them: `divisors(12)` is "1, 2, 3, 4, 6, 12"."""
    numbers = [d for d in range(1, min(number, 65536) + 1) if number % d == 0]
    return ", ".join(map(str, numbers[:limit])) + (", ..." if len(numbers) > limit else "")


AttentionConfig.model_rebuild()
