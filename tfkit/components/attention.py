"""Multi-head attention: one pipeline of optional steps in a fixed order.

    project -> norm over the full width -> heads -> norm per head -> rotate -> norm after it
    -> scores (scale, soft-cap, position bias, mask) -> softmax -> values -> output

`mha`, `gqa` and `mqa` are the same module with a different number of key-value heads. Everything from the scores to the
values is a core of its own, see `attention_core.py` and `flex.py`. A plugin that scores in another way subclasses
`MultiHeadConfig` and overrides `build_core`.

b batch, t positions, q queries, k keys, h query heads, g key-value heads, n all heads of a fused projection, d d_head.
Heads are split and merged in plain torch: in decoding token by token, an einops layer takes more than twice the time.

Attention: https://arxiv.org/abs/1706.03762. Multi-query: https://arxiv.org/abs/1911.02150.
Grouped-query: https://arxiv.org/abs/2305.13245. Query-key norm: https://arxiv.org/abs/2010.04245.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from tfkit.component import (
    AttentionBackend,
    AttentionConfig,
    Config,
    Count,
    Make,
    NormConfig,
    PositiveFloat,
    RotaryConfig,
    Shared,
    divisors,
)
from tfkit.components.attention_core import Eager, ScaledDotProduct
from tfkit.components.flex import MIN_WIDTH, FlexAttention
from tfkit.errors import Invalid
from tfkit.nn import Context, Linear, remember


class Attention(nn.Module):
    """[b, q, d_model] -> [b, q, d_model]; the steps that a spec does not ask for are None and cost nothing."""

    def __init__(
        self,
        *,
        project: nn.Module,
        q_norm: nn.Module | None,
        k_norm: nn.Module | None,
        rotate: nn.Module | None,
        q_norm_rotated: nn.Module | None,
        k_norm_rotated: nn.Module | None,
        core: nn.Module,
        output: nn.Module,
    ) -> None:
        super().__init__()
        self.project = project
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.rotate = rotate
        self.q_norm_rotated = q_norm_rotated
        self.k_norm_rotated = k_norm_rotated
        self.core = core
        self.output = output

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = self.project(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotate is not None:
            table = context.rotary
            assert table is not None
            q, k = self.rotate(q, table), self.rotate(k, table)
        if self.q_norm_rotated is not None and self.k_norm_rotated is not None:
            q, k = self.q_norm_rotated(q), self.k_norm_rotated(k)
        k, v = remember(k, context, 0), remember(v, context, 1)
        mixed = self.core(q, k, v, context.mask)
        return self.output(mixed.transpose(1, 2).flatten(2))


class CrossAttention(Attention):
    """[b, q, d_model] and a memory [b, k, d_memory] -> [b, q, d_model]; no positions, and no other mask than padding.

    Where sequences come in pieces, the memory is given once: its keys and values are kept.
    """

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q = self.project.queries(x)  # type: ignore[operator]
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.q_norm_rotated is not None:
            q = self.q_norm_rotated(q)
        k, v = self.memory(context)
        mixed = self.core(q, k, v, context.mask)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def memory(self, context: Context) -> tuple[Tensor, Tensor]:
        """Keys and values of the memory, [b, g, k, d] each."""
        memory, cache = context.memory, context.cache
        if memory is None:
            assert cache is not None
            return cache.tensors[0], cache.tensors[1]
        k, v = self.project.keys_values(memory)  # type: ignore[operator]
        if self.k_norm is not None:
            k = self.k_norm(k)
        if self.k_norm_rotated is not None:
            k = self.k_norm_rotated(k)
        if cache is not None:
            cache.tensors[0].copy_(k)
            cache.tensors[1].copy_(v)
        return k, v


class FusedProjection(nn.Module):
    """Queries, keys and values of one sequence in one matrix."""

    def __init__(self, config: MultiHeadConfig) -> None:
        super().__init__()
        self.d_head = config.head_width
        self.heads = [config.n_heads, config.kv_heads, config.kv_heads]
        widths = {name: n * self.d_head for name, n in zip("qkv", self.heads, strict=True)}
        self.qkv = Linear(config.d_model, widths, bias=config.biases.q)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Cut before the heads move: the gradients are then joined in the layout of qkv's output, without a copy.
        q, k, v = self.qkv(x).unflatten(2, (-1, self.d_head)).split_with_sizes(self.heads, dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class SeparateProjection(nn.Module):
    """Queries, keys and values in a matrix each; in cross-attention keys and values come from another sequence."""

    def __init__(
        self, config: MultiHeadConfig, d_source: int, q_norm: nn.Module | None, k_norm: nn.Module | None
    ) -> None:
        super().__init__()
        d, biases = config.head_width, config.biases
        self.q = Linear(config.d_model, config.n_heads * d, bias=biases.q)
        self.k = Linear(d_source, config.kv_heads * d, bias=biases.k)
        self.v = Linear(d_source, config.kv_heads * d, bias=biases.v)
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.d_head = d

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = self.keys_values(x)
        return self.queries(x), k, v

    def queries(self, x: Tensor) -> Tensor:
        """[b, q, d_model] -> [b, h, q, d]."""
        q = self.q(x)
        if self.q_norm is not None:
            q = self.q_norm(q)
        return self.split(q)

    def split(self, x: Tensor) -> Tensor:
        """[b, t, n * d] -> [b, n, t, d]."""
        return x.unflatten(2, (-1, self.d_head)).transpose(1, 2)

    def keys_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """[b, k, d_source] -> [b, g, k, d] twice."""
        k, v = self.k(source), self.v(source)
        if self.k_norm is not None:
            k = self.k_norm(k)
        return self.split(k), self.split(v)


class ProjectionBiases(Config):
    """Which of the four projections have a bias."""

    q: bool = False
    k: bool = False
    v: bool = False
    o: bool = False


class MultiHeadConfig(AttentionConfig):
    """Every head has keys and values of its own."""

    kind: Literal["mha"] = "mha"
    bias: Shared[bool] | ProjectionBiases = True
    """Whether the projections have biases: all, none, or a mapping of q, k, v and o."""
    scale: PositiveFloat | None = None
    """Multiplies the scores; d_head ** -0.5 unless given."""
    softcap: PositiveFloat | None = None
    """Bends the scores to stay within this bound."""
    qk_norm: NormConfig | None = None
    """Normalizes each head's queries and keys, before they are rotated."""
    qk_norm_full: NormConfig | None = None
    """Normalizes all heads' queries, and keys, as one vector."""
    qk_norm_rotated: NormConfig | None = None
    """Normalizes each head's queries and keys, after they are rotated."""

    @property
    def kv_heads(self) -> int:
        """Key-value heads."""
        return self.n_heads

    @property
    def biases(self) -> ProjectionBiases:
        """The biases of the four projections, one by one."""
        if isinstance(self.bias, bool):
            return ProjectionBiases(q=self.bias, k=self.bias, v=self.bias, o=self.bias)
        return self.bias

    def causal_flag(self, backend: AttentionBackend) -> bool:
        return self._cores_are_ours and self.softcap is None and backend != "eager"

    def flex_mask(self, backend: AttentionBackend) -> bool:
        return self._cores_are_ours and backend == "flex" and self.dropout == 0 and self.head_width >= MIN_WIDTH

    @property
    def _cores_are_ours(self) -> bool:
        """Whether no subclass has a core of its own, which may know nothing of flags and of masks as rules."""
        return type(self).build_core is MultiHeadConfig.build_core

    @property
    def kept(self) -> tuple[tuple[int, int], ...]:
        return ((self.kv_heads, self.head_width), (self.kv_heads, self.head_width))

    def build_core(self, make: Make, *, causal: bool) -> nn.Module:
        """Build what turns queries [b, h, q, d], keys and values [b, g, k, d] and a mask into [b, h, q, d].

        A subclass that overrides it gets its mask written out, and `causal` is never set. A module with parameters of
        its own fills them in `reset_parameters`; one with a softmax takes `tfkit.nn.Softmax`, which shows the weights.
        """
        scale = self.head_width**-0.5 if self.scale is None else self.scale
        grouped = self.kv_heads != self.n_heads
        core: nn.Module = Eager(scale=scale, dropout=self.dropout, cap=self.softcap)
        if self.softcap is None and make.attention_backend != "eager":
            core = ScaledDotProduct(scale=scale, dropout=self.dropout, causal=causal, grouped=grouped)
        if self.flex_mask(make.attention_backend):
            return FlexAttention(scale=scale, cap=self.softcap, grouped=grouped, dense=core)
        return core

    def build(self, make: Make, *, d_memory: int | None, causal: bool) -> nn.Module:
        width, norm, rotated = self.head_width, self.qk_norm, self.qk_norm_rotated
        rotary = self.position if isinstance(self.position, RotaryConfig) else None
        attention = Attention if d_memory is None else CrossAttention
        return attention(
            project=self._build_projection(make, d_memory),
            q_norm=make(norm, width) if norm else None,
            k_norm=make(norm, width) if norm else None,
            rotate=rotary.build_rotation(self) if rotary else None,
            q_norm_rotated=make(rotated, width) if rotated else None,
            k_norm_rotated=make(rotated, width) if rotated else None,
            core=self.build_core(make, causal=causal),
            output=Linear(self.n_heads * width, self.d_model, bias=self.biases.o, residual=True),
        )

    def _build_projection(self, make: Make, d_memory: int | None) -> nn.Module:
        biases, norm = self.biases, self.qk_norm_full
        if d_memory is None and norm is None and biases.q == biases.k == biases.v:
            return FusedProjection(self)
        q_norm = make(norm, self.n_heads * self.head_width) if norm else None
        k_norm = make(norm, self.kv_heads * self.head_width) if norm else None
        return SeparateProjection(self, self.d_model if d_memory is None else d_memory, q_norm, k_norm)


class GroupedQueryConfig(MultiHeadConfig):
    """Groups of query heads share one head of keys and values."""

    kind: Literal["gqa"] = "gqa"  # type: ignore[assignment]
    n_kv_heads: Count
    """Heads of keys and values."""

    def check(self) -> None:
        super().check()
        if self.n_heads % self.n_kv_heads:
            raise Invalid(
                "n_kv_heads",
                f"n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads})",
                notes=[f"divisors of {self.n_heads}: {divisors(self.n_heads)}"],
            )

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads


class MultiQueryConfig(MultiHeadConfig):
    """All query heads share one head of keys and values."""

    kind: Literal["mqa"] = "mqa"  # type: ignore[assignment]

    @property
    def kv_heads(self) -> int:
        return 1
