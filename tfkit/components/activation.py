"""Elementwise activations; the usual ones of an FFN are also the FFN kinds of their names.

GELU: https://arxiv.org/abs/1606.08415. SiLU: https://arxiv.org/abs/1702.03118.
Squared ReLU: https://arxiv.org/abs/2109.08668. xIELU: https://arxiv.org/abs/2411.13010.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
    """`tanh` is the approximation used by GPT-2 and similar models."""

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


class SigmoidConfig(ActivationConfig):
    """1 / (1 + exp(-x))."""

    kind: Literal["sigmoid"] = "sigmoid"

    def build(self, make: Make) -> nn.Module:
        return nn.Sigmoid()


class SoftplusConfig(ActivationConfig):
    """ln(1 + exp(x))."""

    kind: Literal["softplus"] = "softplus"

    def build(self, make: Make) -> nn.Module:
        return nn.Softplus()


class XIELUConfig(ActivationConfig):
    """x / 2 plus a learned multiple of x squared where x is positive, and one of exp(x) - 1 - x where it is not."""

    kind: Literal["xielu"] = "xielu"

    def build(self, make: Make) -> nn.Module:
        return XIELU()


class SquaredReLU(nn.Module):
    """max(x, 0) squared."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).square()


class QuickGELU(nn.Module):
    """x sigmoid(1.702 x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class XIELU(nn.Module):
    """Two learned scalars, each through a softplus so that the multiple stays positive; both multiples start at 0.8."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1))
        self.alpha_n = nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.alpha_p, math.log(math.expm1(0.8)))
        nn.init.constant_(self.alpha_n, math.log(math.expm1(0.3)))

    def forward(self, x: Tensor) -> Tensor:
        positive = F.softplus(self.alpha_p).to(x.dtype) * x * x
        multiple = 0.5 + F.softplus(self.alpha_n).to(x.dtype)
        # For positive x, this branch is not taken, but its gradient must still be finite.
        negative = multiple * (torch.expm1(x.clamp(max=-1e-6)) - x)
        return torch.where(x > 0, positive, negative) + 0.5 * x
