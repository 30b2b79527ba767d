"""Learned factors of the addition of a sublayer's output to the residual stream.

https://arxiv.org/abs/2103.17239.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tfkit.nn import named


class ResidualScale(nn.Module):
    """A learned factor of a term of the residual stream; [width] or [1]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    def extra_repr(self) -> str:
        return named(width=self.weight.size(0))
