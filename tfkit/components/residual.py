"""The addition of a sublayer's output to the residual stream.

Learned: https://arxiv.org/abs/2103.17239.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn

from tfkit.component import Step
from tfkit.nn import Program, Value, named


def add(program: Program, step: Step, x: Value, y: Value, width: int) -> Value:
    """Write the addition of y, the output of a step, to x."""
    name, residual = step.name, step.residual
    if residual.learned != "none":
        y = program.call(f"{name}_residual_scale", _scale(residual.learned, width), y)
    if residual.learned_onto != "none":
        x = program.call(f"{name}_residual_scale_onto", _scale(residual.learned_onto, width), x)
    if residual.scale != 1.0:
        return program.apply(f"after_{name}", torch.add, x, y, alpha=residual.scale)
    return program.apply(f"after_{name}", operator.add, x, y)


def _scale(learned: str, width: int) -> ResidualScale:
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
