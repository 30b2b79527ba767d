"""Schedules: the factor of the learning rate at each step of a run. Every kind begins with a `warmup`."""

from __future__ import annotations

import math
from typing import Literal

from tfkit.errors import Invalid
from tfkit.run.contract import NonNegative, ScheduleConfig, Steps, count_of


class ConstantConfig(ScheduleConfig):
    """The full rate at all steps after the warmup."""

    kind: Literal["constant"] = "constant"

    def after(self, done: int, left: int) -> float:
        return 1.0


class CosineConfig(ScheduleConfig):
    """Decay along half a cosine wave (https://arxiv.org/abs/1608.03983)."""

    kind: Literal["cosine"] = "cosine"

    end: NonNegative = 0.1
    """The factor of the last step."""

    def after(self, done: int, left: int) -> float:
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * done / left)) / 2


class LinearConfig(ScheduleConfig):
    """Linear decay."""

    kind: Literal["linear"] = "linear"

    end: NonNegative = 0.0
    """The factor of the last step."""

    def after(self, done: int, left: int) -> float:
        return 1 + (self.end - 1) * done / left


class WSDConfig(ScheduleConfig):
    """Warmup, a constant rate, and a linear decay (https://arxiv.org/abs/2404.06395)."""

    kind: Literal["wsd"] = "wsd"

    decay: Steps = 0.2
    """The number of steps of the decay, at the end of the run; below 1, a fraction of all steps."""
    end: NonNegative = 0.0
    """The factor of the last step."""

    def factor(self, step: int, steps: int) -> float:
        decay = count_of(self.decay, steps)
        stable = super().factor(step, steps)
        return stable if steps - step >= decay else stable + (self.end - stable) * (1 - (steps - step) / decay)

    def after(self, done: int, left: int) -> float:
        return 1.0

    def check_steps(self, steps: int) -> None:
        super().check_steps(steps)
        warmup, decay = count_of(self.warmup, steps), count_of(self.decay, steps)
        if warmup + decay > steps:
            over = warmup + decay - steps
            message = (
                f"`warmup` ({warmup:,}) and `decay` ({decay:,}) must fit into {steps:,} steps; they overlap by {over:,}"
            )
            raise Invalid("warmup", message, help=f"set `warmup` to at most {max(steps - decay, 0):,} steps")


class InverseSqrtConfig(ScheduleConfig):
    """Decay with the inverse square root of the step after the warmup (https://arxiv.org/abs/1706.03762)."""

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"

    def factor(self, step: int, steps: int) -> float:
        peak = max(count_of(self.warmup, steps), 1)
        return step / peak if step <= peak else math.sqrt(peak / step)

    def after(self, done: int, left: int) -> float:
        raise AssertionError("`factor` is complete")
