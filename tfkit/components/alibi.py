"""Attention with linear biases: scores fall with distance, with a slope for each head.

https://arxiv.org/abs/2108.12409.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from tfkit.component import AttentionConfig, Make, PositiveFloat, ScoreBiasConfig
from tfkit.nn import settings


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
