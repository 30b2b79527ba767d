"""The page of a sweep: curves, differences, the models and what differs in them, costs, and where it all comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree.ElementTree import Element

from tfkit.graph.expand import Graph
from tfkit.graph.run import Run
from tfkit.tools.common import charts
from tfkit.tools.common.charts import colour
from tfkit.tools.common.page import Child, remark, section, table, tag, terms, text_of
from tfkit.tools.common.page import page as document
from tfkit.tools.diff.differences import Difference, differences
from tfkit.tools.draw.picture import draw
from tfkit.tools.draw.svg import inline
from tfkit.tools.sweep import tables
from tfkit.tools.sweep.alike import word_of
from tfkit.tools.sweep.charts import forest, gaps, scaling, seeds
from tfkit.tools.sweep.result import Result, Results
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
