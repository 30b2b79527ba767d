"""Queries that grow with their position, against a softmax that flattens as more keys are read.

https://arxiv.org/abs/2501.19399.
"""

from __future__ import annotations

from torch import Tensor, nn

from tfkit.component import TemperatureConfig
from tfkit.nn import settings


class Temperature(nn.Module):
    """Positions of queries [b or 1, q] -> their factors [b or 1, 1, q, 1], float32."""

    extra_repr = settings

    def __init__(self, config: TemperatureConfig) -> None:
        super().__init__()
        self.beta = config.beta
        self.original_max_len = config.original_max_len
        self.offset = config.offset

    def forward(self, positions: Tensor) -> Tensor:
        # Padding before a sequence has a negative position.
        steps = (positions.clamp(min=0) + self.offset).div(self.original_max_len, rounding_mode="floor")
        return 1 + self.beta * steps.float().log1p()[:, None, :, None]
