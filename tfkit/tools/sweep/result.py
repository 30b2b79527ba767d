"""Results of a comparison as data, and the curves of the runs that they summarize."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfkit.run.run_facts import Facts, read_facts
from tfkit.run.training.loop import DIVERGED
from tfkit.tools.common.history import read_metric_lines
from tfkit.tools.sweep.arms import SweepRun
from tfkit.tools.sweep.statistics import Interval, Paired


@dataclass(frozen=True)
class Forecast:
    """The loss that a law predicts at a size that it is not fitted to.

    Attributes:
        size: the size.
        loss: the predicted mean loss over the seeds of the law.
        interval: the 95% interval of that mean; None if no error can be estimated.
    """

    size: float
    loss: float
    interval: Interval | None


@dataclass(frozen=True)
class Law:
    """A law, its forecasts, and its error at the largest size.

    Attributes:
        floor: E, the limit of the loss for large sizes.
        scale: A.
        exponent: a.
        intervals: 95% of E, A and a; None if no error can be estimated.
        missed: the mean loss at the largest size, minus `held_out`; None for three sizes.
        held_out: the prediction of the largest size by the law of the smaller sizes; None for three sizes.
        at_target: the prediction of a larger size; None without a target.
    """

    floor: float
    scale: float
    exponent: float
    intervals: tuple[Interval, Interval, Interval] | None
    missed: float | None = None
    held_out: Forecast | None = None
    at_target: Forecast | None = None

    def at(self, size: float) -> float:
        """Return the loss at a size."""
        return self.floor + self.scale * size**-self.exponent


@dataclass(frozen=True)
class Scaling:
    """The law of a variant, and the losses that it is fitted to.

    Attributes:
        name: the variant.
        words: the unit of its sizes: parameters, FLOPs, tokens.
        sizes: from the smallest to the largest.
        losses: for each size, the losses of all seeds.
        law: the law.
        seeds: the seeds, which have runs at all sizes.
    """

    name: str
    words: str
    sizes: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    law: Law
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Gain:
    """A variant compared to its baseline by their laws, at one size.

    Attributes:
        name: the variant.
        base: its baseline.
        size: the size of both.
        difference: the loss of the variant, minus the loss of the baseline.
        factor: the factor of the size at which the baseline has the loss of the variant; None if it has it at no size.
        interval: the 95% interval of the factor; an end is None if the factor is. None if no error can be estimated.
    """

    name: str
    base: str
    size: float
    difference: float
    factor: float | None
    interval: tuple[float, float | None] | None


@dataclass(frozen=True)
class Tuned:
    """The tuned values of an arm, and the paths whose best value is at the edge of the values tried."""

    values: dict[str, Any]
    edge: tuple[str, ...]


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial, the mean over seeds of the metric `on`.

    Attributes:
        mean: the mean; None until all runs of the trial are complete, or if a run has no finite value.
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


@dataclass(frozen=True)
class Reached:
    """The steps that an arm needs for its baseline's last value, as a fraction of the steps of the baseline.

    Attributes:
        ratio: the geometric mean over seeds; None if no seed reaches the value.
        interval: the 95% interval of the ratio; None for fewer than two seeds.
        seeds: the number of seeds that reach the value.
    """

    ratio: float | None
    interval: Interval | None
    seeds: int


@dataclass(frozen=True)
class ArmResult:
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
        """The number of runs, including diverged runs."""
        return len(self.curves) + len(self.diverged)


def paired_curves(arm: ArmResult, base: ArmResult) -> list[tuple[Curve, Curve]]:
    """Return the curves of an arm and of its baseline, for each seed that both have."""
    base_curves = {curve.seed: curve for curve in base.curves}
    return [(curve, base_curves[curve.seed]) for curve in arm.curves if curve.seed in base_curves]


@dataclass(frozen=True)
class Results:
    """All arms of a sweep, the trials that tuned them, laws, remarks, and the errors of runs by folder.

    `gains` compare variants by their laws. `margin` is the smallest difference that matters; None if it is not set.
    """

    name: str
    on: str
    lower: bool
    margin: float | None
    arms: tuple[ArmResult, ...]
    trials: tuple[TrialResult, ...]
    laws: tuple[Scaling, ...]
    gains: tuple[Gain, ...]
    notes: tuple[str, ...]
    errors: dict[str, str]


@dataclass(frozen=True)
class Curve:
    """The compared metric of one run, at every step where the run was evaluated.

    Attributes:
        seed: the seed of the run.
        folder: its folder.
        steps: the steps with a finite value.
        values: the value at each step.
        speed: positions per second, including evaluations; None if a process recorded no time.
        memory: peak memory in bytes; None if no process recorded it.
        bits: the values that determine its last digits and its speed: torch, device, threads.
        diverged: True if the run diverged, or if its last value is not finite.
    """

    seed: int
    folder: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    speed: float | None
    memory: int | None = None
    bits: Mapping[str, Any] = field(default_factory=dict)
    diverged: bool = False

    @property
    def last(self) -> float:
        """The last value; NaN without a value, or if the run diverged, because values before that are not results."""
        return self.values[-1] if self.values and not self.diverged else math.nan


def curve_of(sweep_run: SweepRun, on: str) -> Curve:
    """Return the curve of a run up to its last evaluation."""
    points = {line["step"]: line[on] for line in read_metric_lines(sweep_run.folder) if isinstance(line.get(on), float)}
    finite = {step: value for step, value in points.items() if math.isfinite(value)}
    facts = _facts_of_run(sweep_run)
    diverged = facts.ended == DIVERGED or not all(map(math.isfinite, list(points.values())[-1:]))
    memory = max((session["memory"] for session in facts.sessions if "memory" in session), default=None)
    steps, values = tuple(finite), tuple(finite.values())
    return Curve(
        sweep_run.seed,
        str(sweep_run.folder),
        steps,
        values,
        _tokens_per_second(sweep_run, facts),
        memory,
        facts.bits,
        diverged,
    )


def speed_of(sweep_run: SweepRun) -> float | None:
    """Return the speed of a run in positions per second, including evaluations; None if it is not known."""
    return _tokens_per_second(sweep_run, _facts_of_run(sweep_run))


def _tokens_per_second(sweep_run: SweepRun, facts: Facts) -> float | None:
    seconds = facts.seconds_of_step
    return sweep_run.run.tokens_of_step / seconds if seconds else None


def _facts_of_run(sweep_run: SweepRun) -> Facts:
    facts = read_facts(sweep_run.folder)
    assert facts is not None
    return facts
