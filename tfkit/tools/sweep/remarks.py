"""Remarks on a comparison: missing pairs, too few seeds, runs without a value, and results of another plan.

A p-value belongs to a plan: these seeds, and this metric. Adding seeds until a verdict appears, or searching for a
metric with a verdict, gives more false alarms than 5%. `shown.json` in the folder of a sweep lists what was shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ConfigDict, StrictInt, StrictStr, TypeAdapter, ValidationError

from tfkit.errors import Diagnostic, SpecError, listing, quoted, ranges
from tfkit.tools.common.atomic_files import write_file, writing
from tfkit.tools.common.run_code import EXAMPLES, codes, shown_kind
from tfkit.tools.common.run_facts import cause_of, read_facts
from tfkit.tools.sweep.arms import SweepRun
from tfkit.tools.sweep.result import Curve, Result
from tfkit.tools.sweep.statistics import MOST_PAIRS, NEEDED_PAIRS, Paired, enough


def remarks(arms: Sequence[Result], margin: float | None) -> Iterator[str]:
    """Yield the remarks that a reader of the results must know."""
    for arm in arms:
        for path in arm.tuned.edge if arm.tuned else ():
            assert arm.tuned is not None
            value = arm.tuned.values[path]
            yield f"{arm.name} is not tuned: its best {path}, {value}, is at the edge of the values that were tried"
    yield from _diverged(arms)
    yield from _without_pair(arms)
    differences = {arm.name: arm.difference for arm in arms if arm.difference}
    pairs = min((difference.pairs for difference in differences.values()), default=NEEDED_PAIRS)
    if pairs < NEEDED_PAIRS:
        yield seeds_text(pairs) + (f": p is at least {2.0 ** (1 - pairs):.3f}" if pairs > 1 else "")
    for arm in arms:
        if arm.difference is not None:
            yield from _pairing(arm.name, arm.difference)
            if margin is not None and arm.verdict == "open":
                yield from _open(arm.name, arm.difference, margin, len(differences))
    yield from _machines([curve for arm in arms for curve in arm.curves])


def seeds_text(seeds: int) -> str:
    """Return the remark about the seeds that a verdict needs."""
    return f"{seeds} seed{'s' if seeds > 1 else ''}, and a verdict needs {NEEDED_PAIRS} or more"


def _diverged(arms: Sequence[Result]) -> Iterator[str]:
    """Yield remarks about arms with diverged runs, and about the arms that are compared to them."""
    for arm in arms:
        if arm.diverged:
            seeds = _seeds([curve.seed for curve in arm.diverged])
            rest = "; the remaining seeds alone give no verdict" if arm.curves else ""
            yield f"{arm.name} diverged on {seeds}{rest}"
            compared = [other.name for other in arms if other.base == arm.name and other is not arm]
            if compared:
                yield f"{listing(compared)}: no difference, because {arm.name} diverged"


def _machines(curves: Sequence[Curve]) -> Iterator[str]:
    """Yield a remark if runs differ in the values that determine their speeds and last digits."""
    names = dict.fromkeys(name for curve in curves for name in curve.bits)
    bits = {name: list(dict.fromkeys(str(curve.bits.get(name)) for curve in curves)) for name in names}
    texts = [f"{name} is {' or '.join(map(quoted, values))}" for name, values in bits.items() if len(values) > 1]
    if texts:
        yield f"the runs are not of one machine, so that speeds are not comparable: {', '.join(texts)}"


def _pairing(name: str, difference: Paired) -> Iterator[str]:
    """Yield a remark if pairing by seed did not reduce the variance of the differences."""
    if difference.correlation is not None and difference.correlation <= 0:
        yield f"pairing gained nothing for {name}: the correlation of its pairs is {difference.correlation:.2f}"


def _open(name: str, difference: Paired, margin: float, comparisons: int) -> Iterator[str]:
    """Yield a remark about the number of seeds that would show an open variant to be the same, if it is."""
    assert difference.deviation is not None
    seeds = enough(difference.deviation, margin, comparisons)
    if seeds is None or seeds > difference.pairs:
        count = f"more than {MOST_PAIRS:,}" if seeds is None else f"about {seeds:,}"
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
        for code in codes(facts) if facts else ():
            for kind, modules in code.items():
                versions.setdefault(kind, set()).add(json.dumps(modules, sort_keys=True))
    changed = [kind for kind, digests in versions.items() if len(digests) > 1 and kind != EXAMPLES]
    if changed:
        yield f"the runs were trained by different code: {listing(map(shown_kind, changed), 4)}"


def left_out(name: str, curves: Sequence[Curve], on: str) -> Iterator[str]:
    """Yield remarks about runs of an arm that have no value to compare."""
    for curve in curves:
        if not curve.values and not curve.diverged:
            yield f"{name}, seed {curve.seed}, is left out: it has no {on}"


def _without_pair(arms: Sequence[Result]) -> Iterator[str]:
    """Yield remarks about seeds that only one side of a comparison has."""
    seeds = {arm.name: [curve.seed for curve in (*arm.curves, *arm.diverged)] for arm in arms}
    for arm in arms:
        for name, other in ((arm.name, arm.base), (arm.base, arm.name)) if arm.name != arm.base else ():
            alone = [seed for seed in seeds[name] if seed not in seeds[other]]
            if alone and seeds[other]:
                verb = "have" if len(alone) > 1 else "has"
                yield f"{_seeds(alone)} of {name} {verb} no pair in {other}: for the mean alone"


def _seeds(seeds: Sequence[int]) -> str:
    """Return `seed 3`, or `seeds 3, 4`."""
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


SHOWN = "shown.json"


@dataclass(frozen=True)
class Look:
    """Results that were shown.

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


def plan_remarks(folder: Path, arms: Sequence[Result], on: str, seeds: Sequence[int]) -> Iterator[str]:
    """Yield remarks if these results follow another plan than the first results shown; add them to the list."""
    compared = [arm for arm in arms if arm.difference is not None]
    runs = {Path(curve.folder).name for arm in compared for curve in arm.curves}
    if not runs:
        return
    looks = _read(folder / SHOWN)
    look = Look(on, sorted(seeds), sorted(runs))
    if look not in looks:
        looks.append(look)
        with writing(folder / SHOWN):
            folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / SHOWN, json.dumps([asdict(entry) for entry in looks], indent=1) + "\n")
    related = [earlier for earlier in looks if not runs.isdisjoint(earlier.runs)]
    first, metrics = related[0], {earlier.on for earlier in related}
    if first.seeds != look.seeds:
        yield (
            f"the seeds were {ranges(first.seeds)} when results were first shown, and are {ranges(look.seeds)} now: "
            "changing the seeds until a verdict appears gives more false alarms than 5%"
        )
    if first.on != on:
        yield f"{first.on} was shown first: the best of {len(metrics)} metrics gives more false alarms than 5%"
    pairs = min(arm.difference.pairs for arm in compared if arm.difference)
    if pairs < len(seeds):
        yield f"{pairs} of {len(seeds)} seeds are complete: a verdict counts only with all seeds"


def _read(path: Path) -> list[Look]:
    """Return the results that were shown; raise SpecError if the file cannot be read."""
    try:
        return _LOOKS.validate_python(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        cause = cause_of(error) if isinstance(error, ValidationError) else error
        message = f"cannot read {quoted(str(path))}: {cause}"
        help = "remove the file; the sweep then does not know which results were shown"
        raise SpecError(Diagnostic(message, help=help)) from error
