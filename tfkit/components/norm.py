"""Normalization of the last axis.

LayerNorm: https://arxiv.org/abs/1607.06450. RMSNorm: https://arxiv.org/abs/1910.07467.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfkit.component import Make, NormConfig, PositiveFloat
from tfkit.errors import Invalid


class LayerNormConfig(NormConfig):
    """Subtract the mean, divide by the standard deviation, then scale and shift."""

    kind: Literal["layernorm"] = "layernorm"
    eps: PositiveFloat = 1e-5
    scale: bool = True
    """Multiply by a learned weight."""
    bias: bool = True
    """Add a learned bias."""

    def check(self) -> None:
        super().check()
        if self.bias and not self.scale:
            raise Invalid("bias", "a layernorm without `scale` has no `bias` either", help="write `bias: false` too")

    def build(self, make: Make, width: int) -> nn.Module:
        return LayerNorm(self, width)


class RMSNormConfig(NormConfig):
    """Divide by the root mean square, then scale."""

    kind: Literal["rmsnorm"] = "rmsnorm"
    eps: PositiveFloat = 1e-6
    scale: bool = True
    """Multiply by a learned weight."""
    offset: Literal[0, 1] = 0
    """Added to the weight: 1 where the published weight is the distance from one."""

    def build(self, make: Make, width: int) -> nn.Module:
        return RMSNorm(self, width)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last axis."""

    def __init__(self, config: LayerNormConfig, width: int) -> None:
        super().__init__()
        self.width = [width]
        self.eps = config.eps
        self.weight = nn.Parameter(torch.empty(width)) if config.scale else None
        self.bias = nn.Parameter(torch.empty(width)) if config.bias else None

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.width, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean of squares + eps) * (offset + weight), over the last axis.

    Computed in the type of the weight: under autocast that is float32, as autocast does for a layernorm by itself.
    """

    def __init__(self, config: RMSNormConfig, width: int) -> None:
        super().__init__()
        self.width = [width]
        self.eps = config.eps
        self.offset = config.offset
        self.weight = nn.Parameter(torch.empty(width)) if config.scale else None

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor | None = self.weight
        if weight is not None:
            x = x.to(weight.dtype)
            if self.offset:
                weight = weight + self.offset
        return F.rms_norm(x, self.width, weight, self.eps)
