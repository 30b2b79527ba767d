"""An activation of a scaled input, as in the gates of Falcon-H1, https://arxiv.org/abs/2507.22448."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

import tfkit


class ScaledActivationConfig(tfkit.ActivationConfig):
    """activation(factor * x)."""

    kind: Literal["scaled"] = "scaled"
    factor: tfkit.PositiveFloat
    """Factor of the input."""
    activation: tfkit.ActivationConfig = tfkit.slot("silu")
    """Activation of the scaled input."""

    def build(self, make: tfkit.Make) -> nn.Module:
        return ScaledActivation(make(self.activation), self.factor)


class ScaledActivation(nn.Module):
    """[...] -> [...]."""

    def __init__(self, activation: nn.Module, factor: float) -> None:
        super().__init__()
        self.activation = activation
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.factor * x)

    def extra_repr(self) -> str:
        return f"factor={self.factor:.6g}"
