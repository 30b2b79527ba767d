"""T5's relative positions: a learned bias per head and bucket of distances.

https://arxiv.org/abs/1910.10683. Each short distance has a bucket, long ones share buckets that grow logarithmically.

b batch, q queries, k keys, h heads.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from tfkit.component import AttentionConfig, Count, Dim, Make, ScoreBiasConfig
from tfkit.errors import Invalid
from tfkit.nn import Rearrange, Table, named


class T5BiasConfig(ScoreBiasConfig):
    """A learned score bias per head and bucket of distances."""

    kind: Literal["t5"] = "t5"
    n_buckets: Count = 32
    max_distance: Dim = 128
    """Distance from which all share the last bucket."""
    shared: bool = True
    """If true, all layers share one table, as in T5; if false, each has its own, as in UMT5."""

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
        far = self.near + (share * (self.sides - self.near)).long()
        bucket = torch.where(distance < self.near, distance, far.clamp(max=self.sides - 1))
        return bucket if self.causal else bucket + (offset > 0).long() * self.sides

    def extra_repr(self) -> str:
        return named(causal=self.causal, max_distance=self.max_distance)
