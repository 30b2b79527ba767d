"""The addition of a sublayer's output to the residual stream.

Learned: https://arxiv.org/abs/2103.17239.
"""

from __future__ import annotations

import operator
from typing import Literal

import torch
from torch import Tensor, nn

from tfkit.component import Config, PositiveFloat
from tfkit.nn import Program, Value, named

Learned = Literal["none", "scalar", "vector"]


class ResidualConfig(Config):
    """The addition of a sublayer's output y to x: x + scale * y."""

    scale: PositiveFloat = 1.0
    """Factor of the sublayer's output."""
    learned: Learned = "none"
    """Learned factor of the output, in addition to `scale`: one, or one per channel; it starts at 1."""
    onto: Literal["previous", "normed"] = "previous"
    """Meaning of x: the sum so far, or the sublayer's input after its norm."""
    learned_onto: Learned = "none"
    """Learned factor of x: one, or one per channel; it starts at 1."""


def add(program: Program, name: str, residual: ResidualConfig, x: Value, y: Value, width: int) -> Value:
    """Write the addition of y, the output of sublayer `name`, to x."""
    if residual.learned != "none":
        y = program.call(f"{name}_residual_scale", _scale(residual.learned, width), y)
    if residual.learned_onto != "none":
        x = program.call(f"{name}_residual_scale_onto", _scale(residual.learned_onto, width), x)
    if residual.scale != 1.0:
        return program.apply(f"after_{name}", torch.add, x, y, alpha=residual.scale)
    return program.apply(f"after_{name}", operator.add, x, y)


def _scale(learned: Learned, width: int) -> ResidualScale:
    return ResidualScale(width if learned == "vector" else 1)


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
