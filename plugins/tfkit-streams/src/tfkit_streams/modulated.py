"""Layers that depend on a condition, such as a time step or a class: norms that scale and shift, and gates of outputs.

    norm(x) = layernorm(x) * (1 + scale) + shift;  x = x + gate * y
    scale, shift and gate are linear in silu(condition), and 0 at the start

Together they are adaLN-Zero, https://arxiv.org/abs/2212.09748: a layer begins as the identity.
b batch, t positions, c width of the condition, m d_model.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit.nn import Context, named


class ModulatedConfig(tfkit.StreamConfig):
    """The addition of a sublayer's output, times a gate for each channel that the condition determines."""

    kind: Literal["modulated"] = "modulated"
    takes_condition = True
    d_condition: tfkit.Shared[tfkit.Dim]
    """Width of the condition."""

    def build(self, make: tfkit.Make, part: tfkit.StreamPart, width: int) -> nn.Module:
        return Read(self.d_condition, width) if part == "read" else Write()


class AdaptiveNormConfig(tfkit.NormConfig):
    """Subtract the mean, divide by the standard deviation, then scale and shift as the condition determines."""

    kind: Literal["adaptive"] = "adaptive"
    takes_condition = True
    d_condition: tfkit.Shared[tfkit.Dim]
    """Width of the condition."""
    eps: tfkit.PositiveFloat = 1e-6
    """Number to add to the variance."""

    def build(self, make: tfkit.Make, width: int) -> nn.Module:
        return AdaptiveNorm(self, width)


class Modulation(nn.Module):
    """A linear layer of silu(condition), initially zeros: [b, c] -> [b, 1, outputs]."""

    def __init__(self, d_condition: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, d_condition))
        self.bias = nn.Parameter(torch.empty(outputs))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, context: Context) -> Tensor:
        condition = context.condition
        assert condition is not None
        return F.linear(F.silu(condition), self.weight, self.bias)[:, None]

    def extra_repr(self) -> str:
        return named(*self.weight.shape[::-1])


class Read(nn.Module):
    """x [b, t, m] unchanged, and the gate of `Write`."""

    def __init__(self, d_condition: int, width: int) -> None:
        super().__init__()
        self.gate = Modulation(d_condition, width)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, list[Tensor]]:
        return x, [self.gate(context)]


class Write(nn.Module):
    """x + gate * y."""

    def forward(self, x: Tensor, y: Tensor, state: list[Tensor]) -> Tensor:
        return x + state[0] * y


class AdaptiveNorm(nn.Module):
    """layernorm(x) * (1 + scale) + shift: [b, t, m] -> [b, t, m]."""

    def __init__(self, config: AdaptiveNormConfig, width: int) -> None:
        super().__init__()
        self.modulation = Modulation(config.d_condition, 2 * width)
        self.width = [width]
        self.eps = config.eps

    def forward(self, x: Tensor, context: Context) -> Tensor:
        shift, scale = self.modulation(context).chunk(2, dim=-1)
        return F.layer_norm(x, self.width, eps=self.eps) * (1 + scale) + shift

    def extra_repr(self) -> str:
        return named(*self.width, eps=self.eps)
