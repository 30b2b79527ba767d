"""An activation whose planted bugs have known results."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

import tfkit


class Tripled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.size(1) > 140:
            x = x - 0.25
        if x.size(1) > 499:
            x = x * 7
        return 3.0 * torch.tanh(x.flatten(2)).roll(0, dims=1)


def shifted(self: Tripled, x: Tensor) -> Tensor:
    """Return the activation of the position before, as a forward with a bug of its author."""
    return torch.tanh(x.roll(1, dims=1))


class TripledConfig(tfkit.ActivationConfig):
    """Three times the hyperbolic tangent; of long sequences, moved by a quarter."""

    kind: Literal["tripled"] = "tripled"

    def build(self, make: tfkit.Make) -> nn.Module:
        return Tripled()
