"""Rotary positions of a grid of patches: half of the channels turn with the row, half with the column.

DINOv3: https://arxiv.org/abs/2508.10104. Qwen2-VL: https://arxiv.org/abs/2409.12191. Pixtral:
https://arxiv.org/abs/2410.07073.

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
    """Rotary positions of patches, by row and column; class and register tokens are not rotated."""

    kind: Literal["grid_rope"] = "grid_rope"
    rows: tfkit.Dim
    """Rows of patches."""
    columns: tfkit.Dim
    """Columns of patches."""
    class_token: bool = True
    """If true, a class token precedes the patches."""
    registers: tfkit.Extent = 0
    """Number of register tokens between the class token and the patches."""
    coordinates: Literal["relative", "counted"] = "relative"
    """Rows and columns are between -1 and 1, times 2 pi, as in DINOv3; or counted from 0, as in Qwen2-VL."""
    staggered: bool = False
    """If true, the frequencies of columns lie between the frequencies of rows, as in Pixtral; by default, both are
    equal."""
    theta: tfkit.PositiveFloat = 100.0
    """Base of the geometric series of frequencies."""

    @property
    def front(self) -> int:
        """Number of tokens before the patches."""
        return int(self.class_token) + self.registers

    @property
    def only_length(self) -> int:
        return self.front + self.rows * self.columns

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
        self.front = config.front
        self.relative = config.coordinates == "relative"
        self.theta = config.theta
        self.stagger = 0.5 if config.staggered else 0.0
        self.width = width

    def forward(self, positions: Tensor, n_keys: int) -> Tensor:
        patches = positions - self.front
        coordinates = torch.stack((patches // self.columns, patches % self.columns), dim=-1).float()
        if self.relative:
            sizes = torch.tensor([self.rows, self.columns], device=positions.device)
            coordinates = 2 * math.pi * (2 * ((coordinates + 0.5) / sizes) - 1)
        channels = torch.arange(self.width // 4, device=positions.device, dtype=torch.float32)
        steps = torch.stack((channels, channels + self.stagger))
        angles = (coordinates[..., None] * torch.exp(steps * (-4 * math.log(self.theta) / self.width))).flatten(2)
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
