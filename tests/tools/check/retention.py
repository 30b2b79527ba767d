"""Attention without softmax: a state that decays, as recurrent layers have it, written as a sum over tokens.

https://arxiv.org/abs/2307.08621.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

import tfkit
from tfkit.errors import Invalid


class Retention(nn.Module):
    """The sum of all values, times query, key, and a decay: the exponential of what ALiBi adds to scores."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        weights = q @ k.mT * self.scale
        return (weights if mask is None else weights * mask.exp()) @ v


class RetentionConfig(tfkit.MultiHeadConfig):
    """Builds it."""

    kind: Literal["retention"] = "retention"  # type: ignore[assignment]

    def build_core(self, make: tfkit.Make, *, causal: bool) -> nn.Module:
        return Retention(self.head_width**-0.5)

    def check(self) -> None:
        super().check()
        if self.sinks:
            raise Invalid("sinks", "retention has no softmax")
