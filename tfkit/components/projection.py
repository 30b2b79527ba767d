"""From x to queries, keys and values by heads: the first steps of the pipeline in `attention.py`.

    project -> clip -> norm over the full width -> heads

b batch, t positions, q queries, k keys, h query heads, g key-value heads, d width of a head.

Clip: https://github.com/mosaicml/llm-foundry, https://arxiv.org/abs/2402.00838.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from tfkit.component import AttentionConfig, Cached, Config, Make, NormConfig, PositiveFloat, Shared, State
from tfkit.errors import Invalid
from tfkit.nn import Linear, Rearrange, settings


class ProjectionBiases(Config):
    """Biases of the individual projections."""

    q: bool = False
    k: bool = False
    v: bool = False
    o: bool = False


class ProjectedConfig(AttentionConfig):
    """Attention with queries, keys and values that are projections of its input."""

    bias: Shared[bool] | ProjectionBiases = True
    """Biases of the projections: true for all, false for none, or a mapping of `q`, `k`, `v` and `o`."""
    clip: PositiveFloat | None = None
    """Bound of the absolute values of the projected queries, keys and values, before any norm."""
    qk_norm_full: NormConfig | None = None
    """Norm of the queries of all heads as a single vector, and of the keys likewise."""
    values: Literal["keys"] | None = None
    """`keys`: the values are the projected keys, before norms and rotation. By default, they have a projection."""

    def check(self) -> None:
        super().check()
        if self.values is not None and isinstance(self.bias, ProjectionBiases) and self.bias.v:
            raise Invalid("bias.v", "`bias.v` has no effect: the values are the keys", help="set it to false")

    @property
    def biases(self) -> ProjectionBiases:
        """The biases of the four projections as a mapping."""
        if isinstance(self.bias, bool):
            return ProjectionBiases(q=self.bias, k=self.bias, v=self.bias, o=self.bias)
        return self.bias

    @property
    def cached(self) -> tuple[Cached | State, ...] | None:
        return (Cached(self.kv_heads, self.head_width), Cached(self.kv_heads, self.head_width))

    def build_projection(self, make: Make, d_memory: int | None) -> nn.Module:
        """Build the module: x [b, t, d_model], or x and a memory -> q [b, h, q, d], k and v [b, g, k, d]."""
        biases, norm = self.biases, self.qk_norm_full
        if self.takes:
            return QueryProjection(self, make(norm, self.n_heads * self.head_width) if norm else None)
        if d_memory is None and norm is None and biases.q == biases.k:
            if self.values is not None:
                return SharedProjection(self)
            if biases.k == biases.v:
                return FusedProjection(self)
        q_norm = make(norm, self.n_heads * self.head_width) if norm else None
        k_norm = make(norm, self.kv_heads * self.head_width) if norm else None
        return SeparateProjection(self, self.d_model if d_memory is None else d_memory, q_norm, k_norm)


class FusedProjection(nn.Module):
    """Queries, keys and values of one sequence in one matrix."""

    extra_repr = settings

    def __init__(self, config: ProjectedConfig) -> None:
        super().__init__()
        d, heads = config.head_width, {"q": config.n_heads, "k": config.kv_heads, "v": config.kv_heads}
        if config.values is not None:
            del heads["v"]
        self.qkv = Linear(config.d_model, {name: n * d for name, n in heads.items()}, bias=config.biases.q)
        self.clip = config.clip
        self.split_heads = Rearrange("b t (h d) -> b h t d", h=heads, d=d)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv(x)
        if self.clip is not None:
            qkv = qkv.clamp(-self.clip, self.clip)
        return self.split_heads(qkv)


class SharedProjection(FusedProjection):
    """Queries, and keys that are also the values, in one matrix."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qk = self.qkv(x)
        q, k = self.split_heads(qk if self.clip is None else qk.clamp(-self.clip, self.clip))
        return q, k, k


class QueryProjection(nn.Module):
    """Queries of a sequence: x [b, t, d_model] -> [b, h, t, d]."""

    extra_repr = settings

    def __init__(self, config: ProjectedConfig, q_norm: nn.Module | None) -> None:
        super().__init__()
        self.q = Linear(config.d_model, config.n_heads * config.head_width, bias=config.biases.q)
        self.q_norm = q_norm
        self.clip = config.clip
        self.split_heads = Rearrange("b t (h d) -> b h t d", d=config.head_width)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        if self.clip is not None:
            q = q.clamp(-self.clip, self.clip)
        if self.q_norm is not None:
            q = self.q_norm(q)
        return self.split_heads(q)


class SeparateProjection(nn.Module):
    """Queries, keys and values in a matrix each; in cross-attention, keys and values come from another sequence."""

    extra_repr = settings

    def __init__(
        self, config: ProjectedConfig, d_source: int, q_norm: nn.Module | None, k_norm: nn.Module | None
    ) -> None:
        super().__init__()
        d, biases = config.head_width, config.biases
        self.q = Linear(config.d_model, config.n_heads * d, bias=biases.q)
        self.k = Linear(d_source, config.kv_heads * d, bias=biases.k)
        self.v = None if config.values else Linear(d_source, config.kv_heads * d, bias=biases.v)
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.clip = config.clip
        self.split_heads = Rearrange("b t (h d) -> b h t d", d=d)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = self.keys_values(x)
        return self.queries(x), k, v

    def queries(self, x: Tensor) -> Tensor:
        """Project [b, q, d_model] -> [b, h, q, d]."""
        q = self.clipped(self.q(x))
        if self.q_norm is not None:
            q = self.q_norm(q)
        return self.split_heads(q)

    def keys_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Project [b, k, d_source] -> [b, g, k, d] twice."""
        k = self.clipped(self.k(source))
        v = k if self.v is None else self.clipped(self.v(source))
        if self.k_norm is not None:
            k = self.k_norm(k)
        return self.split_heads(k), self.split_heads(v)

    def clipped(self, x: Tensor) -> Tensor:
        """Clamp x to the bounds, if there are any."""
        return x if self.clip is None else x.clamp(-self.clip, self.clip)
