"""The trials of an arm, and the best of them: every combination of values, or those that a search asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Self

from tfkit.spec.sweep import Range
from tfkit.tools.sweep.arms import Arm, Arms, Choice, Trial, choices, collected
from tfkit.tools.sweep.curves import curve_of
from tfkit.tools.sweep.work import is_complete

NEAR = 0.02
"""The part of a range that is its edge, on both sides."""


@dataclass(frozen=True)
class Tuned:
    """The values that an arm was given, and those settings whose best value is at the edge of what was tried."""

    values: dict[str, Any]
    edge: tuple[str, ...]


@dataclass(frozen=True)
class Tried:
    """The result of a trial: the mean of the metric `on`.

    Attributes:
        mean: None until all runs of the trial are complete, or if a run has no finite value.
        diverged: the number of runs that diverged, of `runs`.
    """

    arm: str
    values: dict[str, Any]
    words: str
    on: str
    mean: float | None
    best: bool
    runs: int
    diverged: int


class Tuning:
    """The trials of an arm: every combination of values.

    Attributes:
        arm: the arm.
        trials: those that are known; a search knows more as they are made.
        count: their number in the end.
    """

    def __init__(self, arms: Arms, arm: Arm, trials: Sequence[Trial], count: int) -> None:
        self.arms, self.arm, self.trials, self.count = arms, arm, list(trials), count

    @classmethod
    def of(cls, arms: Arms, arm: Arm) -> Self:
        """The trials of an arm; raises SpecError with the errors of all their runs."""
        every = collected(partial(arms.trial, arm, choice) for choice in choices(arms.file.tuned))
        return cls(arms, arm, every, len(every))

    def waiting(self) -> list[Trial]:
        """The trials to make next."""
        return [trial for trial in self.trials if not is_made(trial)]

    def go_on(self) -> bool:
        """Take in what was made; return True if there are more trials to make."""
        return False

    def best(self) -> tuple[Choice, Tuned] | None:
        """The choice with the best mean over the seeds of tuning; None if trials are to be made, or none has a mean."""
        best = self._best(self._means())
        if best is None:
            return None
        edge = tuple(path for path, value in best.choice.values.items() if self._at_edge(path, value))
        return best.choice, Tuned(best.choice.values, edge)

    def tried(self) -> list[Tried]:
        """All trials as data."""
        means, on = self._means(), self.arms.config.compare.on
        best = self._best(means)
        return [
            Tried(
                self.arm.name,
                trial.choice.values,
                trial.choice.words(),
                on,
                mean,
                trial is best,
                len(trial.cells),
                self.diverged(trial),
            )
            for trial, mean in zip(self.trials, means, strict=True)
        ]

    def mean(self, trial: Trial) -> float | None:
        """The mean of a trial over its seeds; None until its runs are made, or if it is no finite number."""
        if not is_made(trial):
            return None
        mean = fmean(curve_of(cell, self.arms.config.compare.on).last for cell in trial.cells)
        return mean if math.isfinite(mean) else None

    def diverged(self, trial: Trial) -> int:
        """Return the number of runs of a trial that diverged."""
        curves = (curve_of(cell, self.arms.config.compare.on) for cell in trial.cells if is_complete(cell))
        return sum(curve.diverged for curve in curves)

    def rank(self, mean: float | None) -> float:
        """A mean as a number of which less is better; infinite for none."""
        if mean is None:
            return math.inf
        return mean if self.arms.config.compare.lower else -mean

    def _means(self) -> list[float | None]:
        return [self.mean(trial) for trial in self.trials]

    def _best(self, means: Sequence[float | None]) -> Trial | None:
        """The trial with the best of the means; None if trials are to be made, or none has a mean."""
        index = min(range(len(means)), key=lambda index: self.rank(means[index]))
        return None if self.waiting() or means[index] is None else self.trials[index]

    def _at_edge(self, path: str, value: Any) -> bool:
        """True if a value is the least or the largest of the numbers that were tried, or near the end of a range."""
        tune = self.arms.config.tune
        assert tune is not None
        if path in tune.ranges:
            return not NEAR <= share_of(tune.ranges[path], value) <= 1 - NEAR
        tried = tune.over[path]
        numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in tried)
        return numbers and value in (min(tried), max(tried))


def share_of(range: Range, value: float) -> float:
    """The place of a value between the ends of its range, 0 to 1."""
    on_scale = math.log if range.scale == "log" else float
    low, high, at = map(on_scale, (range.low, range.high, value))
    return (at - low) / (high - low)


def is_made(trial: Trial) -> bool:
    """True if all runs of a trial are complete."""
    return all(map(is_complete, trial.cells))
