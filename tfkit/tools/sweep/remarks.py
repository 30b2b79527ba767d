"""Remarks beside the numbers of a comparison: missing pairs, too few seeds, runs that are left out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence

from tfkit.errors import listing, quoted
from tfkit.tools.sweep.arms import Cell
from tfkit.tools.sweep.curves import Curve
from tfkit.tools.sweep.result import Result
from tfkit.tools.sweep.statistics import ALPHA, MOST_PAIRS, Paired, enough, half, least_p
from tfkit.tools.train.code import EXAMPLES, codes, shown_kind
from tfkit.tools.train.record import read_facts


def remarks(arms: Sequence[Result], margin: float | None) -> Iterator[str]:
    """Sentences that a reader of the results must know."""
    for one in arms:
        for path in one.tuned.edge if one.tuned else ():
            assert one.tuned is not None
            value = one.tuned.values[path]
            yield f"{one.name} is not tuned: its best {path}, {value}, is at the edge of the values that were tried"
    compared = [one for one in arms if one.difference]
    yield from _without_pair(arms)
    pairs = min((one.difference.pairs for one in compared if one.difference), default=0)
    if pairs == 1:
        yield "one seed: numbers without a verdict"
    elif compared and (least := least_p(pairs) * len(compared)) > ALPHA:
        more = next(n for n in range(pairs, 60) if least_p(n) * len(compared) <= ALPHA)
        yield f"{pairs} seeds cannot show a difference: p is at least {min(1.0, least):.3f}; {more} seeds can"
    for one in compared:
        assert one.difference is not None
        yield from _pairing(one.name, one.difference)
        if margin is not None and one.verdict == "open":
            yield from _open(one.name, one.difference, margin, len(compared))
    yield from _machines([curve for one in arms for curve in one.curves])


def _machines(curves: Sequence[Curve]) -> Iterator[str]:
    """A remark if runs differ in what decides their speeds and last digits."""
    names = dict.fromkeys(name for one in curves for name in one.bits)
    found = {name: list(dict.fromkeys(str(one.bits.get(name)) for one in curves)) for name in names}
    texts = [f"{name} is {' or '.join(map(quoted, values))}" for name, values in found.items() if len(values) > 1]
    if texts:
        yield f"the runs are not of one machine, so that speeds are not comparable: {', '.join(texts)}"


def _pairing(name: str, found: Paired) -> Iterator[str]:
    """A remark if different seeds would not have given a wider interval."""
    if found.correlation is None or found.interval is None or found.unpaired is None:
        return
    own, other = half(found.interval), half(found.unpaired)
    if other <= own:
        yield f"pairing bought nothing for {name}: ± {own:.4f}, and ± {other:.4f} with different seeds"


def _open(name: str, found: Paired, margin: float, comparisons: int) -> Iterator[str]:
    """A remark about the seeds that it takes to show that an open variant is the same, if it is."""
    assert found.deviation is not None
    seeds = enough(found.deviation, margin, comparisons)
    if seeds is None or seeds > found.pairs:
        count = f"more than {MOST_PAIRS:,}" if seeds is None else f"about {seeds:,}"
        yield f"{name} is open: {count} seeds would show it to be the same within {margin:g}, in 4 of 5 cases, if it is"


def ended_early(name: str, curves: Sequence[Curve], steps: int) -> Iterator[str]:
    """Remarks about runs of an arm that a callback ended."""
    for curve in curves:
        if curve.steps and curve.steps[-1] < steps:
            yield f"{name}, seed {curve.seed}, ended at step {curve.steps[-1]:,} of {steps:,}"


def mixed_code(cells: Iterable[Cell]) -> Iterator[str]:
    """Yield a remark if the same kind had different code in different runs, or in the processes of one run."""
    versions: dict[str, set[str]] = {}
    for cell in cells:
        facts = read_facts(cell.folder)
        for code in codes(facts) if facts else ():
            for kind, modules in code.items():
                versions.setdefault(kind, set()).add(json.dumps(modules, sort_keys=True))
    changed = [kind for kind, digests in versions.items() if len(digests) > 1 and kind != EXAMPLES]
    if changed:
        yield f"the runs were trained by different code: {listing(map(shown_kind, changed), 4)}"


def left_out(name: str, curves: Sequence[Curve], on: str) -> Iterator[str]:
    """Remarks about runs of an arm that have no number to compare."""
    for curve in curves:
        if not math.isfinite(curve.last):
            why = f"its last {on} is {curve.last}" if curve.values else f"it has no {on}"
            yield f"{name}, seed {curve.seed}, is left out: {why}"


def _without_pair(arms: Sequence[Result]) -> Iterator[str]:
    """Remarks about seeds that only one side of a comparison has."""
    seeds = {one.name: [curve.seed for curve in one.curves] for one in arms}
    for one in arms:
        for name, other in ((one.name, one.base), (one.base, one.name)) if one.name != one.base else ():
            alone = [str(seed) for seed in seeds[name] if seed not in seeds[other]]
            if alone and seeds[other]:
                several = len(alone) > 1
                which = f"seed{'s' if several else ''} {', '.join(alone)} of {name}"
                yield f"{which} {'have' if several else 'has'} no pair in {other}: for the mean alone"
