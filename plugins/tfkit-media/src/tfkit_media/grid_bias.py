"""A score bias of a grid of patches: a learned number per head for each distance in rows and columns.

BEiT: https://arxiv.org/abs/2106.08254.

b batch, h heads, q queries, k keys.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

import tfkit
from tfkit.nn import Rearrange, Table, settings


class GridBiasConfig(tfkit.ScoreBiasConfig):
    """A learned score bias per head and distance of patches in rows and columns.

    The class token before the patches has a bias to all patches, from all patches, and to itself.
    """

    kind: Literal["grid_bias"] = "grid_bias"
    rows: tfkit.Dim
    """Rows of patches."""
    columns: tfkit.Dim
    """Columns of patches."""
    shared: bool = True
    """If true, all layers share a table; if false, each layer has a table."""

    @property
    def is_shared(self) -> bool:
        return self.shared

    @property
    def only_length(self) -> int:
        return 1 + self.rows * self.columns

    def build(self, make: tfkit.Make, attention: tfkit.AttentionConfig, causal: bool) -> nn.Module:
        return GridBias(self, attention.n_heads)


class GridBias(nn.Module):
    """Positions of queries [b or 1, q] and keys [b or 1, k] -> [b or 1, h, q, k]."""

    extra_repr = settings

    def __init__(self, config: GridBiasConfig, n_heads: int) -> None:
        super().__init__()
        self.rows = config.rows
        self.columns = config.columns
        self.distances = Table((2 * config.rows - 1) * (2 * config.columns - 1) + 3, n_heads)
        self.heads_first = Rearrange("b q k h -> b h q k")

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        q, k = queries[:, :, None] - 1, keys[:, None, :] - 1  # -1 is the class token
        rows = q // self.columns - k // self.columns + self.rows - 1
        columns = q % self.columns - k % self.columns + self.columns - 1
        between = rows * (2 * self.columns - 1) + columns
        n = self.distances.weight.size(0)
        to_class = torch.where(q < 0, n - 1, n - 2)
        index = torch.where(k < 0, to_class, torch.where(q < 0, n - 3, between))
        bias: Tensor = self.heads_first(self.distances(index))
        return bias
