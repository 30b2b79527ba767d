"""Elementwise activations, each also the FFN kind of its name.

GELU: https://arxiv.org/abs/1606.08415. SiLU: https://arxiv.org/abs/1702.03118.
Squared ReLU: https://arxiv.org/abs/2109.08668.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from tfkit.component import ActivationConfig, Make


class ReLUConfig(ActivationConfig):
    """max(x, 0)."""

    kind: Literal["relu"] = "relu"

    def build(self, make: Make) -> nn.Module:
        return nn.ReLU()


class GELUConfig(ActivationConfig):
    """x times the normal distribution function of x."""

    kind: Literal["gelu"] = "gelu"
    approximate: Literal["none", "tanh"] = "none"
    """`tanh` is the approximation of GPT-2 and its kin."""

    def build(self, make: Make) -> nn.Module:
        return nn.GELU(approximate=self.approximate)


class SiLUConfig(ActivationConfig):
    """x sigmoid(x), also called swish."""

    kind: Literal["silu"] = "silu"

    def build(self, make: Make) -> nn.Module:
        return nn.SiLU()


class SquaredReLUConfig(ActivationConfig):
    """max(x, 0) squared."""

    kind: Literal["relu2"] = "relu2"

    def build(self, make: Make) -> nn.Module:
        return SquaredReLU()


class QuickGELUConfig(ActivationConfig):
    """x sigmoid(1.702 x), a GELU that costs one sigmoid."""

    kind: Literal["quick_gelu"] = "quick_gelu"

    def build(self, make: Make) -> nn.Module:
        return QuickGELU()


class TanhConfig(ActivationConfig):
    """Hyperbolic tangent."""

    kind: Literal["tanh"] = "tanh"

    def build(self, make: Make) -> nn.Module:
        return nn.Tanh()


class SquaredReLU(nn.Module):
    """max(x, 0) squared."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).square()


class QuickGELU(nn.Module):
    """x sigmoid(1.702 x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)
