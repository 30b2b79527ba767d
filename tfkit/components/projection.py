"""From x to queries, keys and values by heads: the first steps of the pipeline in `attention.py`.

    project -> clip -> norm over the full width -> heads

b batch, t positions, q queries, k keys, h query heads, g key-value heads, n all heads of a fused projection, d d_head.
Heads are split and merged in plain torch: in decoding token by token, an einops layer takes more than twice the time.

Clip: https://github.com/mosaicml/llm-foundry, https://arxiv.org/abs/2402.00838.
"""

from __future__ import annotations

from torch import Tensor, nn

from tfkit.component import AttentionConfig, Config, Make, NormConfig, PositiveFloat, Shared
from tfkit.nn import Linear


class ProjectionBiases(Config):
    """Which of the four projections have a bias."""

    q: bool = False
    k: bool = False
    v: bool = False
    o: bool = False


class ProjectedConfig(AttentionConfig):
    """Attention whose queries, keys and values are projections of what it reads."""

    bias: Shared[bool] | ProjectionBiases = True
    """Whether the projections have biases: all, none, or a mapping of q, k, v and o."""
    clip: PositiveFloat | None = None
    """Bounds the projected queries, keys and values, up and down, before any norm."""
    qk_norm_full: NormConfig | None = None
    """Normalizes all heads' queries, and keys, as one vector."""

    @property
    def biases(self) -> ProjectionBiases:
        """The biases of the four projections, one by one."""
        if isinstance(self.bias, bool):
            return ProjectionBiases(q=self.bias, k=self.bias, v=self.bias, o=self.bias)
        return self.bias

    @property
    def cached(self) -> tuple[tuple[int, int], ...]:
        return ((self.kv_heads, self.head_width), (self.kv_heads, self.head_width))

    def build_projection(self, make: Make, d_memory: int | None) -> nn.Module:
        """Build what turns x [b, t, d_model], or x and a memory, into q [b, h, q, d], k and v [b, g, k, d]."""
        biases, norm = self.biases, self.qk_norm_full
        if d_memory is None and norm is None and biases.q == biases.k == biases.v:
            return FusedProjection(self)
        q_norm = make(norm, self.n_heads * self.head_width) if norm else None
        k_norm = make(norm, self.kv_heads * self.head_width) if norm else None
        return SeparateProjection(self, self.d_model if d_memory is None else d_memory, q_norm, k_norm)


class FusedProjection(nn.Module):
    """Queries, keys and values of one sequence in one matrix."""

    def __init__(self, config: ProjectedConfig) -> None:
        super().__init__()
        self.d_head = config.head_width
        self.heads = [config.n_heads, config.kv_heads, config.kv_heads]
        self.clip = config.clip
        widths = {name: n * self.d_head for name, n in zip("qkv", self.heads, strict=True)}
        self.qkv = Linear(config.d_model, widths, bias=config.biases.q)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv(x)
        if self.clip is not None:
            qkv = qkv.clamp(-self.clip, self.clip)
        # Cut before the heads move: the gradients are then joined in the layout of qkv's output, without a copy.
        q, k, v = qkv.unflatten(2, (-1, self.d_head)).split_with_sizes(self.heads, dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class SeparateProjection(nn.Module):
    """Queries, keys and values in a matrix each; in cross-attention keys and values come from another sequence."""

    def __init__(
        self, config: ProjectedConfig, d_source: int, q_norm: nn.Module | None, k_norm: nn.Module | None
    ) -> None:
        super().__init__()
        d, biases = config.head_width, config.biases
        self.q = Linear(config.d_model, config.n_heads * d, bias=biases.q)
        self.k = Linear(d_source, config.kv_heads * d, bias=biases.k)
        self.v = Linear(d_source, config.kv_heads * d, bias=biases.v)
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.clip = config.clip
        self.d_head = d

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = self.keys_values(x)
        return self.queries(x), k, v

    def queries(self, x: Tensor) -> Tensor:
        """[b, q, d_model] -> [b, h, q, d]."""
        q = self.clipped(self.q(x))
        if self.q_norm is not None:
            q = self.q_norm(q)
        return self.split(q)

    def keys_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """[b, k, d_source] -> [b, g, k, d] twice."""
        k, v = self.clipped(self.k(source)), self.clipped(self.v(source))
        if self.k_norm is not None:
            k = self.k_norm(k)
        return self.split(k), self.split(v)

    def clipped(self, x: Tensor) -> Tensor:
        """The same within the bounds, if there are any."""
        return x if self.clip is None else x.clamp(-self.clip, self.clip)

    def split(self, x: Tensor) -> Tensor:
        """[b, t, n * d] -> [b, n, t, d]."""
        return x.unflatten(2, (-1, self.d_head)).transpose(1, 2)
