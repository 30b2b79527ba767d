"""LongRoPE: each pair of channels is stretched by its own factor, and by a second factor in long sequences.

https://arxiv.org/abs/2402.13753
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from tfkit.component import Dim, Make, PositiveFloat, RopeScalingConfig
from tfkit.components.rope_scaling import Frequencies
from tfkit.errors import Invalid


class LongRopeScalingConfig(RopeScalingConfig):
    """Each frequency divided by its own factor, from a list for short sequences or a list for long sequences.

    The length is the batch's, padding included, or the caches' if sequences are decoded step by step.
    """

    kind: Literal["longrope"] = "longrope"
    short_factor: tuple[PositiveFloat, ...]
    """Divisors of the frequencies in sequences of up to `original_max_len`, one for each pair of channels."""
    long_factor: tuple[PositiveFloat, ...]
    """Divisors of the frequencies in longer sequences, one for each pair of channels."""
    original_max_len: Dim
    """Sequence length of the training."""
    factor: PositiveFloat | None = None
    """Longest context divided by `original_max_len`; the temperature is then sqrt(1 + ln factor / ln original_max_len),
    or 1 for a factor of up to 1."""
    temperature: PositiveFloat | None = None
    """Factor of cos and sin, instead of one that follows from `factor`."""

    @property
    def attention_factor(self) -> float:
        if self.factor is None or self.factor <= 1:
            return self.temperature or 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_len))

    def check(self) -> None:
        super().check()
        if self.factor is None and self.temperature is None:
            help = "set `factor` to the longest context divided by `original_max_len`"
            raise Invalid("", "longrope needs a `factor` or a `temperature`", help=help)
        if self.factor is not None and self.temperature is not None:
            raise Invalid("factor", "`factor` has no effect: it only decides the temperature, which is set")
        if self.factor is not None and self.original_max_len == 1:
            message = "original_max_len (1) must be above 1: the temperature divides by its logarithm"
            raise Invalid("original_max_len", message)

    def check_rope(self, width: int, theta: float) -> None:
        for name, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if len(factors) != width // 2:
                message = (
                    f"{name} must have {width // 2} factors, one for each pair of rotated channels; got {len(factors)}"
                )
                raise Invalid(f"position.scaling.{name}", message)

    def build(self, make: Make, width: int, theta: float) -> nn.Module:
        return LongRopeScaling(width, theta, self)


class LongRopeScaling(Frequencies):
    """Frequencies divided by one of the two lists."""

    def __init__(self, width: int, theta: float, config: LongRopeScalingConfig) -> None:
        super().__init__(width, theta)
        self.short = list(config.short_factor)
        self.long = list(config.long_factor)
        self.original_max_len = config.original_max_len

    def forward(self, n_keys: int, device: torch.device) -> Tensor:
        # Arithmetic instead of an `if`: a graph that is captured once works for both lengths.
        is_long = min(max(n_keys - self.original_max_len, 0), 1)
        short, long = torch.tensor(self.short, device=device), torch.tensor(self.long, device=device)
        return self.unscaled(self.theta, device) / (short * (1 - is_long) + long * is_long)
