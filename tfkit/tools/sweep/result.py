"""The results of a comparison, as data."""

from __future__ import annotations

from dataclasses import dataclass

from tfkit.tools.sweep.curves import Curve
from tfkit.tools.sweep.laws import Scaling
from tfkit.tools.sweep.statistics import Interval, Paired
from tfkit.tools.sweep.tuning import Tried, Tuned


@dataclass(frozen=True)
class Reached:
    """The tokens that an arm needs for its baseline's last value, as a share of those that the baseline needs.

    Attributes:
        ratio: the geometric mean over seeds; None if no seed gets there.
        interval: 95% of it; None for fewer than two seeds.
        seeds: those that get there.
    """

    ratio: float | None
    interval: Interval | None
    seeds: int


@dataclass(frozen=True)
class Result:
    """An arm: its size, its runs, and its difference from its baseline.

    Attributes:
        mean: the mean of the last values; None without runs, or if a run diverged.
        curves: the runs with a value to compare.
        diverged: the runs that diverged.
        difference: None for the baseline itself, and where a run of the arm or of its baseline diverged: the remaining
            seeds alone would favour the arm that diverges.
        verdict: `better`, `worse`, `same`, `open` or `diverged`; None without a comparison.
    """

    name: str
    variant: str
    base: str
    parameters: int
    flops: int
    tokens: int
    mean: float | None
    speed: float | None
    memory: int | None
    tuned: Tuned | None
    curves: tuple[Curve, ...]
    diverged: tuple[Curve, ...] = ()
    difference: Paired | None = None
    reached: Reached | None = None
    verdict: str | None = None

    @property
    def runs(self) -> int:
        """The number of runs, with those that diverged."""
        return len(self.curves) + len(self.diverged)


def pairs(one: Result, base: Result) -> list[tuple[Curve, Curve]]:
    """The curves of an arm and of its baseline on the seeds that both have."""
    others = {curve.seed: curve for curve in base.curves}
    return [(curve, others[curve.seed]) for curve in one.curves if curve.seed in others]


@dataclass(frozen=True)
class Results:
    """All arms of a sweep, the trials that tuned them, laws, remarks, and the errors of runs by folder.

    `margin` is the difference that begins to matter, if that was said.
    """

    name: str
    on: str
    lower: bool
    margin: float | None
    arms: tuple[Result, ...]
    trials: tuple[Tried, ...]
    laws: tuple[Scaling, ...]
    notes: tuple[str, ...]
    errors: dict[str, str]
