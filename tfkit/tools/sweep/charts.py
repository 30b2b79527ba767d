"""Curves with bands, and differences with intervals, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element

from tfkit.tools.common.charts import BOTTOM, HEIGHT, LEFT, RIGHT, WIDTH, Line, Scale, canvas, colour, curves, levels
from tfkit.tools.common.page import tag
from tfkit.tools.common.units import short
from tfkit.tools.sweep.curves import Curve
from tfkit.tools.sweep.laws import Scaling
from tfkit.tools.sweep.result import Result, pairs

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
