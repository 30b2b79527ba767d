"""Score biases: relative positions that are added to the scores of attention.

- alibi: scores fall with distance, with a slope for each head. https://arxiv.org/abs/2108.12409
- t5: a learned bias per head and bucket of distances. Each short distance has a bucket, long ones share buckets that
  grow logarithmically. https://arxiv.org/abs/1910.10683

b batch, q queries, k keys, h heads.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from tfkit.component import AttentionConfig, Count, Dim, Make, PositiveFloat, ScoreBiasConfig
from tfkit.errors import Invalid
from tfkit.nn import Rearrange, Table, named, settings


class AlibiConfig(ScoreBiasConfig):
    """Score bias of -slope * |distance|, with slopes in a geometric series over the heads."""

    kind: Literal["alibi"] = "alibi"
    max_slope_exponent: PositiveFloat = 8.0
    """Negative exponent of the last slope, which is 2 ** -max_slope_exponent."""
    scaled: bool = False
    """If true, the bias is multiplied by d_head ** -0.5, as if it were added to the scores before their scaling."""

    def build(self, make: Make, attention: AttentionConfig, causal: bool) -> nn.Module:
        return Alibi(self.slopes(attention))

    def slopes(self, attention: AttentionConfig) -> list[float]:
        scale = attention.head_width**-0.5 if self.scaled else 1.0
        power = 2 ** (attention.n_heads.bit_length() - 1)
        exponents = [self.max_slope_exponent * (i + 1) / power for i in range(power)]
        between = [self.max_slope_exponent * (i + 0.5) / power for i in range(attention.n_heads - power)]
        return [scale * 2.0**-exponent for exponent in exponents + between]


class Alibi(nn.Module):
    """Positions of queries [b or 1, q] and keys [b or 1, k] -> [b or 1, h, q, k], float32."""

    extra_repr = settings

    def __init__(self, slopes: list[float]) -> None:
        super().__init__()
        self.slopes = slopes

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        distance = (keys[:, None, None, :] - queries[:, None, :, None]).abs().float()
        return -torch.tensor(self.slopes, device=queries.device)[:, None, None] * distance


class T5BiasConfig(ScoreBiasConfig):
    """A learned score bias per head and bucket of distances."""

    kind: Literal["t5"] = "t5"
    n_buckets: Count = 32
    max_distance: Dim = 128
    """Distance from which all distances share the last bucket."""
    shared: bool = True
    """If true, all layers share a table, as in T5; if false, each layer has a table, as in UMT5."""

    @property
    def is_shared(self) -> bool:
        return self.shared

    def check(self) -> None:
        super().check()
        if self.n_buckets < 4 or self.n_buckets % 4:
            raise Invalid("n_buckets", f"n_buckets ({self.n_buckets}) must be a multiple of 4")
        if self.max_distance <= self.n_buckets // 2:
            raise Invalid(
                "max_distance",
                f"max_distance ({self.max_distance}) must be above half of n_buckets ({self.n_buckets})",
            )

    def build(self, make: Make, attention: AttentionConfig, causal: bool) -> nn.Module:
        return T5Bias(self, attention.n_heads, causal)


class T5Bias(nn.Module):
    """Positions of queries [b or 1, q] and keys [b or 1, k] -> [b or 1, h, q, k]."""

    def __init__(self, config: T5BiasConfig, n_heads: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.sides = config.n_buckets if causal else config.n_buckets // 2
        self.near = self.sides // 2
        self.max_distance = config.max_distance
        self.buckets = Table(config.n_buckets, n_heads)
        self.heads_first = Rearrange("b q k h -> b h q k")

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        offset = keys[:, None, :] - queries[:, :, None]
        return self.heads_first(self.buckets(self.bucket(offset)))

    def bucket(self, offset: Tensor) -> Tensor:
        """Map key position minus query position [b or 1, q, k] to the index of its bucket."""
        distance = (-offset).clamp(min=0) if self.causal else offset.abs()
        # Divided and multiplied in T5's order: at 16, 32 and 64 tokens the last bit decides, and processors differ.
        share = torch.log(distance.clamp(min=1).float() / self.near) / math.log(self.max_distance / self.near)
        distant = self.near + (share * (self.sides - self.near)).long()
        bucket = torch.where(distance < self.near, distance, distant.clamp(max=self.sides - 1))
        return bucket if self.causal else bucket + (offset > 0).long() * self.sides

    def extra_repr(self) -> str:
        return named(causal=self.causal, max_distance=self.max_distance)
