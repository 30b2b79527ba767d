"""The results of a sweep: what each arm reached, and how it differs from its baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tfkit.tools.sweep.arms import NOTHING, Arms, Cell, Choice
from tfkit.tools.sweep.curves import Curve, curve_of
from tfkit.tools.sweep.laws import Scaling, scalings
from tfkit.tools.sweep.statistics import ALPHA, Interval, Paired, holm, interval_of, least_p, paired
from tfkit.tools.sweep.tuning import Tuned
from tfkit.tools.sweep.work import is_complete
from tfkit.tools.train.plan import Plan


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
    """An arm: its size, its runs, and its difference from its baseline; None for the baseline itself."""

    name: str
    base: str
    parameters: int
    flops: int
    tokens: int
    mean: float | None
    speed: float | None
    memory: int | None
    tuned: Tuned | None
    curves: tuple[Curve, ...]
    difference: Paired | None = None
    reached: Reached | None = None
    verdict: str | None = None


@dataclass(frozen=True)
class Results:
    """All arms of a sweep, the laws of its variants, remarks, and the errors of runs by their folders."""

    name: str
    on: str
    lower: bool
    arms: tuple[Result, ...]
    laws: tuple[Scaling, ...]
    notes: tuple[str, ...]
    errors: dict[str, str]


def results(
    arms: Arms, chosen: dict[str, tuple[Choice, Tuned]], sizes: dict[str, Plan], errors: dict[str, str]
) -> Results:
    """Compare the complete runs of a sweep."""
    on, lower = arms.config.compare.on, arms.config.compare.lower
    found: dict[str, Result] = {}
    complete: dict[str, list[Cell]] = {}
    early: list[str] = []
    for arm in arms.arms:
        choice, tuned = chosen.get(arm.name, (NOTHING, None))
        known = tuned is not None or not arms.file.tuned
        cells = [cell for cell in arms.cells(arm, choice) if is_complete(cell)] if known else []
        complete[arm.name] = cells
        every = [curve_of(cell, on) for cell in cells]
        if not known:
            early.append(f"{arm.name} is not tuned yet: trials are missing, or none of them gave a number")
        size, curves = sizes[arm.name], tuple(curve for curve in every if math.isfinite(curve.values[-1]))
        early += _early(arm.name, size, every, on)
        speeds = [curve.speed for curve in curves if curve.speed is not None]
        found[arm.name] = Result(
            arm.name,
            arm.base,
            size.parameters,
            size.flops,
            size.tokens,
            _mean([curve.values[-1] for curve in curves]),
            _mean(speeds),
            max((curve.memory for curve in curves if curve.memory is not None), default=None),
            tuned,
            curves,
        )
    compared = _compared(found, lower)
    laws = tuple(scalings(arms, complete, sizes))
    return Results(arms.file.name, on, lower, compared, laws, (*_notes(compared), *early), errors)


def _early(name: str, size: Plan, curves: Sequence[Curve], on: str) -> Iterator[str]:
    """Remarks about runs that a callback ended, and about those without a number to compare."""
    for curve in curves:
        if curve.steps[-1] < size.steps:
            yield f"{name}, seed {curve.seed}, ended at step {curve.steps[-1]:,} of {size.steps:,}"
        if not math.isfinite(curve.values[-1]):
            yield f"{name}, seed {curve.seed}, is left out: its last {on} is {curve.values[-1]}"


def _compared(found: dict[str, Result], lower: bool) -> tuple[Result, ...]:
    """The results with their differences, whose probabilities are adjusted for their number."""
    made = dict(found)
    for name, one in found.items():
        pairs = _pairs(one, found[one.base])
        if name != one.base and pairs:
            difference = paired([own.values[-1] for own, _ in pairs], [base.values[-1] for _, base in pairs])
            made[name] = replace(one, difference=difference, reached=_reached(pairs, lower))
    names = [name for name, one in made.items() if one.difference is not None]
    for name, difference in zip(names, holm([d for n in names if (d := made[n].difference)]), strict=True):
        made[name] = replace(made[name], difference=difference, verdict=_verdict(difference, lower))
    return tuple(made.values())


def _pairs(one: Result, base: Result) -> list[tuple[Curve, Curve]]:
    others = {curve.seed: curve for curve in base.curves}
    return [(curve, others[curve.seed]) for curve in one.curves if curve.seed in others]


def _verdict(difference: Paired, lower: bool) -> str | None:
    """The answer; None for one seed."""
    if difference.adjusted is None:
        return None
    if not difference.sure():
        return "open"
    return "better" if (difference.mean < 0) == lower else "worse"


def _reached(pairs: Sequence[tuple[Curve, Curve]], lower: bool) -> Reached:
    """The share of tokens that runs need for the last value of their partners."""
    shares = []
    for own, base in pairs:
        need, partner = (_first(one, base.values[-1], lower) for one in (own, base))
        if need and partner:
            shares.append(math.log(need / partner))
    if not shares:
        return Reached(None, None, 0)
    low, high = interval_of(shares) if len(shares) > 1 else (0.0, 0.0)
    interval = (math.exp(low), math.exp(high)) if len(shares) > 1 else None
    return Reached(math.exp(sum(shares) / len(shares)), interval, len(shares))


def _first(curve: Curve, value: float, lower: bool) -> float | None:
    """The step at which a curve first gets as far as a value, on straight lines between evaluations."""
    sign = 1 if lower else -1
    ahead = [sign * (one - value) for one in curve.values]
    for index, rest in enumerate(ahead):
        if rest <= 0:
            if index == 0:
                return float(curve.steps[0])
            before, after = curve.steps[index - 1], curve.steps[index]
            return before + (after - before) * ahead[index - 1] / (ahead[index - 1] - rest)
    return None


def _notes(arms: Sequence[Result]) -> Iterator[str]:
    """Sentences that a reader of the table must know."""
    for one in arms:
        for path in one.tuned.edge if one.tuned else ():
            assert one.tuned is not None
            value = one.tuned.values[path]
            yield f"{one.name} is not tuned: its best {path}, {value}, is at the edge of the values that were tried"
    compared = [one for one in arms if one.difference]
    pairs = min((one.difference.pairs for one in compared if one.difference), default=0)
    if pairs == 1:
        yield "one seed: numbers without a verdict"
    elif compared and (least := least_p(pairs) * len(compared)) > ALPHA:
        enough = next(n for n in range(pairs, 60) if least_p(n) * len(compared) <= ALPHA)
        yield f"{pairs} seeds cannot give a verdict: p is at least {min(1.0, least):.3f}; {enough} seeds can"
    for one in compared:
        assert one.difference is not None
        correlation = one.difference.correlation
        if correlation is not None and abs(correlation) < 0.3:
            yield f"the pairs of {one.name} are hardly correlated ({correlation:.2f}): pairing bought nothing"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
