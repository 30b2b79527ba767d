"""Learned absolute positions, one row per position, added to the embedding.

https://arxiv.org/abs/1705.03122
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from tfkit.component import Dim, Extent, Immaterial, InputPositionConfig, Make, Shared
from tfkit.nn import Table, settings


class LearnedConfig(InputPositionConfig):
    """A learned vector for each position."""

    kind: Literal["learned"] = "learned"
    max_len: Shared[Immaterial[Dim]]
    """Number of positions in the table."""
    offset: Extent = 0
    """Number of unused rows before position 0, as in OPT and BART (2)."""

    @property
    def longest(self) -> int:
        return self.max_len

    def build(self, make: Make, width: int) -> nn.Module:
        return Learned(self, width)


class Learned(nn.Module):
    """Positions [b, t] -> [b, t, width]."""

    extra_repr = settings

    def __init__(self, config: LearnedConfig, width: int) -> None:
        super().__init__()
        self.offset = config.offset
        self.table = Table(config.max_len + config.offset, width)

    def forward(self, positions: Tensor) -> Tensor:
        return self.table(positions + self.offset)
