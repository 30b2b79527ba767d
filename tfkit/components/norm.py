"""Normalization of the last axis.

LayerNorm: https://arxiv.org/abs/1607.06450. RMSNorm: https://arxiv.org/abs/1910.07467.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfkit.component import Make, NormConfig, PositiveFloat
from tfkit.errors import Invalid
from tfkit.nn import named


class WeightedNormConfig(NormConfig):
    """A norm that multiplies by a learned weight, if it has one."""

    eps: PositiveFloat
    scale: bool = True
    """If true, multiply by a learned weight."""
    offset: Literal[0, 1] = 0
    """Number to add to the weight: 1 if the published weight is the difference from one."""

    def check(self) -> None:
        super().check()
        if self.offset and not self.scale:
            raise Invalid("offset", "`offset` has no effect: a norm without `scale` has no weight to add it to")

    @abstractmethod
    def build(self, make: Make, width: int, heads: int | None = None) -> nn.Module:
        """Build the module for a last axis of `width`.

        With `heads`, its input is [batch, heads, length, width], and each head has its own weight.
        """


class LayerNormConfig(WeightedNormConfig):
    """Subtract the mean, divide by the standard deviation, then scale and shift."""

    kind: Literal["layernorm"] = "layernorm"
    eps: PositiveFloat = 1e-5
    bias: bool = True
    """If true, add a learned bias."""

    def in_words(self) -> str:
        """Describe the operations, with scale and shift if the norm has them."""
        learned = " and ".join(["scale"] * self.scale + ["shift"] * self.bias)
        return f"Subtract the mean, divide by the standard deviation{f', then {learned}' if learned else ''}."

    def check(self) -> None:
        super().check()
        if self.bias and not self.scale:
            raise Invalid("bias", "a layernorm without `scale` cannot have a `bias`", help="also write `bias: false`")

    def build(self, make: Make, width: int, heads: int | None = None) -> nn.Module:
        if heads is not None and self.scale:
            bare = nn.LayerNorm(width, self.eps, elementwise_affine=False)
            return HeadNorm(bare, heads, width, offset=self.offset, bias=self.bias)
        if self.offset:
            return LayerNorm(self, width)
        return nn.LayerNorm(width, self.eps, elementwise_affine=self.scale, bias=self.bias)


class RMSNormConfig(WeightedNormConfig):
    """Divide by the root mean square, then scale."""

    kind: Literal["rmsnorm"] = "rmsnorm"
    eps: PositiveFloat = 1e-6

    def in_words(self) -> str:
        """Describe the operations, with the scale if the norm has a weight."""
        return f"Divide by the root mean square{', then scale' if self.scale else ''}."

    def build(self, make: Make, width: int, heads: int | None = None) -> nn.Module:
        if heads is None or not self.scale:
            return RMSNorm(self, width)
        return HeadNorm(
            RMSNorm(self.model_copy(update={"scale": False}), width), heads, width, offset=self.offset, bias=False
        )


class LayerNorm(nn.LayerNorm):
    """(x - mean) / sqrt(variance + eps) * (1 + weight) + bias: the weight is a distance from one."""

    def __init__(self, config: LayerNormConfig, width: int) -> None:
        super().__init__(width, config.eps, bias=config.bias)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, offset=1"


class RMSNorm(nn.Module):
    """x / sqrt(mean of squares + eps) * (offset + weight), over the last axis.

    It is computed in the type of the weight: float32 under autocast, which treats a layernorm in this way too.
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

    def extra_repr(self) -> str:
        weight = None if self.weight is not None else "none"
        return named(*self.width, eps=self.eps, weight=weight, offset=self.offset or None)


class HeadNorm(nn.Module):
    """A norm without weights, then a weight and a bias [heads, width] of each head; x [b, heads, t, width]."""

    def __init__(self, norm: nn.Module, heads: int, width: int, *, offset: int, bias: bool) -> None:
        super().__init__()
        self.norm = norm
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(heads, width))
        self.bias = nn.Parameter(torch.empty(heads, width)) if bias else None

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.offset if self.offset else self.weight
        x = self.norm(x.to(weight.dtype)) * weight[:, None]
        return x if self.bias is None else x + self.bias[:, None]

    def extra_repr(self) -> str:
        heads, width = self.weight.shape
        return named(heads=heads, width=width, bias=self.bias is not None, offset=self.offset or None)
