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
from tfkit.tools.sweep.remarks import ended_early, left_out, remarks
from tfkit.tools.sweep.result import Reached, Result, Results, pairs
from tfkit.tools.sweep.statistics import Paired, holm, interval_of, paired
from tfkit.tools.sweep.tuning import Tried, Tuned
from tfkit.tools.sweep.work import is_complete
from tfkit.tools.train.plan import Plan


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
            early.append(f"{arm.name} is not tuned yet: trials are missing, or none of them gave a number")
        side = Side(arm.name, arm.variant, arm.base, sizes[arm.name], [curve_of(cell, on) for cell in cells], tuned)
        sides.append(side)
        early += _unlike(arms, arm, chosen, on)
        early += _unequal(arms, arm, sizes)
        early += ended_early(arm.name, side.curves, side.size.steps)
    order = ["each variant is compared to the one before it"] if arms.config.compare.to == PREVIOUS else []
    compared, notes = compare(sides, shown)
    notes = [*order, *notes, *early]
    laws = tuple(scalings(arms, complete, sizes))
    return Results(arms.file.name, on, shown.lower, shown.margin, compared, tuple(trials), laws, tuple(notes), errors)


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
    """The result of an arm by itself, of its runs with a number to compare."""
    curves = tuple(curve for curve in side.curves if math.isfinite(curve.last))
    return Result(
        side.name,
        side.variant,
        side.base,
        side.size.parameters,
        side.size.flops,
        side.size.tokens,
        _mean([curve.last for curve in curves]),
        _mean([curve.speed for curve in curves if curve.speed is not None]),
        max((curve.memory for curve in curves if curve.memory is not None), default=None),
        side.tuned,
        curves,
    )


def _compared(found: dict[str, Result], shown: CompareConfig) -> tuple[Result, ...]:
    """The results with their differences, whose probabilities are adjusted for their number."""
    made = dict(found)
    for name, one in found.items():
        both = pairs(one, found[one.base])
        if name != one.base and both:
            difference = paired([own.last for own, _ in both], [base.last for _, base in both], shown.margin)
            made[name] = replace(one, difference=difference, reached=_reached(both, shown.lower))
    names = [name for name, one in made.items() if one.difference is not None]
    for name, difference in zip(names, holm([d for n in names if (d := made[n].difference)]), strict=True):
        made[name] = replace(made[name], difference=difference, verdict=_verdict(difference, shown.lower))
    return tuple(made.values())


def _verdict(difference: Paired, lower: bool) -> str | None:
    """The answer; None for one seed."""
    if difference.adjusted is None:
        return None
    if difference.same():
        return "same"
    if not difference.sure():
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
