"""The page of a sweep: charts, differences, models and the values that differ in them, costs, and environments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree.ElementTree import Element

from tfkit.graph.expand import Graph
from tfkit.graph.run import Run
from tfkit.tools.common import charts
from tfkit.tools.common.charts import BOTTOM, HEIGHT, LEFT, RIGHT, WIDTH, Line, Scale, canvas, colour, curves, levels
from tfkit.tools.common.page import Child, remark, section, table, tag, terms, text_of
from tfkit.tools.common.page import page as document
from tfkit.tools.common.units import short
from tfkit.tools.diff.differences import Difference, differences
from tfkit.tools.draw.picture import draw
from tfkit.tools.draw.svg import inline
from tfkit.tools.sweep import tables
from tfkit.tools.sweep.equal import word_of
from tfkit.tools.sweep.result import Curve, Result, Results, Scaling, pairs
from tfkit.tools.train.record import read_facts
from tfkit.training.loop import DIVERGED

STYLE = """
.seed { fill: var(--c); fill-opacity: 0.5; } .margin { fill: var(--track); }
#differences table { margin-top: 1rem; }
"""


def page(
    found: Results, runs: Mapping[str, Run], *, of: str, lines: Sequence[str | None], origin: Mapping[str, str]
) -> str:
    """A self-contained page: it loads nothing, runs no script, and follows light and dark.

    Args:
        found: the results.
        runs: the first run of each arm by its name.
        of: the word for what is compared, in the title of the window.
        lines: sentences under the name.
        origin: values beside the environment, by name.
    """
    there = [arm for arm in found.arms if arm.curves]
    compared = [arm for arm in there if arm.difference]
    sections: list[tuple[str, str, Sequence[Child]]] = [
        ("differences", f"{found.on}: differences" if compared else found.on, list(_differences(found, compared))),
        (
            "curves",
            f"{found.on} over the steps",
            list(_curves(found)) if there else [],
        ),
        ("tuning", "Tuning", [table(*tables.trials(found), text=2), remark(TUNING)] if found.trials else []),
        ("laws", "Scaling laws", list(_laws(found))),
        ("costs", "Costs", [table(*tables.costs(found)), remark(COSTS)]),
        ("models", "Models", list(_models(found, runs))),
        ("origin", "Where it comes from", list(_origin(found, origin))),
    ]
    body = [section(*one) for one in sections]
    header = tag("header", tag("h1", found.name), *(tag("p", line, class_="setting") for line in lines if line))
    return document(f"{found.name}: {of}", header, tag("main", *body), style=charts.STYLE + STYLE)


COSTS = (
    "FLOPs are those of a whole run. Memory: the most in use; on a CPU, that of the whole process. To equal: the share "
    "of the baseline's tokens after which a variant has the baseline's last value, the geometric mean over seeds. r: "
    "the correlation of the pairs."
)
TUNING = "Means over the seeds of tuning, which the comparison has not; a star for the values that a variant was given."
LAWS = (
    "L = E + A / N^a, fitted to the logarithms of all losses with the Huber loss. Intervals: 95%, by a bootstrap over "
    "seeds. The last number is the error of foretelling the largest size from the others."
)
METHOD = (
    "Large points: mean differences over pairs of one seed, which read the same data in the same order; small points: "
    "pairs. p: the signs of the differences of a seed are flipped for all variants together, in every way for up to 13 "
    "seeds; p is the fraction of flips under which the largest t statistic is at least as large (max-T, step-down), so "
    "false alarms among all variants stay below 5%. Lines: the differences that this test does not reject at 5%. A "
    "variant is better or worse if its line excludes 0, else open. A variant with a diverged run is not compared."
)
SAME = "The band is ± {:g}, the margin: a variant is the same if its line is within the band."


def _differences(found: Results, compared: Sequence[Result]) -> Iterator[Child]:
    if compared:
        yield forest(found.arms, found.margin)
    yield table(*tables.differences(found))
    yield tag("ul", *(tag("li", note) for note in found.notes), class_="notes")
    if compared:
        yield remark(METHOD if found.margin is None else f"{METHOD} {SAME.format(found.margin)}")


def _curves(found: Results) -> Iterator[Child]:
    yield seeds(found.arms)
    yield _legend([one.name for one in found.arms])
    apart = gaps(found.arms)
    if apart is not None:
        yield tag("h3", "Differences over the steps")
        yield apart


def _legend(names: Sequence[str]) -> Element:
    entries = [tag("li", tag("i", class_=f"swatch {colour(index)}"), name) for index, name in enumerate(names)]
    return tag("ul", *entries, class_="legend")


def _laws(found: Results) -> Iterator[Child]:
    """The law of each variant: a picture and its numbers."""
    if found.laws:
        yield scaling(found.laws)
        yield _legend([f"{one.name}, over {one.words}" for one in found.laws])
        yield table(*tables.laws(found), text=2)
        yield remark(LAWS)


def _models(found: Results, runs: Mapping[str, Run]) -> Iterator[Child]:
    """Each variant beside the baseline, once, and the values that differ."""
    graphs = {name: _graph(name, run) for name, run in runs.items()}
    seen = set()
    for arm in found.arms:
        if arm.name == arm.base or arm.variant in seen:
            continue
        seen.add(arm.variant)
        yield tag("h3", f"{arm.base} and {arm.name}")
        base, own = graphs[arm.base], graphs[arm.name]
        rows = [[one.path, one.before or "–", one.after or "–"] for one in differing(runs[arm.base], runs[arm.name])]
        yield table(["value", arm.base, arm.name], rows) if rows else remark("no value differs")
        if differences(base, own):
            yield tag("div", inline(draw(base, own)), class_="picture")
    if not seen:
        only = found.arms[0]
        yield tag("div", inline(draw(graphs[only.name])), class_="picture")


def _graph(name: str, run: Run) -> Graph:
    return replace(run.graph, spec=run.graph.spec.named(name.replace(", ", " ")))


def differing(base: Run, own: Run) -> list[Difference]:
    """The values that differ in two runs but for the seed, those of their models first."""
    before, after = base.meaning.values, own.meaning.values
    found = differences(base.graph, own.graph)
    for path in {**before, **after}:
        texts = [word_of(path, values) if path in values else None for values in (before, after)]
        if path != "seed" and not path.startswith("model.") and texts[0] != texts[1]:
            found.append(Difference(path, texts[0], texts[1], (path,)))
    return found


def _origin(found: Results, origin: Mapping[str, str]) -> Iterator[Child]:
    """The folders of runs, their environments, and the errors of those that failed."""
    curves = [(arm.name, curve) for arm in found.arms for curve in (*arm.curves, *arm.diverged)]
    rows: list[list[Child]] = [
        [name, str(curve.seed), tag("code", curve.folder), DIVERGED if curve.diverged else f"{curve.last:.4f}"]
        for name, curve in curves
    ]
    yield table(["arm", "seed", "folder", found.on], rows, text=3)
    yield terms({**origin, **_environments([Path(curve.folder) for _, curve in curves])})
    yield tag("ul", *(tag("li", f"{folder}: {text}") for folder, text in found.errors.items()), class_="notes")


def _environments(folders: Sequence[Path]) -> dict[str, str]:
    """The environments of runs, with all values of a name where they differ."""
    known: dict[str, list[str]] = {}
    for facts in filter(None, map(read_facts, folders)):
        for name, value in {**facts.environment, **facts.bits}.items():
            if (text := text_of(value)) not in known.setdefault(name, []):
                known[name].append(text)
    return {name: "; ".join(filter(None, values)) for name, values in known.items()}


NAMES, ROW, GAPS = 200.0, 30.0, 220.0


def seeds(arms: Sequence[Result]) -> Element:
    """The mean of each arm over the steps, in a band from its lowest to its highest seed."""
    return curves([Line(index, _points(arm)) for index, arm in enumerate(arms) if arm.curves])


def gaps(arms: Sequence[Result]) -> Element | None:
    """The mean difference of each arm from its baseline over the steps, in a band that has all pairs.

    None if no arm has two steps at which its pairs were evaluated: their runs may have other lengths.
    """
    every = [(one.base, Line(index, _gaps(both))) for index, one, both in _compared(arms)]
    lines = [(base, line) for base, line in every if len(line.points) > 1]
    if not lines:
        return None
    level = [(step, [0.0]) for step in sorted({step for _, line in lines for step, _ in line.points})]
    ground = Line([arm.name for arm in arms].index(lines[0][0]), level)
    return curves([ground, *(line for _, line in lines)], words="differences over the steps", height=GAPS)


def forest(arms: Sequence[Result], margin: float | None) -> Element:
    """The difference of each arm from its baseline, its interval, and each pair as a point; the margin is a band."""
    rows = [(index, one, [own.last - base.last for own, base in both]) for index, one, both in _compared(arms)]
    around = 0.0 if margin is None else margin
    ends = [-around, around, *(value for _, _, values in rows for value in values)]
    ends += [end for _, one, _ in rows if one.difference and one.difference.interval for end in one.difference.interval]
    x = Scale(min(ends), max(ends), NAMES, WIDTH - RIGHT - 30)
    bottom = len(rows) * ROW + 8
    made = canvas(bottom + BOTTOM, "differences")
    if margin is not None:
        made.append(tag("rect", x=x(-margin), width=x(margin) - x(-margin), y=0.0, height=bottom, class_="margin"))
    made.append(tag("line", x1=x(0), x2=x(0), y1=0.0, y2=bottom, class_="ridge"))
    for value in x.ticks():
        made.append(tag("text", f"{value:+g}", x=x(value), y=bottom + 16, class_="middle"))
    for row, (index, one, values) in enumerate(rows):
        assert one.difference is not None
        y = row * ROW + ROW / 2
        made.append(tag("text", one.name, x=0.0, y=y + 4))
        if one.difference.interval is not None:
            low, high = map(x, one.difference.interval)
            made.append(tag("line", x1=low, x2=high, y1=y, y2=y, class_=f"mean {colour(index)}"))
        for value in values:
            made.append(tag("circle", cx=x(value), cy=y, r=2.5, class_=f"seed {colour(index)}"))
        made.append(tag("circle", cx=x(one.difference.mean), cy=y, r=5.0, class_=f"point {colour(index)}"))
    return made


def scaling(laws: Sequence[Scaling]) -> Element:
    """The loss of each seed over the size, on a log scale, and the law of each variant as a line."""
    sizes = sorted({size for one in laws for size in one.sizes})
    every = [loss for one in laws for row in one.losses for loss in row]
    x = Scale(math.log(sizes[0]), math.log(sizes[-1]), LEFT + 20, WIDTH - RIGHT - 30)
    y = Scale(min(every), max(every), HEIGHT - BOTTOM, 8.0)
    made = canvas(HEIGHT, "scaling laws")
    levels(made, y)
    for size in laws[0].sizes:
        made.append(tag("text", short(round(size)), x=x(math.log(size)), y=HEIGHT - 6, class_="middle"))
    for index, one in enumerate(laws):
        steps = [x.low + (x.high - x.low) * step / 100 for step in range(101)]
        line = " ".join(f"{x(step):.1f},{y(one.law.at(math.exp(step))):.1f}" for step in steps)
        made.append(tag("polyline", points=line, class_=f"mean {colour(index)}"))
        for size, losses in zip(one.sizes, one.losses, strict=True):
            for loss in losses:
                made.append(tag("circle", cx=x(math.log(size)), cy=y(loss), r=3.0, class_=f"seed {colour(index)}"))
    return made


def _points(arm: Result) -> list[tuple[int, list[float]]]:
    """The values of all seeds at each step that all of them were evaluated at."""
    return _common([dict(zip(curve.steps, curve.values, strict=True)) for curve in arm.curves])


def _gaps(both: Sequence[tuple[Curve, Curve]]) -> list[tuple[int, list[float]]]:
    """The differences of all pairs at each step that all of them were evaluated at."""
    made = []
    for own, base in both:
        other = dict(zip(base.steps, base.values, strict=True))
        values = zip(own.steps, own.values, strict=True)
        made.append({step: value - other[step] for step, value in values if step in other})
    return _common(made)


def _common(of: Sequence[Mapping[int, float]]) -> list[tuple[int, list[float]]]:
    """The values of all at each step that all have."""
    return [(step, [one[step] for one in of]) for step in of[0] if all(step in one for one in of)]


def _compared(arms: Sequence[Result]) -> list[tuple[int, Result, list[tuple[Curve, Curve]]]]:
    """The arms that differ from a baseline, each with its place among all and its pairs."""
    named = {arm.name: arm for arm in arms}
    return [(index, one, pairs(one, named[one.base])) for index, one in enumerate(arms) if one.difference is not None]
