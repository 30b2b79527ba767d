"""Rotary positions of a grid of patches: half of the channels turn with the row, half with the column.

DINOv3: https://arxiv.org/abs/2508.10104.

b batch, h heads, t positions, d width of a head.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

import tfkit
from tfkit import Invalid


class GridRopeConfig(tfkit.RotaryConfig):
    """Rotary positions of patches, by row and column between -1 and 1; class and register tokens are not rotated."""

    kind: Literal["grid_rope"] = "grid_rope"
    rows: tfkit.Dim
    """Rows of patches."""
    columns: tfkit.Dim
    """Columns of patches."""
    registers: tfkit.Extent = 0
    """Number of register tokens between the class token and the patches."""
    theta: tfkit.PositiveFloat = 100.0
    """Base of the geometric series of frequencies."""

    @property
    def only_length(self) -> int:
        return 1 + self.registers + self.rows * self.columns

    def check_attention(self, attention: tfkit.AttentionConfig) -> None:
        if attention.head_width % 4:
            message = f"positions of a grid need heads whose width is a multiple of 4; got {attention.head_width}"
            raise Invalid("position", message)

    def build(self, make: tfkit.Make, attention: tfkit.AttentionConfig) -> nn.Module:
        return GridRope(self, attention.head_width)

    def build_rotation(self, attention: tfkit.AttentionConfig) -> nn.Module:
        return Rotation()


class GridRope(nn.Module):
    """Positions [b or 1, t] -> cosines and sines [b or 1, t, 2, d]."""

    def __init__(self, config: GridRopeConfig, width: int) -> None:
        super().__init__()
        self.rows = config.rows
        self.columns = config.columns
        self.front = 1 + config.registers
        self.theta = config.theta
        self.width = width

    def forward(self, positions: Tensor, n_keys: int) -> Tensor:
        patches = positions - self.front
        rows = (patches // self.columns + 0.5) / self.rows
        columns = (patches % self.columns + 0.5) / self.columns
        coordinates = 2 * torch.stack((rows, columns), dim=-1) - 1
        channels = torch.arange(self.width // 4, device=positions.device)
        frequencies = 2 * math.pi * torch.exp(channels * (-4 * math.log(self.theta) / self.width))
        angles = (coordinates[..., None] * frequencies).flatten(2)
        angles = torch.cat((angles, angles), dim=-1)
        angles = angles.masked_fill((patches < 0)[..., None], 0.0)
        return torch.stack((angles.cos(), angles.sin()), dim=2)


class Rotation(nn.Module):
    """x [b, h, t, d] and a table -> [b, h, t, d]."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        cos, sin = table[:, None, :, 0].to(x.dtype), table[:, None, :, 1].to(x.dtype)
        return x * cos + turned * sin
