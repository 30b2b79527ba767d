"""The page of a sweep: charts, differences, models and the values that differ in them, costs, and environments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree.ElementTree import Element

from tfkit.commands import (
    CHART_HEIGHT,
    CHART_WIDTH,
    MARGIN_BOTTOM,
    MARGIN_LEFT,
    MARGIN_RIGHT,
    ChartAxis,
    ChartLine,
    PageContent,
    PageSection,
    add_grid,
    bullets,
    canvas,
    colour_class,
    curves,
    line_legend,
    page_table,
    remark,
    report_page,
    tag,
    terms,
    text_of,
)
from tfkit.graph.expand import Graph
from tfkit.run.checked_run import Run
from tfkit.run.run_facts import rates_of, read_facts
from tfkit.run.training.loop import DIVERGED
from tfkit.tools.draw.canvas import shortened_text
from tfkit.tools.draw.picture import draw
from tfkit.tools.draw.svg import inline_svg
from tfkit.tools.show.differences import Difference, spec_differences
from tfkit.tools.sweep import result_tables as tables
from tfkit.tools.sweep.equal import short_size, word_of
from tfkit.tools.sweep.result import ArmResult, Curve, Forecast, Results, Scaling, paired_curves

STYLE = """
.seed { fill: var(--c); fill-opacity: 0.5; } .margin { fill: var(--track); }
.arm { paint-order: stroke; stroke: var(--panel); stroke-width: 4px; }
@media (max-width: 44rem) {
  #differences .chart text { font-size: 26px; }
  #differences .seed { r: 5px; } #differences .point { r: 9px; }
}
#differences table { margin-top: 1rem; }
"""


def results_page(
    results: Results, runs: Mapping[str, Run], *, of: str, lines: Sequence[str | None], origin: Mapping[str, str]
) -> str:
    """Return a self-contained page, which loads no files and supports light and dark mode.

    Args:
        results: the results.
        runs: the first run of each arm by its name.
        of: the type of the comparison, for the title of the window: `sweep`.
        lines: sentences below the name.
        origin: values to list with the environments, by name.
    """
    trained = [arm for arm in results.arms if arm.curves]
    compared = [arm for arm in trained if arm.difference]
    sections: list[PageSection] = [
        (
            "differences",
            f"{results.on}: differences" if compared else results.on,
            list(_difference_contents(results, compared)),
        ),
        (
            "curves",
            f"{results.on} over the steps",
            list(_curve_contents(results, runs)) if trained else [],
        ),
        (
            "tuning",
            "Tuning",
            [page_table(*tables.trial_table(results), text=2), remark(TUNING)] if results.trials else [],
        ),
        ("laws", "Scaling laws", list(_law_contents(results))),
        ("costs", "Costs", [page_table(*tables.cost_table(results)), remark(COSTS)]),
        ("models", "Models", list(_model_contents(results, runs))),
        ("origin", "Where it comes from", list(_origin_contents(results, origin))),
    ]
    return report_page(results.name, of, lines, sections, style=STYLE, charts=True)


COSTS = (
    "FLOPs: for a full run. Memory: peak memory; on a CPU, of the entire process. To equal: the fraction of the "
    "baseline's steps after which a variant reaches the baseline's last value, the geometric mean over seeds. r: the "
    "correlation of the pairs."
)
TUNING = (
    "Means over the seeds of tuning, which the comparison does not use. A star marks the values chosen for a variant."
)
LAWS = (
    "L = E + A / N^a, fitted to the logarithms of all losses with the Huber loss. Intervals: 95%, from the effects of "
    "seeds and, for more than three sizes, from the differences of sizes from the law. Large points with vertical "
    "lines: predictions of the largest size by the smaller sizes, and of the target, with their intervals."
)
GAINS = (
    "Difference: the law of a variant, minus the law of its baseline, at an equal size. To equal: the factor of the "
    "size at which the baseline has the loss of the variant."
)
METHOD = (
    "Large points: mean differences over pairs of one seed, which read the same data in the same order; small points: "
    "pairs. p: the signs of the differences of a seed are flipped for all variants together, in every way for up to 13 "
    "seeds; p is the fraction of flips under which the largest t statistic is at least as large (max-T, step-down), so "
    "false alarms among all variants stay below 5%. Lines: the differences that this test does not reject at 5%. A "
    "variant is better or worse if its line excludes 0, else open. A variant with a diverged run is not compared."
)
MARGIN_NOTE = "The band is ± {:g}, the margin: a variant is the same if its line is within the band."


def _difference_contents(results: Results, compared: Sequence[ArmResult]) -> Iterator[PageContent]:
    if compared:
        yield draw_forest_plot(results.arms, results.margin)
    yield page_table(*tables.difference_table(results))
    yield bullets(results.notes)
    if compared:
        yield remark(METHOD if results.margin is None else f"{METHOD} {MARGIN_NOTE.format(results.margin)}")


def _curve_contents(results: Results, runs: Mapping[str, Run]) -> Iterator[PageContent]:
    rates = {}
    for arm in results.arms:
        run = runs[arm.name]
        rates[arm.name] = rates_of(run, arm.speed and run.tokens_of_step / arm.speed)
    yield draw_mean_curves(results.arms, rates)
    yield line_legend([arm.name for arm in results.arms])
    picture = draw_difference_curves(results.arms)
    if picture is not None:
        yield tag("h3", "Differences over the steps")
        yield picture


def _law_contents(results: Results) -> Iterator[PageContent]:
    """Yield a picture of the variants' laws, and a table of their parameters."""
    if results.laws:
        yield draw_scaling_laws(results.laws)
        yield line_legend([f"{law.name}, over {law.words}" for law in results.laws])
        yield page_table(*tables.law_table(results), text=2)
        yield remark(LAWS)
    if results.gains:
        yield page_table(*tables.gain_table(results), text=2)
        yield remark(GAINS)


def _model_contents(results: Results, runs: Mapping[str, Run]) -> Iterator[PageContent]:
    """Yield pictures of each pair of variant and baseline, and the values that differ."""
    graphs = {name: _named_graph(name, run) for name, run in runs.items()}
    seen = set()
    for arm in results.arms:
        if arm.name == arm.base or arm.variant in seen:
            continue
        seen.add(arm.variant)
        yield tag("h3", f"{arm.base} and {arm.name}")
        base, graph = graphs[arm.base], graphs[arm.name]
        rows = [
            [difference.path, difference.before or "–", difference.after or "–"]
            for difference in differing_values(runs[arm.base], runs[arm.name])
        ]
        yield page_table(["value", arm.base, arm.name], rows) if rows else remark("no value differs")
        if spec_differences(base, graph):
            yield tag("div", inline_svg(draw(base, graph)), class_="picture")
    if not seen:
        only = results.arms[0]
        yield tag("div", inline_svg(draw(graphs[only.name])), class_="picture")


def _named_graph(name: str, run: Run) -> Graph:
    return replace(run.graph, spec=run.graph.spec.named(name.replace(", ", " ")))


def differing_values(base: Run, run: Run) -> list[Difference]:
    """Return the values that differ between two runs, except the seed; values of the models come first."""
    before, after = base.semantics.values, run.semantics.values
    changes = spec_differences(base.graph, run.graph)
    for path in {**before, **after}:
        texts = [word_of(path, values) if path in values else None for values in (before, after)]
        if path != "seed" and not path.startswith("model.") and texts[0] != texts[1]:
            changes.append(Difference(path, texts[0], texts[1], (path,)))
    return changes


def _origin_contents(results: Results, origin: Mapping[str, str]) -> Iterator[PageContent]:
    """Yield the folders of runs, their environments, and the errors of failed runs."""
    curves = [(arm.name, curve) for arm in results.arms for curve in (*arm.curves, *arm.diverged)]
    rows: list[list[PageContent]] = [
        [name, str(curve.seed), tag("code", curve.folder), DIVERGED if curve.diverged else f"{curve.last:.4f}"]
        for name, curve in curves
    ]
    yield page_table(["arm", "seed", "folder", results.on], rows, text=3)
    yield terms({**origin, **_environment_values([Path(curve.folder) for _, curve in curves])})
    yield bullets(f"{folder}: {text}" for folder, text in results.errors.items())


def _environment_values(folders: Sequence[Path]) -> dict[str, str]:
    """Return the environments of runs by name. If runs differ in a value, all values are listed."""
    environments: dict[str, list[str]] = {}
    for facts in filter(None, map(read_facts, folders)):
        for name, value in {**facts.environment, **facts.bits}.items():
            if (text := text_of(value)) not in environments.setdefault(name, []):
                environments[name].append(text)
    return {name: "; ".join(filter(None, values)) for name, values in environments.items()}


ROW, GAPS = 48.0, 220.0


def draw_mean_curves(arms: Sequence[ArmResult], rates: Mapping[str, Mapping[str, float]]) -> Element:
    """Draw the mean of each arm over the steps, in a band from its lowest to its highest seed.

    `rates` are the tokens and the seconds of a step of each arm.
    """
    return curves(
        [ChartLine(index, _seed_points(arm), arm.name, rates[arm.name]) for index, arm in enumerate(arms) if arm.curves]
    )


def draw_difference_curves(arms: Sequence[ArmResult]) -> Element | None:
    """Draw the mean difference of each arm from its baseline over the steps, in a band that contains all pairs.

    None if no arm has two steps at which all its pairs were evaluated: runs may differ in length.
    """
    indexed = [
        (arm.base, ChartLine(index, _difference_points(curve_pairs), arm.name))
        for index, arm, curve_pairs in _compared_arms(arms)
    ]
    lines = [(base, line) for base, line in indexed if len(line.points) > 1]
    if not lines:
        return None
    level = [(step, [0.0]) for step in sorted({step for _, line in lines for step, _ in line.points})]
    ground = ChartLine([arm.name for arm in arms].index(lines[0][0]), level)
    return curves([ground, *(line for _, line in lines)], words="differences over the steps", height=GAPS)


def draw_forest_plot(arms: Sequence[ArmResult], margin: float | None) -> Element:
    """Draw the difference of each arm from its baseline, its interval and each pair; the margin is a band.

    The name of an arm is above its points, so that large text on a phone does not overlap them.
    """
    rows = [
        (index, arm, [curve.last - base.last for curve, base in curve_pairs])
        for index, arm, curve_pairs in _compared_arms(arms)
    ]
    around = 0.0 if margin is None else margin
    ends = [-around, around, *(value for _, _, values in rows for value in values)]
    ends += [end for _, arm, _ in rows if arm.difference and arm.difference.interval for end in arm.difference.interval]
    x = ChartAxis(min(ends), max(ends), MARGIN_LEFT, CHART_WIDTH - MARGIN_LEFT)
    bottom = len(rows) * ROW + 8
    picture = canvas(bottom + MARGIN_BOTTOM, "differences")
    if margin is not None:
        picture.append(tag("rect", x=x(-margin), width=x(margin) - x(-margin), y=0.0, height=bottom, class_="margin"))
    picture.append(tag("line", x1=x(0), x2=x(0), y1=0.0, y2=bottom, class_="ridge"))
    for value in x.ticks():
        picture.append(tag("text", f"{value:+g}", x=x(value), y=bottom + 20, class_="middle"))
    for row, (index, arm, values) in enumerate(rows):
        assert arm.difference is not None
        y = row * ROW + 38
        name = shortened_text(arm.name, CHART_WIDTH, 26.0)
        picture.append(tag("text", name, tag("title", arm.name), x=0.0, y=y - 16, class_="arm"))
        if arm.difference.interval is not None:
            low, high = map(x, arm.difference.interval)
            picture.append(tag("line", x1=low, x2=high, y1=y, y2=y, class_=f"mean {colour_class(index)}"))
        for value in values:
            picture.append(tag("circle", cx=x(value), cy=y, r=2.5, class_=f"seed {colour_class(index)}"))
        picture.append(tag("circle", cx=x(arm.difference.mean), cy=y, r=5.0, class_=f"point {colour_class(index)}"))
    return picture


def draw_scaling_laws(laws: Sequence[Scaling]) -> Element:
    """Draw the loss of each seed over the size, on a log scale, the law of each variant, and its forecasts."""
    forecasts = [_forecasts(variant) for variant in laws]
    sizes = {size for variant in laws for size in variant.sizes} | {at.size for row in forecasts for at in row}
    losses = [loss for variant in laws for row in variant.losses for loss in row]
    losses += [forecast.loss for row in forecasts for forecast in row]
    x = ChartAxis(math.log(min(sizes)), math.log(max(sizes)), MARGIN_LEFT + 20, CHART_WIDTH - MARGIN_RIGHT - 30)
    y = ChartAxis(min(losses), max(losses), CHART_HEIGHT - MARGIN_BOTTOM, 8.0)
    picture = canvas(CHART_HEIGHT, "scaling laws")
    add_grid(picture, y)
    for size in sorted({*laws[0].sizes, *(forecast.size for forecast in forecasts[0])}):
        picture.append(
            tag("text", short_size(size, laws[0].words), x=x(math.log(size)), y=CHART_HEIGHT - 6, class_="middle")
        )
    for index, (variant, row) in enumerate(zip(laws, forecasts, strict=True)):
        steps = [x.low + (x.high - x.low) * step / 100 for step in range(101)]
        line = " ".join(f"{x(step):.1f},{y(variant.law.at(math.exp(step))):.1f}" for step in steps)
        picture.append(tag("polyline", points=line, class_=f"mean {colour_class(index)}"))
        for forecast in row:
            at = x(math.log(forecast.size))
            picture.append(tag("circle", cx=at, cy=y(forecast.loss), r=5.0, class_=f"point {colour_class(index)}"))
            if forecast.interval is not None:
                low, high = (y(min(max(end, y.low), y.high)) for end in forecast.interval)
                picture.append(tag("line", x1=at, x2=at, y1=low, y2=high, class_=f"mean {colour_class(index)}"))
        for size, of_size in zip(variant.sizes, variant.losses, strict=True):
            for loss in of_size:
                picture.append(
                    tag("circle", cx=x(math.log(size)), cy=y(loss), r=3.0, class_=f"seed {colour_class(index)}")
                )
    return picture


def _forecasts(variant: Scaling) -> list[Forecast]:
    """Return the forecasts of a law."""
    return [forecast for forecast in (variant.law.held_out, variant.law.at_target) if forecast is not None]


def _seed_points(arm: ArmResult) -> list[tuple[int, list[float]]]:
    """Return the values of all seeds at each step where every seed was evaluated."""
    return _common_points([dict(zip(curve.steps, curve.values, strict=True)) for curve in arm.curves])


def _difference_points(curve_pairs: Sequence[tuple[Curve, Curve]]) -> list[tuple[int, list[float]]]:
    """Return the differences of all pairs at each step where every pair was evaluated."""
    differences = []
    for curve, base in curve_pairs:
        base_values = dict(zip(base.steps, base.values, strict=True))
        values = zip(curve.steps, curve.values, strict=True)
        differences.append({step: value - base_values[step] for step, value in values if step in base_values})
    return _common_points(differences)


def _common_points(curves: Sequence[Mapping[int, float]]) -> list[tuple[int, list[float]]]:
    """Return the values of all curves at each step that all of them contain."""
    return [
        (step, [values[step] for values in curves]) for step in curves[0] if all(step in values for values in curves)
    ]


def _compared_arms(arms: Sequence[ArmResult]) -> list[tuple[int, ArmResult, list[tuple[Curve, Curve]]]]:
    """Return the arms that are compared to a baseline, each with its index among all arms and its pairs."""
    named = {arm.name: arm for arm in arms}
    return [
        (index, arm, paired_curves(arm, named[arm.base]))
        for index, arm in enumerate(arms)
        if arm.difference is not None
    ]
