"""The report of a run as a page: curves, texts, the model, the run file, and the environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from tfkit.commands import (
    CHART_HEIGHT,
    ChartLine,
    PageContent,
    PageSection,
    bullets,
    curves,
    line_legend,
    remark,
    report_page,
    tag,
    terms,
)
from tfkit.run.checked_run import Run
from tfkit.run.run_facts import Facts, rates_of
from tfkit.run.run_spec import render_run
from tfkit.tools.common.history import History, Points
from tfkit.tools.draw.picture import draw
from tfkit.tools.draw.svg import inline_svg
from tfkit.tools.train.components import STYLE as COMPONENTS_STYLE
from tfkit.tools.train.components import component_contents, without_components

MAX_POINTS, LAST_TEXTS = 300, 20
RATE, NORM = "lr", "grad_norm"
STYLE = """
pre { overflow-x: auto; margin: 0; font: 12px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre.text { white-space: pre-wrap; border-left: 3px solid var(--line); padding-left: 0.8rem; }
.chart + .legend, .legend + h3 { margin-bottom: 1rem; }
"""


def run_report(run: Run, facts: Facts, numbers: History) -> str:
    """Render a self-contained page, which loads no files and supports light and dark mode."""
    config, last = run.config, facts.sessions[-1]
    sections: list[PageSection] = [
        ("numbers", "Numbers", list(_metric_charts(numbers, rates_of(run, facts.seconds_of_step)))),
        ("components", "Components", list(component_contents(numbers))),
        ("texts", "Texts", list(_text_contents(numbers))),
        ("model", "Model", [tag("div", inline_svg(draw(run.graph)), class_="picture")]),
        ("run", "The run", [tag("pre", render_run(config, run.written))]),
        ("origin", "Where it comes from", list(_origin_contents(run, facts))),
    ]
    lines = [config.description, f"{last['ended']} after step {last['step']:,} of {run.steps:,}", _latest_text(numbers)]
    return report_page(config.name, "run", lines, sections, style=COMPONENTS_STYLE + STYLE, charts=True)


def _latest_text(numbers: History) -> str:
    names = [name for name in without_components(numbers.latest) if name not in (RATE, NORM)]
    return ", ".join(f"{name} {numbers.latest[name]:.4g}" for name in names)


def _metric_charts(recorded: History, rates: Mapping[str, float]) -> Iterator[PageContent]:
    """Yield a chart for each kind of number, with a line for each split."""
    drawn = without_components(recorded.curves)
    order = ["loss", *sorted({_metric_kind(name) for name in drawn} - {"loss", RATE, NORM}), RATE, NORM]
    by_kind = {kind: list(names) for kind, names in groupby(sorted(drawn, key=_metric_kind), _metric_kind)}
    for kind in order:
        names = by_kind.get(kind, [])
        lines = [
            ChartLine(index, _binned_points(recorded.curves[name]), name, rates) for index, name in enumerate(names)
        ]
        if any(len(line.points) > 1 for line in lines):
            yield tag("h3", kind)
            yield curves(lines, words=f"{kind} over the steps", height=CHART_HEIGHT if kind == "loss" else 180.0)
            yield line_legend(names) if len(names) > 1 else None
    if any(len(points) > MAX_POINTS for points in recorded.curves.values()):
        yield remark("Lines are means of neighbouring steps, in a band from the least to the largest of them.")


def _metric_kind(name: str) -> str:
    """Return the name of a split's number without the split."""
    return name.rpartition(".")[2]


def _binned_points(points: Points) -> list[tuple[int, list[float]]]:
    """Return the points to draw. Of a long curve, each point combines the values of neighbouring steps."""
    width = -(-len(points) // MAX_POINTS)
    groups = [points[start : start + width] for start in range(0, len(points), width)]
    return [(group[-1][0], [value for _, value in group]) for group in groups]


def _text_contents(recorded: History) -> Iterator[PageContent]:
    """Yield the last texts: samples, spikes, skipped steps."""
    for step, name, text in recorded.texts[-LAST_TEXTS:]:
        yield tag("h3", f"{name}, step {step:,}")
        yield tag("pre", text, class_="text")


def _origin_contents(run: Run, facts: Facts) -> Iterator[PageContent]:
    """Yield the environment, and each process that trained."""
    yield terms({"run": run.file.file, "meaning": facts.digest, **facts.environment, **facts.bits})
    yield bullets(map(_session_text, facts.sessions))


def _session_text(entry: dict[str, object]) -> str:
    seconds = entry.get("seconds")
    time = f", {seconds:,.0f} s" if isinstance(seconds, float) else ""
    return f"{entry['began']}: {entry['command']}: {entry['ended'] or 'did not end'}{time}"
