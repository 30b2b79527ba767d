"""Comparison of arms: the result of each arm, its difference from its baseline, and remarks.

A p-value is valid for a plan that fixes the seeds and the metric. Adding seeds until a verdict appears, or searching
for a metric with a verdict, gives more false alarms than 5%. `shown.json` in the folder of a sweep therefore lists the
results that have been shown.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import ConfigDict, StrictInt, StrictStr, TypeAdapter, ValidationError

from tfkit.commands import write_file, writing
from tfkit.errors import Diagnostic, SpecError, listing, number_ranges, quoted
from tfkit.run.run_code import EXAMPLES, kind_text, recorded_codes
from tfkit.run.run_facts import cause_of, read_facts
from tfkit.run.sweep_spec import PREVIOUS, CompareConfig
from tfkit.run.training.loop import DIVERGED
from tfkit.spec.header import open_regular
from tfkit.tools.sweep.arms import EMPTY_CHOICE, Arm, Arms, Choice, SweepRun
from tfkit.tools.sweep.equal import evaluation_differences, size_difference
from tfkit.tools.sweep.result import ArmResult, Curve, Reached, Results, TrialResult, Tuned, curve_of, paired_curves
from tfkit.tools.sweep.scaling import law_gains, scaling_laws
from tfkit.tools.sweep.statistics import MAX_PAIRS, NEEDED_PAIRS, Paired, compare_pairs, interval_of, sufficient_pairs
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


def sweep_results(
    arms: Arms,
    chosen: dict[str, tuple[Choice, Tuned]],
    trials: Sequence[TrialResult],
    sizes: dict[str, Plan],
    errors: dict[str, str],
    comparison: CompareConfig,
) -> Results:
    """Compare the complete runs of a sweep on the metric of `comparison`."""
    on = comparison.on
    complete: dict[str, list[SweepRun]] = {}
    sides: list[Side] = []
    early: list[str] = []
    for arm in arms.arms:
        choice, tuned = chosen.get(arm.name, (EMPTY_CHOICE, None))
        is_tuned = tuned is not None or not arms.file.tuned
        runs = [sweep_run for sweep_run in arms.runs(arm, choice) if is_complete(sweep_run)] if is_tuned else []
        complete[arm.name] = runs
        if not is_tuned:
            early.append(_not_tuned(arm, trials))
        side = Side(
            arm.name, arm.variant, arm.base, sizes[arm.name], [curve_of(sweep_run, on) for sweep_run in runs], tuned
        )
        sides.append(side)
        early += _evaluation_remarks(arms, arm, chosen, on)
        early += _token_remarks(arms, arm, sizes)
        early += ended_early(arm.name, side.curves, side.size.steps)
    early += _transfer_remarks(arms, chosen)
    order = ["each variant is compared to the one before it"] if arms.config.compare.to == PREVIOUS else []
    compared, notes = compare_sides(sides, comparison)
    notes = [*order, *notes, *early]
    notes += mixed_code(sweep_run for runs in complete.values() for sweep_run in runs)
    laws, law_notes = scaling_laws(arms, complete, sizes)
    return Results(
        arms.file.name,
        on,
        comparison.lower,
        comparison.margin,
        compared,
        tuple(trials),
        tuple(laws),
        tuple(law_gains(laws, {variant: arms.config.base_of(variant) for variant in arms.file.variants})),
        (*notes, *law_notes),
        errors,
    )


def _not_tuned(arm: Arm, trials: Sequence[TrialResult]) -> str:
    """Return the remark about an arm without a best trial."""
    if all(trial.diverged for trial in trials if trial.arm == arm.tuned_as):
        return f"{arm.name} is not tuned: every trial diverged"
    return f"{arm.name} is not tuned yet: trials are missing, or none of them reports the metric"


def _transfer_remarks(arms: Arms, chosen: dict[str, tuple[Choice, Tuned]]) -> Iterator[str]:
    """Yield a remark for each variant whose tuned values are used unchanged at larger sizes."""
    variants = dict.fromkeys(arm.variant for arm in arms.arms if arm.name != arm.tuned_as and arm.name in chosen)
    for variant in variants:
        arm = next(arm for arm in arms.arms if arm.variant == variant)
        if not arms.runs(arm, chosen[arm.name][0])[0].run.config.parametrization.rescales:
            yield f"{variant} has no `parametrization`: the values tuned at its smallest size may not fit larger sizes"


def _evaluation_remarks(arms: Arms, arm: Arm, chosen: dict[str, tuple[Choice, Tuned]], on: str) -> Iterator[str]:
    """Yield a remark if an arm is evaluated differently from its baseline."""
    base, run = (
        arms.runs(compared, chosen.get(compared.name, (EMPTY_CHOICE, None))[0])[0].run
        for compared in (arms.arm(arm.base), arm)
    )
    changes = evaluation_differences(base, run, on)
    if changes:
        yield f"{arm.name} is evaluated differently from {arm.base}: {listing(changes, 4)}"


def _token_remarks(arms: Arms, arm: Arm, sizes: dict[str, Plan]) -> Iterator[str]:
    """Yield a remark if the tokens of an arm and its baseline differ in number and the sweep does not set lengths."""
    equal = arms.config.equal
    decided = arms.config.tokens is not None or (
        equal is not None and {"tokens", "flops", "time"} & equal.shares().keys()
    )
    tokens, base = sizes[arm.name].tokens, sizes[arm.base].tokens
    if tokens != base and not decided:
        yield f"{size_difference(arm.name, tokens, 'tokens', arm.base, base)}; `equal: {{tokens: 0%}}` would reject it"


def compare_sides(sides: Sequence[Side], comparison: CompareConfig) -> tuple[tuple[ArmResult, ...], list[str]]:
    """Return the results of arms with their differences, and remarks."""
    compared = _add_differences({side.name: _arm_result(side) for side in sides}, comparison)
    notes = [note for side in sides for note in left_out(side.name, side.curves, comparison.on)]
    return compared, [*result_remarks(compared, comparison.margin), *notes]


def _arm_result(side: Side) -> ArmResult:
    """Return the result of an arm without a comparison."""
    curves = tuple(curve for curve in side.curves if math.isfinite(curve.last))
    diverged = tuple(curve for curve in side.curves if curve.diverged)
    return ArmResult(
        side.name,
        side.variant,
        side.base,
        side.size.parameters,
        side.size.flops,
        side.size.tokens,
        None if diverged else _mean_or_none([curve.last for curve in curves]),
        _mean_or_none([curve.speed for curve in curves if curve.speed is not None]),
        max((curve.memory for curve in curves if curve.memory is not None), default=None),
        side.tuned,
        curves,
        diverged,
        verdict=DIVERGED if diverged else None,
    )


def _add_differences(arms: dict[str, ArmResult], comparison: CompareConfig) -> tuple[ArmResult, ...]:
    """Add to each arm its difference from its baseline, with p-values among all comparisons."""
    seed_pairs = {
        name: seed_pairs
        for name, arm in arms.items()
        if name != arm.base and not arm.diverged and not arms[arm.base].diverged
        if (seed_pairs := paired_curves(arm, arms[arm.base]))
    }
    values = {
        name: {curve.seed: (curve.last, base.last) for curve, base in curves} for name, curves in seed_pairs.items()
    }
    compared = dict(arms)
    for name, difference in compare_pairs(values, comparison.margin).items():
        reached = _steps_to_baseline(seed_pairs[name], comparison.lower)
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


def _steps_to_baseline(curve_pairs: Sequence[tuple[Curve, Curve]], lower: bool) -> Reached:
    """Compare the number of steps that runs need to reach the last value of their baselines."""
    log_ratios = []
    for curve, base in curve_pairs:
        need, partner = (_first_step(run_curve, base.last, lower) for run_curve in (curve, base))
        if need and partner:
            log_ratios.append(math.log(need / partner))
    if not log_ratios:
        return Reached(None, None, 0)
    low, high = interval_of(log_ratios) if len(log_ratios) > 1 else (0.0, 0.0)
    interval = (math.exp(low), math.exp(high)) if len(log_ratios) > 1 else None
    return Reached(math.exp(sum(log_ratios) / len(log_ratios)), interval, len(log_ratios))


def _first_step(curve: Curve, value: float, lower: bool) -> float | None:
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


def _mean_or_none(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def result_remarks(arms: Sequence[ArmResult], margin: float | None) -> Iterator[str]:
    """Yield the remarks that readers need to interpret the results."""
    for arm in arms:
        for path in arm.tuned.edge if arm.tuned else ():
            assert arm.tuned is not None
            value = arm.tuned.values[path]
            yield f"{arm.name} is not tuned: its best {path}, {value}, is at the edge of the tried values"
    yield from _divergence_remarks(arms)
    yield from _without_pair(arms)
    differences = {arm.name: arm.difference for arm in arms if arm.difference}
    pairs = min((difference.pairs for difference in differences.values()), default=NEEDED_PAIRS)
    if pairs < NEEDED_PAIRS:
        yield seeds_text(pairs) + (f": p is at least {2.0 ** (1 - pairs):.3f}" if pairs > 1 else "")
    for arm in arms:
        if arm.difference is not None:
            yield from _pairing_remarks(arm.name, arm.difference)
            if margin is not None and arm.verdict == "open":
                yield from _open_remarks(arm.name, arm.difference, margin, len(differences))
    yield from _machine_remarks([curve for arm in arms for curve in arm.curves])


def seeds_text(seeds: int) -> str:
    """Return the remark about the seeds that a verdict needs."""
    return f"{seeds} seed{'s' if seeds > 1 else ''}, but a verdict needs at least {NEEDED_PAIRS}"


def _divergence_remarks(arms: Sequence[ArmResult]) -> Iterator[str]:
    """Yield remarks about arms with diverged runs, and about the arms that are compared to them."""
    for arm in arms:
        if arm.diverged:
            seeds = _seed_list([curve.seed for curve in arm.diverged])
            rest = "; the remaining seeds alone give no verdict" if arm.curves else ""
            yield f"{arm.name} diverged on {seeds}{rest}"
            compared = [other.name for other in arms if other.base == arm.name and other is not arm]
            if compared:
                yield f"{listing(compared)}: no difference, because {arm.name} diverged"


def _machine_remarks(curves: Sequence[Curve]) -> Iterator[str]:
    """Yield a remark if runs differ in the values that determine their speeds and last digits."""
    names = dict.fromkeys(name for curve in curves for name in curve.bits)
    bits = {name: list(dict.fromkeys(str(curve.bits.get(name)) for curve in curves)) for name in names}
    texts = [f"{name} is {' or '.join(map(quoted, values))}" for name, values in bits.items() if len(values) > 1]
    if texts:
        yield f"the runs are from different machines, so their speeds are not comparable: {', '.join(texts)}"


def _pairing_remarks(name: str, difference: Paired) -> Iterator[str]:
    """Yield a remark if pairing by seed did not reduce the variance of the differences."""
    if difference.correlation is not None and difference.correlation <= 0:
        yield f"pairing did not help {name}: the correlation of its pairs is {difference.correlation:.2f}"


def _open_remarks(name: str, difference: Paired, margin: float, comparisons: int) -> Iterator[str]:
    """Yield a remark about the number of seeds that an open variant needs to count as the same, if it is the same."""
    assert difference.deviation is not None
    seeds = sufficient_pairs(difference.deviation, margin, comparisons)
    if seeds is None or seeds > difference.pairs:
        count = f"more than {MAX_PAIRS:,}" if seeds is None else f"about {seeds:,}"
        yield f"{name} is open: {count} seeds would show it to be the same within {margin:g}, in 4 of 5 cases, if it is"


def ended_early(name: str, curves: Sequence[Curve], steps: int) -> Iterator[str]:
    """Yield remarks about runs of an arm that a callback ended."""
    for curve in curves:
        if curve.steps and curve.steps[-1] < steps and not curve.diverged:
            yield f"{name}, seed {curve.seed}, ended at step {curve.steps[-1]:,} of {steps:,}"


def mixed_code(runs: Iterable[SweepRun]) -> Iterator[str]:
    """Yield a remark if the same kind had different code in different runs, or in the processes of one run."""
    versions: dict[str, set[str]] = {}
    for sweep_run in runs:
        facts = read_facts(sweep_run.folder)
        for code in recorded_codes(facts) if facts else ():
            for kind, modules in code.items():
                versions.setdefault(kind, set()).add(json.dumps(modules, sort_keys=True))
    changed = [kind for kind, digests in versions.items() if len(digests) > 1 and kind != EXAMPLES]
    if changed:
        yield f"the runs were trained by different code: {listing(map(kind_text, changed), 4)}"


def left_out(name: str, curves: Sequence[Curve], on: str) -> Iterator[str]:
    """Yield remarks about runs of an arm that have no value to compare."""
    for curve in curves:
        if not curve.values and not curve.diverged:
            yield f"{name}, seed {curve.seed}, is omitted: it has no {on}"


def _without_pair(arms: Sequence[ArmResult]) -> Iterator[str]:
    """Yield remarks about seeds for which only one of the two compared arms has a run."""
    seeds = {arm.name: [curve.seed for curve in (*arm.curves, *arm.diverged)] for arm in arms}
    for arm in arms:
        for name, other in ((arm.name, arm.base), (arm.base, arm.name)) if arm.name != arm.base else ():
            alone = [seed for seed in seeds[name] if seed not in seeds[other]]
            if alone and seeds[other]:
                verb = "have" if len(alone) > 1 else "has"
                yield f"{_seed_list(alone)} of {name} {verb} no pair in {other}: for the mean alone"


def _seed_list(seeds: Sequence[int]) -> str:
    """Return `seed 3`, or `seeds 3, 4`."""
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


LOOKS = "shown.json"


@dataclass(frozen=True)
class Look:
    """Results that have been shown.

    Attributes:
        on: the metric.
        seeds: the seeds of the sweep, with or without complete runs.
        runs: the folder names of the runs of compared arms, without baselines, which several sweeps may share.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    on: StrictStr
    seeds: list[StrictInt]
    runs: list[StrictStr]


_LOOKS = TypeAdapter(list[Look])


def plan_remarks(folder: Path, arms: Sequence[ArmResult], on: str, seeds: Sequence[int]) -> Iterator[str]:
    """Yield remarks if the plan of these results differs from the first plan shown; add these results to the list."""
    compared = [arm for arm in arms if arm.difference is not None]
    runs = {Path(curve.folder).name for arm in compared for curve in arm.curves}
    if not runs:
        return
    looks = _read_looks(folder / LOOKS)
    look = Look(on, sorted(seeds), sorted(runs))
    if look not in looks:
        looks.append(look)
        with writing(folder / LOOKS):
            folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps([asdict(entry) for entry in looks], indent=1)
        write_file(folder / LOOKS, f"{text}\n", inside=folder)
    related = [earlier for earlier in looks if not runs.isdisjoint(earlier.runs)]
    first, metrics = related[0], {earlier.on for earlier in related}
    if first.seeds != look.seeds:
        yield (
            f"the seeds were {number_ranges(first.seeds)} when results were first shown, "
            f"and are {number_ranges(look.seeds)} now: "
            "changing the seeds until a verdict appears gives more false alarms than 5%"
        )
    if first.on != on:
        yield f"{first.on} was shown first: the best of {len(metrics)} metrics gives more false alarms than 5%"
    pairs = min(arm.difference.pairs for arm in compared if arm.difference)
    if pairs < len(seeds):
        yield f"{pairs} of {len(seeds)} seeds are complete: a verdict counts only with all seeds"


def _read_looks(path: Path) -> list[Look]:
    """Return the results that have been shown; raise SpecError if the file cannot be read."""
    if not os.path.lexists(path):
        return []
    try:
        with open_regular(path) as file:
            return _LOOKS.validate_python(json.loads(file.read()))
    except (OSError, ValueError, RecursionError) as error:
        cause = cause_of(error) if isinstance(error, ValidationError) else error
        message = f"cannot read {quoted(str(path))}: {cause}"
        help = "remove the file; the sweep then has no record of the results that were shown"
        raise SpecError(Diagnostic(message, help=help)) from error
