"""Masks of patches: windows of an image.

Qwen2.5-VL: https://arxiv.org/abs/2502.13923.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

import tfkit
from tfkit import Invalid


class GridWindowsConfig(tfkit.MaskRuleConfig):
    """Each patch of an image attends to the patches of its window, a square; windows at the edges may be smaller."""

    kind: Literal["grid_windows"] = "grid_windows"
    columns: tfkit.Dim
    """Columns of patches of the image."""
    size: tfkit.Dim
    """Rows and columns of patches of a window."""

    def check_mask(self, mask: tfkit.MaskConfig) -> None:
        """Raise `Invalid` for extents, which count patches in the order of a text."""
        if mask.left is not None or mask.right is not None:
            raise Invalid("rule", "`grid_windows` cannot be combined with `left` and `right`", help="remove both")

    def build(self, make: tfkit.Make) -> nn.Module:
        return GridWindows(self.columns, self.size)


class GridWindows(nn.Module):
    """Positions of queries and of keys -> True in the same window."""

    def __init__(self, columns: int, size: int) -> None:
        super().__init__()
        self.columns = columns
        self.size = size

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        band = self.columns * self.size
        same_column = queries % self.columns // self.size == keys % self.columns // self.size
        return (queries // band == keys // band) & same_column
