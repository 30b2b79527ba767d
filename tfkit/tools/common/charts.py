"""Curves over steps as SVG, with round values at their axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from xml.etree.ElementTree import Element

from tfkit.tools.common import page
from tfkit.tools.common.page import tag

COLOURS = ("attention", "ffn", "head", "loss", "norm", "embedding", "cross_attention", "optimizer")
"""Names of the page's colours, in the order of lines."""
WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM = 860.0, 330.0, 60.0, 10.0, 26.0
TICKS = 5
EARLY = 0.1
"""The fraction of the steps in which a loss falls fastest: an axis that shows all of it shows little else."""
STYLE = """
.chart { width: 100%; height: auto; display: block; } .chart text { fill: var(--quiet); font-size: 12px; }
.mean { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
.spread { fill: var(--c); fill-opacity: 0.16; }
.picture svg { max-width: 100%; height: auto; display: block; margin: 1rem auto 0; }
"""
"""The style of a page with charts and pictures, in addition to `page.css`."""


def colour(index: int) -> str:
    """Return the class that sets the colour of a line."""
    return f"c-{COLOURS[index % len(COLOURS)]}"


def legend(names: Iterable[str]) -> Element:
    """Build the legend of lines, in their order."""
    return page.legend((colour(index), name) for index, name in enumerate(names))


@dataclass(frozen=True)
class ChartAxis:
    """From values to places between two ends."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / ((self.high - self.low) or 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values at equal distances."""
        rough = (self.high - self.low or 1.0) / TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(step * digit, 12) for digit in range(first, last + 1)]


@dataclass(frozen=True)
class Line:
    """Values over steps, in the colour of that index; several values of a step are drawn as their mean in a band."""

    index: int
    points: Sequence[tuple[int, Sequence[float]]]


def curves(lines: Sequence[Line], *, words: str = "curves", height: float = HEIGHT) -> Element:
    """Draw lines over one axis of steps; `words` describe them for screen readers.

    The range of values ignores the first tenth of the steps, so a line may begin outside the chart.
    """
    x = ChartAxis(0, max(step for line in lines for step, _ in line.points), LEFT, WIDTH - RIGHT)
    late = [value for line in lines for step, values in line.points if step >= EARLY * x.high for value in values]
    y = ChartAxis(min(late), max(late), height - BOTTOM, 8.0)
    chart = canvas(height, words)
    wide, tall = WIDTH - LEFT, height - BOTTOM + 4
    inside = tag("svg", viewBox=f"{LEFT:g} 0 {wide:g} {tall:g}", x=LEFT, y=0, width=wide, height=tall)  # cuts lines off
    levels(chart, y)
    for value in x.ticks():
        chart.append(
            tag("text", f"{value:,.0f}", x=x(value), y=height - 6, class_="end" if value == x.high else "middle")
        )
    for line in lines:
        above = [f"{x(step):.1f},{y(max(values)):.1f}" for step, values in line.points]
        below = [f"{x(step):.1f},{y(min(values)):.1f}" for step, values in reversed(line.points)]
        mean = [f"{x(step):.1f},{y(fmean(values)):.1f}" for step, values in line.points]
        if any(len(values) > 1 for _, values in line.points):
            inside.append(tag("polygon", points=" ".join([*above, *below]), class_=f"spread {colour(line.index)}"))
        inside.append(tag("polyline", points=" ".join(mean), class_=f"mean {colour(line.index)}"))
    chart.append(inside)
    return chart


def levels(chart: Element, y: ChartAxis) -> None:
    """Add lines at round values to a chart."""
    for value in y.ticks():
        chart.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(value), y2=y(value), class_="grid"))
        chart.append(tag("text", f"{value:g}", x=LEFT - 8, y=y(value) + 4, class_="end"))


def canvas(height: float, words: str) -> Element:
    """Build an empty chart of the page's width."""
    return tag("svg", viewBox=f"0 0 {WIDTH:g} {height:g}", class_="chart", role="img", aria_label=words)
