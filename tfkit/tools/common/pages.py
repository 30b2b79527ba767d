"""Self-contained HTML pages, and charts in them. Their contents are text: markup in a name of a spec is escaped.

Tables for notebooks have no colours, so they follow the theme of the notebook.
"""

from __future__ import annotations

import hashlib
import json
import math
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import pairwise
from statistics import fmean
from typing import TypeAlias
from xml.etree.ElementTree import Element, SubElement, tostring

PageContent = Element | str | None
"""An element, a text, or nothing."""
PageSection: TypeAlias = tuple[str, str, Sequence[PageContent]]
"""The id of a section, its heading and its contents."""


def tag(name: str, *children: PageContent, **attributes: object) -> Element:
    """Build an element with its attributes and children in order.

    Texts are escaped, and children that are None are omitted. In names of attributes, a final underscore is removed and
    other underscores become hyphens: `class_`, `stroke_width`. Numbers have two decimals.
    """
    element = Element(
        name, {key.strip("_").replace("_", "-"): _attribute_text(value) for key, value in attributes.items()}
    )
    for child in children:
        if isinstance(child, str):
            _append_text(element, child)
        elif child is not None:
            element.append(child)
    return element


def page(title: str, *body: PageContent, style: str = "", script: str = "") -> str:
    """Build a complete HTML document, which loads no other file and can run no script except `script`.

    It supports light and dark mode, and printing. `style` is added to the style of `page.css`.
    """
    root = Element("html", {"lang": "en"})
    head = SubElement(root, "head")
    head.append(tag("meta", charset="utf-8"))
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    if script:
        digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
    head.append(tag("meta", http_equiv="Content-Security-Policy", content=policy))
    head.append(tag("meta", name_="viewport", content="width=device-width, initial-scale=1"))
    head.append(tag("title", title))
    base_style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    head.append(tag("style", base_style + style))
    root.append(tag("body", *body, tag("script", script) if script else None))
    return "<!doctype html>\n" + tostring(root, encoding="unicode", method="html") + "\n"


def report_page(
    name: str,
    of: str,
    lines: Iterable[str | None],
    sections: Iterable[PageSection],
    *,
    style: str = "",
    charts: bool = False,
) -> str:
    """Build the page of a report: its name, sentences below the name, and its sections.

    `of` is the type of the report, for the title of the window: `sweep`. With `charts`, a script adds controls to the
    curves, which are complete without the script.
    """
    header = tag("header", tag("h1", name), *(tag("p", line, class_="setting") for line in lines if line))
    body = tag("main", *(page_section(*content) for content in sections))
    script = files(__package__).joinpath("curves.js").read_text(encoding="utf-8") if charts else ""
    return page(f"{name}: {of}", header, body, style=CHART_STYLE + style if charts else style, script=script)


def page_table(head: Sequence[str], rows: Iterable[Sequence[PageContent]], *, text: int = 1) -> Element:
    """Build a table whose first `text` columns are words and whose remaining columns are numbers."""
    body = tag("tbody")
    for row in rows:
        body.append(tag("tr", *(tag("td" if index else "th", cell) for index, cell in enumerate(row))))
    columns = tag("thead", tag("tr", *(tag("th", column) for column in head)))
    return tag("div", tag("table", columns, body, class_=f"words{text}"), class_="scroll")


def page_section(name: str, words: str, content: Sequence[PageContent]) -> Element | None:
    """Build a section of a page, under the heading `words` unless it is empty. Return None without content."""
    return tag("section", tag("h2", words) if words else None, *content, id=name) if content else None


def terms(values: Mapping[str, object]) -> Element:
    """Build a list of names and their values; names without a value are omitted."""
    pairs = [(name, text) for name, value in values.items() if (text := text_of(value))]
    return tag("dl", *(tag(kind, text) for pair in pairs for kind, text in zip(("dt", "dd"), pair, strict=True)))


def text_of(value: object) -> str:
    """Describe a value as text; empty for None."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return "" if value is None else str(value)


def bullets(texts: Iterable[str]) -> Element:
    """Build a list of notes."""
    return tag("ul", *(tag("li", text) for text in texts), class_="notes")


def legend(labels: Iterable[tuple[str, str]]) -> Element:
    """Build a legend from the label of each colour class."""
    return tag("ul", *(tag("li", colour_swatch(colour), label) for colour, label in labels), class_="legend")


def colour_swatch(colour: str) -> Element:
    """Build a small square in the colour of a class."""
    return tag("i", class_=f"swatch {colour}")


def remark(text: str) -> Element:
    """Build a sentence that explains a picture, or its absence."""
    return tag("p", text, class_="remark")


def _append_text(element: Element, text: str) -> None:
    """Append text after the last child, or at the beginning if the element has no child yet."""
    if len(element):
        element[-1].tail = (element[-1].tail or "") + text
    else:
        element.text = (element.text or "") + text


def _attribute_text(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def notebook_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Build a table with a title; columns are right-aligned except the first."""
    body = tag("tbody", *(_notebook_row("td", cells) for cells in rows))
    element = tag("table", tag("caption", title), tag("thead", _notebook_row("th", columns)), body)
    return tostring(element, encoding="unicode", method="html")


def _notebook_row(name: str, cells: Sequence[str]) -> Element:
    return tag("tr", *(tag(name, cell, style=f"text-align:{'right' if i else 'left'}") for i, cell in enumerate(cells)))


# ---- curves over steps as SVG, with round values at their axes ----


COLOURS = ("attention", "ffn", "head", "loss", "norm", "embedding", "cross_attention", "optimizer")
"""Names of the page's colours, in the order of lines."""
CHART_WIDTH = 860.0
"""Width of every chart, in the units of its SVG."""
CHART_HEIGHT = 330.0
"""Height of a chart by default."""
MARGIN_LEFT = 60.0
"""Space for the labels of the vertical axis."""
MARGIN_RIGHT = 10.0
"""Space at the right of a chart."""
MARGIN_BOTTOM = 26.0
"""Space for the labels of the horizontal axis."""
TICKS = 5
EARLY_FRACTION = 0.1
"""Fraction of the steps, at the start, that the range of an axis ignores: a loss falls fastest in these steps."""
MAX_TIPS = 200
"""Maximum number of steps whose values appear under the pointer."""
CHART_STYLE = """
.chart { width: 100%; height: auto; display: block; } .chart text { fill: var(--quiet); font-size: 12px; }
.mean { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
.spread { fill: var(--c); fill-opacity: 0.16; }
.tip { fill: transparent; } .tip:hover { fill: var(--line); fill-opacity: 0.6; }
.controls { display: flex; flex-wrap: wrap; gap: 0.4rem 1.2rem; align-items: center; margin: 0 0 0.6rem; }
.controls { font-size: 12.5px; }
.controls label { display: inline-flex; gap: 0.4em; align-items: center; color: var(--quiet); }
.controls output { flex-basis: 100%; min-height: 1.5em; }
.legend [role] { cursor: pointer; } .legend [aria-pressed="false"] { opacity: 0.4; text-decoration: line-through; }
@media print { .controls { display: none; } }
.picture svg { max-width: 100%; height: auto; display: block; margin: 1rem auto 0; }
@media (max-width: 44rem) {
  .chart text { font-size: 20px; }
  .picture { overflow-x: auto; } .picture svg { max-width: none; }
}
"""
"""The style of a page with charts and pictures, in addition to `page.css`."""


def colour_class(index: int) -> str:
    """Return the class that sets the colour of a line."""
    return f"c-{COLOURS[index % len(COLOURS)]}"


def line_legend(names: Iterable[str]) -> Element:
    """Build the legend of lines, in their order."""
    return legend((colour_class(index), name) for index, name in enumerate(names))


@dataclass(frozen=True)
class ChartAxis:
    """A linear map from values to coordinates between two ends."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / ((self.high - self.low) or 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return round values at equal distances."""
        rough = (self.high - self.low or 1.0) / TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(step * digit, 12) for digit in range(first, last + 1)]


@dataclass(frozen=True)
class ChartLine:
    """Values over steps, in the colour of an index. Several values of a step are drawn as their mean within a band.

    `rates` are alternative units for the axis of steps: the number of units per step, by name.
    """

    index: int
    points: Sequence[tuple[int, Sequence[float]]]
    name: str = ""
    rates: Mapping[str, float] = field(default_factory=dict)

    def data(self) -> dict[str, object]:
        """Return the data for the script: each step with the mean, the minimum and the maximum of its values."""
        points = [[step, *(float(f"{of(values):.6g}") for of in (fmean, min, max))] for step, values in self.points]
        return {"name": self.name, "colour": colour_class(self.index), "rates": dict(self.rates), "points": points}


def curves(lines: Sequence[ChartLine], *, words: str = "curves", height: float = CHART_HEIGHT) -> Element:
    """Draw lines over a common axis of steps; `words` describe them for screen readers.

    The range of values ignores the first tenth of the steps, unless only a single step would remain, so a line may
    begin outside the chart. The browser shows the values of the step under the pointer.
    """
    steps = sorted({step for line in lines for step, _ in line.points})
    x = ChartAxis(0, steps[-1], MARGIN_LEFT, CHART_WIDTH - MARGIN_RIGHT)
    first = EARLY_FRACTION * x.high if sum(step >= EARLY_FRACTION * x.high for step in steps) > 1 else 0
    late = [value for line in lines for step, values in line.points if step >= first for value in values]
    y = ChartAxis(min(late), max(late), height - MARGIN_BOTTOM, 8.0)
    chart = canvas(height, words)
    chart.set("data-lines", json.dumps([line.data() for line in lines]))
    wide, tall = CHART_WIDTH - MARGIN_LEFT, height - MARGIN_BOTTOM + 4
    inside = tag(
        "svg",
        viewBox=f"{MARGIN_LEFT:g} 0 {wide:g} {tall:g}",
        x=MARGIN_LEFT,
        y=0,
        width=wide,
        height=tall,
        # The inner element clips lines at the edges of the chart.
    )
    add_grid(chart, y)
    for value in x.ticks():
        chart.append(
            tag("text", f"{value:,.0f}", x=x(value), y=height - 6, class_="end" if value == x.high else "middle")
        )
    for line in lines:
        above = [f"{x(step):.1f},{y(max(values)):.1f}" for step, values in line.points]
        below = [f"{x(step):.1f},{y(min(values)):.1f}" for step, values in reversed(line.points)]
        mean = [f"{x(step):.1f},{y(fmean(values)):.1f}" for step, values in line.points]
        if any(len(values) > 1 for _, values in line.points):
            inside.append(
                tag("polygon", points=" ".join([*above, *below]), class_=f"spread {colour_class(line.index)}")
            )
        inside.append(tag("polyline", points=" ".join(mean), class_=f"mean {colour_class(line.index)}"))
    inside.extend(_step_tips(lines, steps, x, tall))
    chart.append(inside)
    return chart


def _step_tips(lines: Sequence[ChartLine], steps: Sequence[int], x: ChartAxis, height: float) -> Iterator[Element]:
    """Yield an invisible column around each step. Its tooltip contains the values of the lines."""
    steps = steps[:: -(-len(steps) // MAX_TIPS)]
    middles = [(x(left) + x(right)) / 2 for left, right in pairwise(steps)]
    values = [{step: fmean(values) for step, values in line.points} for line in lines]
    for step, left, right in zip(steps, [MARGIN_LEFT, *middles], [*middles, CHART_WIDTH], strict=True):
        texts = [f"{line.name} {of[step]:.4g}".strip() for line, of in zip(lines, values, strict=True) if step in of]
        title = tag("title", "\n".join([f"step {step:,}", *texts]))
        yield tag("rect", title, x=left, y=0, width=right - left, height=height, class_="tip")


def add_grid(chart: Element, y: ChartAxis) -> None:
    """Add lines at round values to a chart."""
    for value in y.ticks():
        chart.append(
            tag("line", x1=MARGIN_LEFT, x2=CHART_WIDTH - MARGIN_RIGHT, y1=y(value), y2=y(value), class_="grid")
        )
        chart.append(tag("text", f"{value:g}", x=MARGIN_LEFT - 8, y=y(value) + 4, class_="end"))


def canvas(height: float, words: str) -> Element:
    """Build an empty chart of the page's width."""
    return tag("svg", viewBox=f"0 0 {CHART_WIDTH:g} {height:g}", class_="chart", role="img", aria_label=words)
