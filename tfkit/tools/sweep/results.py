"""Arms compared: what each reached, and how it differs from its baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tfkit.errors import listing
from tfkit.spec.sweep import PREVIOUS, CompareConfig
from tfkit.tools.sweep.alike import unlike
from tfkit.tools.sweep.arms import NOTHING, Arm, Arms, Cell, Choice
from tfkit.tools.sweep.curves import Curve, curve_of
from tfkit.tools.sweep.equal import unequal
from tfkit.tools.sweep.laws import scalings
from tfkit.tools.sweep.remarks import ended_early, left_out, mixed_code, remarks
from tfkit.tools.sweep.result import Reached, Result, Results, pairs
from tfkit.tools.sweep.statistics import Paired, compare_pairs, interval_of
from tfkit.tools.sweep.tuning import Tried, Tuned
from tfkit.tools.sweep.work import is_complete
from tfkit.tools.train.plan import Plan
from tfkit.training.loop import DIVERGED


@dataclass(frozen=True)
class Side:
    """An arm to compare: the curves of its runs, and what was known of it before them."""

    name: str
    variant: str
    base: str
    size: Plan
    curves: Sequence[Curve]
    tuned: Tuned | None = None


def results(
    arms: Arms,
    chosen: dict[str, tuple[Choice, Tuned]],
    trials: Sequence[Tried],
    sizes: dict[str, Plan],
    errors: dict[str, str],
    shown: CompareConfig,
) -> Results:
    """Compare the complete runs of a sweep on the number that is to be shown."""
    on = shown.on
    complete: dict[str, list[Cell]] = {}
    sides: list[Side] = []
    early: list[str] = []
    for arm in arms.arms:
        choice, tuned = chosen.get(arm.name, (NOTHING, None))
        known = tuned is not None or not arms.file.tuned
        cells = [cell for cell in arms.cells(arm, choice) if is_complete(cell)] if known else []
        complete[arm.name] = cells
        if not known:
            early.append(_not_tuned(arm.name, trials))
        side = Side(arm.name, arm.variant, arm.base, sizes[arm.name], [curve_of(cell, on) for cell in cells], tuned)
        sides.append(side)
        early += _unlike(arms, arm, chosen, on)
        early += _unequal(arms, arm, sizes)
        early += ended_early(arm.name, side.curves, side.size.steps)
    order = ["each variant is compared to the one before it"] if arms.config.compare.to == PREVIOUS else []
    compared, notes = compare(sides, shown)
    notes = [*order, *notes, *early]
    notes += mixed_code(cell for cells in complete.values() for cell in cells)
    laws = tuple(scalings(arms, complete, sizes))
    return Results(arms.file.name, on, shown.lower, shown.margin, compared, tuple(trials), laws, tuple(notes), errors)


def _not_tuned(name: str, trials: Sequence[Tried]) -> str:
    """Return the remark about an arm that has no best trial."""
    if all(trial.diverged for trial in trials if trial.arm == name):
        return f"{name} is not tuned: every trial diverged"
    return f"{name} is not tuned yet: trials are missing, or none of them gave a number"


def _unlike(arms: Arms, arm: Arm, chosen: dict[str, tuple[Choice, Tuned]], on: str) -> Iterator[str]:
    """A remark about an arm that is not evaluated as its baseline is."""
    base, own = (arms.cells(one, chosen.get(one.name, (NOTHING, None))[0])[0].run for one in (arms.arm(arm.base), arm))
    found = unlike(base, own, on)
    if found:
        yield f"{arm.name} is evaluated differently from {arm.base}: {listing(found, 4)}"


def _unequal(arms: Arms, arm: Arm, sizes: dict[str, Plan]) -> Iterator[str]:
    """Yield a remark about an arm with another number of tokens than its baseline, unless the sweep decides lengths."""
    equal = arms.config.equal
    decided = arms.config.tokens is not None or (
        equal is not None and {"tokens", "flops", "time"} & equal.shares().keys()
    )
    tokens, base = sizes[arm.name].tokens, sizes[arm.base].tokens
    if tokens != base and not decided:
        yield f"{unequal(arm.name, tokens, 'tokens', arm.base, base)}; `equal: {{tokens: 0%}}` would reject it"


def compare(sides: Sequence[Side], shown: CompareConfig) -> tuple[tuple[Result, ...], list[str]]:
    """The results of arms with their differences, and remarks."""
    compared = _compared({side.name: _result(side) for side in sides}, shown)
    notes = [note for side in sides for note in left_out(side.name, side.curves, shown.on)]
    return compared, [*remarks(compared, shown.margin), *notes]


def _result(side: Side) -> Result:
    """Return the result of an arm without a comparison."""
    curves = tuple(curve for curve in side.curves if math.isfinite(curve.last))
    diverged = tuple(curve for curve in side.curves if curve.diverged)
    return Result(
        side.name,
        side.variant,
        side.base,
        side.size.parameters,
        side.size.flops,
        side.size.tokens,
        None if diverged else _mean([curve.last for curve in curves]),
        _mean([curve.speed for curve in curves if curve.speed is not None]),
        max((curve.memory for curve in curves if curve.memory is not None), default=None),
        side.tuned,
        curves,
        diverged,
        verdict=DIVERGED if diverged else None,
    )


def _compared(arms: dict[str, Result], comparison: CompareConfig) -> tuple[Result, ...]:
    """Add to each arm its difference from its baseline, with p-values among all comparisons."""
    seed_pairs = {
        name: seed_pairs
        for name, arm in arms.items()
        if name != arm.base and not arm.diverged and not arms[arm.base].diverged
        if (seed_pairs := pairs(arm, arms[arm.base]))
    }
    values = {
        name: {curve.seed: (curve.last, base.last) for curve, base in curves} for name, curves in seed_pairs.items()
    }
    compared = dict(arms)
    for name, difference in compare_pairs(values, comparison.margin).items():
        reached = _reached(seed_pairs[name], comparison.lower)
        verdict = _verdict(difference, comparison.lower)
        compared[name] = replace(arms[name], difference=difference, reached=reached, verdict=verdict)
    return tuple(compared.values())


def _verdict(difference: Paired, lower: bool) -> str | None:
    """Return the verdict; None for one seed."""
    if difference.adjusted is None:
        return None
    if difference.same:
        return "same"
    if not difference.significant():
        return "open"
    return "better" if (difference.mean < 0) == lower else "worse"


def _reached(both: Sequence[tuple[Curve, Curve]], lower: bool) -> Reached:
    """The share of tokens that runs need for the last value of their partners."""
    shares = []
    for own, base in both:
        need, partner = (_first(one, base.last, lower) for one in (own, base))
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


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
