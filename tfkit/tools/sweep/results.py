"""Comparison of arms: the result of each arm, and its difference from its baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tfkit.errors import listing
from tfkit.run.sweep_spec import PREVIOUS, CompareConfig
from tfkit.run.training.loop import DIVERGED
from tfkit.tools.sweep.arms import NOTHING, Arm, Arms, Choice, SweepRun
from tfkit.tools.sweep.equal import unequal, unlike
from tfkit.tools.sweep.remarks import ended_early, left_out, mixed_code, remarks
from tfkit.tools.sweep.result import Curve, Reached, Result, Results, TrialResult, Tuned, curve_of, pairs
from tfkit.tools.sweep.scaling import scalings
from tfkit.tools.sweep.statistics import Paired, compare_pairs, interval_of
from tfkit.tools.sweep.work import is_complete
from tfkit.tools.train.plan import Plan


@dataclass(frozen=True)
class Side:
    """An arm to compare: its size, its tuned values, and the curves of its runs."""

    name: str
    variant: str
    base: str
    size: Plan
    curves: Sequence[Curve]
    tuned: Tuned | None = None


def results(
    arms: Arms,
    chosen: dict[str, tuple[Choice, Tuned]],
    trials: Sequence[TrialResult],
    sizes: dict[str, Plan],
    errors: dict[str, str],
    comparison: CompareConfig,
) -> Results:
    """Compare the complete runs of a sweep on the number that is to be shown."""
    on = comparison.on
    complete: dict[str, list[SweepRun]] = {}
    sides: list[Side] = []
    early: list[str] = []
    for arm in arms.arms:
        choice, tuned = chosen.get(arm.name, (NOTHING, None))
        is_tuned = tuned is not None or not arms.file.tuned
        runs = [sweep_run for sweep_run in arms.runs(arm, choice) if is_complete(sweep_run)] if is_tuned else []
        complete[arm.name] = runs
        if not is_tuned:
            early.append(_not_tuned(arm.name, trials))
        side = Side(
            arm.name, arm.variant, arm.base, sizes[arm.name], [curve_of(sweep_run, on) for sweep_run in runs], tuned
        )
        sides.append(side)
        early += _unlike(arms, arm, chosen, on)
        early += _unequal(arms, arm, sizes)
        early += ended_early(arm.name, side.curves, side.size.steps)
    order = ["each variant is compared to the one before it"] if arms.config.compare.to == PREVIOUS else []
    compared, notes = compare(sides, comparison)
    notes = [*order, *notes, *early]
    notes += mixed_code(sweep_run for runs in complete.values() for sweep_run in runs)
    laws = tuple(scalings(arms, complete, sizes))
    return Results(
        arms.file.name, on, comparison.lower, comparison.margin, compared, tuple(trials), laws, tuple(notes), errors
    )


def _not_tuned(name: str, trials: Sequence[TrialResult]) -> str:
    """Return the remark about an arm that has no best trial."""
    if all(trial.diverged for trial in trials if trial.arm == name):
        return f"{name} is not tuned: every trial diverged"
    return f"{name} is not tuned yet: trials are missing, or none of them gave a number"


def _unlike(arms: Arms, arm: Arm, chosen: dict[str, tuple[Choice, Tuned]], on: str) -> Iterator[str]:
    """Yield a remark if an arm is evaluated differently from its baseline."""
    base, run = (
        arms.runs(compared, chosen.get(compared.name, (NOTHING, None))[0])[0].run
        for compared in (arms.arm(arm.base), arm)
    )
    changes = unlike(base, run, on)
    if changes:
        yield f"{arm.name} is evaluated differently from {arm.base}: {listing(changes, 4)}"


def _unequal(arms: Arms, arm: Arm, sizes: dict[str, Plan]) -> Iterator[str]:
    """Yield a remark if an arm has a different number of tokens than its baseline, unless the sweep decides lengths."""
    equal = arms.config.equal
    decided = arms.config.tokens is not None or (
        equal is not None and {"tokens", "flops", "time"} & equal.shares().keys()
    )
    tokens, base = sizes[arm.name].tokens, sizes[arm.base].tokens
    if tokens != base and not decided:
        yield f"{unequal(arm.name, tokens, 'tokens', arm.base, base)}; `equal: {{tokens: 0%}}` would reject it"


def compare(sides: Sequence[Side], comparison: CompareConfig) -> tuple[tuple[Result, ...], list[str]]:
    """Return the results of arms with their differences, and remarks."""
    compared = _compared({side.name: _result(side) for side in sides}, comparison)
    notes = [note for side in sides for note in left_out(side.name, side.curves, comparison.on)]
    return compared, [*remarks(compared, comparison.margin), *notes]


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


def _reached(curve_pairs: Sequence[tuple[Curve, Curve]], lower: bool) -> Reached:
    """Compare the tokens that runs need for the last value of their baselines."""
    shares = []
    for curve, base in curve_pairs:
        need, partner = (_first(run_curve, base.last, lower) for run_curve in (curve, base))
        if need and partner:
            shares.append(math.log(need / partner))
    if not shares:
        return Reached(None, None, 0)
    low, high = interval_of(shares) if len(shares) > 1 else (0.0, 0.0)
    interval = (math.exp(low), math.exp(high)) if len(shares) > 1 else None
    return Reached(math.exp(sum(shares) / len(shares)), interval, len(shares))


def _first(curve: Curve, value: float, lower: bool) -> float | None:
    """Return the step, linearly interpolated, at which a curve first reaches a value; None if it never does."""
    sign = 1 if lower else -1
    ahead = [sign * (current - value) for current in curve.values]
    for index, rest in enumerate(ahead):
        if rest <= 0:
            if index == 0:
                return float(curve.steps[0])
            before, after = curve.steps[index - 1], curve.steps[index]
            return before + (after - before) * ahead[index - 1] / (ahead[index - 1] - rest)
    return None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
