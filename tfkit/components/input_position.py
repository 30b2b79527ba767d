"""Absolute positions that are added to the embedding.

- learned: one row of a table per position. https://arxiv.org/abs/1705.03122
- sinusoidal: computed and not stored. https://arxiv.org/abs/1706.03762, section 3.5. With the last frequency at
  1 / theta: https://arxiv.org/abs/1803.07416

b batch, t positions, i pairs of channels, j the two of a pair.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from tfkit.component import Dim, Extent, Immaterial, InputPositionConfig, Make, PositiveFloat, Shared
from tfkit.errors import Invalid
from tfkit.nn import Rearrange, Table, settings


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


class SinusoidalConfig(InputPositionConfig):
    """Sines and cosines of position * theta ** (-2 i / width)."""

    kind: Literal["sinusoidal"] = "sinusoidal"
    layout: Literal["interleaved", "half"] = "interleaved"
    """Order of the channels: sin, cos, sin, cos, ... as in the paper, or all sines before all cosines."""
    theta: PositiveFloat = 10000.0
    """Base of the geometric series of frequencies."""
    endpoint: bool = False
    """If true, the last frequency is exactly 1 / theta: exponents are divided by width - 2, as in fairseq."""
    offset: Extent = 0
    """Position of the first token, as in fairseq (2)."""

    def check_width(self, width: int) -> None:
        if width % 2:
            raise Invalid("position", f"sinusoidal positions need an even width; got {width}")
        if self.endpoint and width == 2:
            raise Invalid(
                "position.endpoint", "`endpoint` cannot be used with a width of 2, which has a single frequency, 1"
            )

    def build(self, make: Make, width: int) -> nn.Module:
        return Sinusoidal(self, width)


class Sinusoidal(nn.Module):
    """Positions [b, t] -> [b, t, width], float32."""

    extra_repr = settings

    def __init__(self, config: SinusoidalConfig, width: int) -> None:
        super().__init__()
        self.width = width
        self.rate = -math.log(config.theta) / (width - 2 if config.endpoint else width)
        self.offset = config.offset
        self.merge_pairs = Rearrange("b t i j -> b t (i j)") if config.layout == "interleaved" else None

    def forward(self, positions: Tensor) -> Tensor:
        channels = torch.arange(0, self.width, 2, device=positions.device)
        angles = (positions + self.offset).float()[..., None] * torch.exp(channels.float() * self.rate)
        if self.merge_pairs is not None:
            return self.merge_pairs(torch.stack((angles.sin(), angles.cos()), dim=-1))
        return torch.cat((angles.sin(), angles.cos()), dim=-1)
