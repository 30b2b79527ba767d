"""Heat maps over layers and steps, and a table, of the numbers that the callback `components` logs.

Colours compare a value with the median of its map, so that a component that differs from its neighbours stands out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, median
from typing import TypeAlias
from xml.etree.ElementTree import Element

from tfkit.commands import CHART_WIDTH, PageContent, bullets, canvas, legend, remark, tag
from tfkit.tools.common.heat_map import LEVELS, draw_cells
from tfkit.tools.common.heat_map import STYLE as MAP_STYLE
from tfkit.tools.common.history import History

SEPARATOR = "/"
"""Separator between quantity and component in the name of a number. Names of metrics do not contain it."""
OUTLIER_RATIO = 30.0
"""Ratio to the median at which a value gets the darkest colour and is reported."""
MAX_COLUMNS = 80
HEAD_ENTROPY = "head"
COLUMNS, GAP, TOP = 3, 34.0, 20.0
MIN_HEIGHT, MAX_HEIGHT, ROW = 96.0, 420.0, 6.0
"""Minimum and maximum height of a map, and the height of a row, in pixels."""
STYLE = (
    MAP_STYLE
    + """
.swatch.low { background: #2f6fd0; } .swatch.high { background: #d6392b; } .swatch.part { background: #8a4fc4; }
.chart text.small { font-size: 10px; } .chart text.title { fill: var(--ink); font-weight: 600; }
"""
)
_NAME = re.compile(r"(\w+)/(.+)\.layers\.(\d+)\.(.+?)(?:\.heads\.(\d+))?")
_TITLES = {
    "rms": "RMS",
    "entropy": "entropy",
    "dead": "dead units",
    "gradient": "gradient",
    "update": "update / weight",
}

Row: TypeAlias = tuple[int, int | None]
"""The number of a layer and of a head; None in a map without heads."""


@dataclass(frozen=True)
class ComponentHeatMap:
    """A quantity of the same component in all layers of a stack, over the steps."""

    quantity: str
    stack: str
    component: str
    rows: Mapping[Row, Mapping[int, float]]
    """The values by step, for each layer or each head."""

    @property
    def of_heads(self) -> bool:
        """True if there is a row for each head."""
        return any(head is not None for _, head in self.rows)

    @property
    def relative(self) -> bool:
        """True if colours show ratios to the median; False if they show fractions of the largest value."""
        return self.quantity not in ("entropy", "dead")

    @property
    def title(self) -> str:
        """The quantity and the component."""
        component = self.component.removesuffix(".out") + (" heads" if self.of_heads else "")
        return f"{self.stack} {component}: {_TITLES[self.quantity]}"

    @property
    def middle(self) -> float:
        """The median of the positive values, to which colours are relative."""
        values = [value for row in self.rows.values() for value in row.values() if value > 0]
        return median(values) if values else 1.0

    @property
    def largest(self) -> float:
        """The value of the darkest colour of a map that is not relative."""
        largest = max((value for row in self.rows.values() for value in row.values()), default=1.0)
        return 1.0 if self.quantity == "dead" else largest or 1.0

    def level(self, value: float) -> int:
        """Return the shade of a value, up to `LEVELS`; negative below the median."""
        if not self.relative:
            return round(value / self.largest * LEVELS)
        if value <= 0:
            return -LEVELS
        return round(max(-1.0, min(1.0, math.log(value / self.middle, OUTLIER_RATIO))) * LEVELS)

    def latest(self, row: Row) -> float:
        """Return the last value of a row."""
        values = self.rows[row]
        return values[max(values)]

    @property
    def line(self) -> tuple[str, int]:
        """The stack, and the line of its maps in the picture: sizes, heads and units, gradients, updates."""
        if self.quantity in ("gradient", "update"):
            return self.stack, 2 + (self.quantity == "update")
        return self.stack, int(self.of_heads or self.quantity == "dead")


def heat_maps(history: History) -> list[ComponentHeatMap]:
    """Return the maps of a run in the order of its numbers; updates are relative to the weights."""
    rows: dict[tuple[str, str, str, bool], dict[Row, Mapping[int, float]]] = {}
    for name, points in history.curves.items():
        match = _NAME.fullmatch(name)
        if match is None or match[1] not in _TITLES:
            continue
        values = dict(points)
        if match[1] == "update":
            weights = dict(history.curves.get(f"weight/{name.partition(SEPARATOR)[2]}", ()))
            values = {step: value / weights[step] for step, value in values.items() if weights.get(step)}
        if not values:
            continue
        head = None if match[5] is None else int(match[5])
        key = (match[1], match[2], match[4], head is not None)
        rows.setdefault(key, {})[int(match[3]), head] = values
    maps = [ComponentHeatMap(*key[:3], by_row) for key, by_row in rows.items()]
    sublayers = {heat_map.component.removesuffix(".out") for heat_map in maps if heat_map.quantity == "rms"}
    drawn = [m for m in maps if m.quantity not in ("gradient", "update") or m.component in sublayers]  # no norms
    order = list(_TITLES)
    return sorted(drawn, key=lambda m: (*m.line, order.index(m.quantity), m.component != "stream.out"))


def component_findings(maps: Sequence[ComponentHeatMap]) -> Iterator[str]:
    """Yield a sentence for each component whose last value is far from the median of its map."""
    for heat_map in maps:
        for (layer, head), row in heat_map.rows.items():
            value, step = heat_map.latest((layer, head)), max(row)
            name = f"{heat_map.stack}.layers.{layer}.{heat_map.component}" + ("" if head is None else f".heads.{head}")
            if heat_map.quantity == "dead" and value >= 1 - 1e-6:
                yield f"{name}: all hidden units are dead at step {step:,}"
            elif heat_map.quantity == "rms" and abs(heat_map.level(value)) == LEVELS:
                words = "silent" if value < heat_map.middle else "exploding"
                middle = f"the median of its map is {heat_map.middle:.3g}"
                yield f"{name}: {words}: RMS {value:.3g} at step {step:,}; {middle}"


def component_contents(history: History) -> Iterator[PageContent]:
    """Yield the picture of a run's components, its legend, and the findings; nothing if the run did not log them."""
    maps = heat_maps(history)
    if not maps:
        return
    yield _draw_maps(maps)
    low = ("low", f"below the median of the map; darkest at 1/{OUTLIER_RATIO:g} and at 0")
    high = ("high", f"above the median; darkest at {OUTLIER_RATIO:g} times")
    yield legend([low, high, ("part", "dead units; entropy in relation to the largest")])
    sentences = list(component_findings(maps))
    yield bullets(sentences) if sentences else None
    yield remark(
        "Rows are layers, the first layer at the top; in maps of heads each layer has a row for each head. "
        "Columns are steps."
    )


def _draw_maps(maps: Sequence[ComponentHeatMap]) -> Element:
    """Draw all maps, at most three next to each other."""
    lines: list[tuple[float, float, Sequence[ComponentHeatMap]]] = []
    top = 0.0
    for _, group in groupby(maps, lambda m: m.line):
        group_maps: Sequence[ComponentHeatMap] = list(group)
        for line in (group_maps[start : start + COLUMNS] for start in range(0, len(group_maps), COLUMNS)):
            height = min(max(MIN_HEIGHT, ROW * max(len(m.rows) for m in line)), MAX_HEIGHT)
            lines.append((top + TOP, height, line))
            top += TOP + height + GAP
    chart = canvas(top, "heat maps of all components over layers and steps")
    width = CHART_WIDTH / COLUMNS
    for y, height, line in lines:
        for column, heat_map in enumerate(line):
            _draw_map(chart, heat_map, column * width, y, width - 16, height)
    return chart


def _draw_map(chart: Element, heat_map: ComponentHeatMap, x: float, y: float, width: float, height: float) -> None:
    steps = sorted({step for row in heat_map.rows.values() for step in row})
    steps = steps[:: -1 - (len(steps) - 1) // MAX_COLUMNS][::-1]  # the last step is always drawn
    left, rows = 26.0, sorted(heat_map.rows, key=lambda row: (row[0], row[1] or 0))
    chart.append(tag("text", heat_map.title, x=x + left, y=y - 6, class_="title"))
    box = {"x": x + left, "y": y, "width": width - left, "height": height}
    levels = [
        [heat_map.level(values[step]) if step in values else 0 for step in steps]
        for values in (heat_map.rows[row] for row in rows)
    ]
    chart.extend(draw_cells(levels, box, high="high" if heat_map.relative else "part"))
    layers = sorted({layer for layer, _ in rows})
    stride = -(-len(layers) // max(1, int(height // 12)))
    for layer in layers[::stride]:
        indices = [index for index, row in enumerate(rows) if row[0] == layer]
        middle = y + height * (fmean(indices) + 0.5) / len(rows)
        chart.append(tag("text", f"{layer}", x=x + left - 5, y=middle + 3.5, class_="end small"))
    if heat_map.of_heads:
        for index in (i for i in range(1, len(rows)) if rows[i][0] != rows[i - 1][0]):
            edge = y + height * index / len(rows)
            chart.append(tag("line", x1=x + left - 4, x2=x + width, y1=edge, y2=edge, class_="grid"))
    for text, location, anchor in ((f"step {steps[0]:,}", x + left, "start"), (f"{steps[-1]:,}", x + width, "end")):
        chart.append(tag("text", text, x=location, y=y + height + 12, class_=f"{anchor} small"))


def component_table(history: History) -> tuple[list[str], list[list[str]]]:
    """Return the columns and the rows of a table of the last numbers, with a row for each layer.

    The values of a layer are the minimum RMS and mean entropy of its heads, and the maximum gradient and update of its
    sublayers.
    """
    cells: dict[str, dict[str, list[float]]] = {}
    maps = heat_maps(history)
    several = len({heat_map.stack for heat_map in maps}) > 1
    for heat_map in maps:
        for layer, head in heat_map.rows:
            row = cells.setdefault(f"{heat_map.stack} {layer}" if several else f"{layer}", {})
            row.setdefault(_column_name(heat_map), []).append(heat_map.latest((layer, head)))
    columns = list(dict.fromkeys(_column_name(heat_map) for heat_map in maps))
    combine: dict[str, Callable[[list[float]], float]] = {HEAD_ENTROPY: min, "entropy": fmean}
    rows = [
        [name, *(f"{combine.get(column, max)(row[column]):.2g}" if column in row else "-" for column in columns)]
        for name, row in cells.items()
    ]
    return ["layer", *columns], rows


def _column_name(heat_map: ComponentHeatMap) -> str:
    if heat_map.quantity == "rms":
        return HEAD_ENTROPY if heat_map.of_heads else heat_map.component.removesuffix(".out")
    return heat_map.quantity


def without_components(names: Collection[str]) -> list[str]:
    """Return the names of the numbers that do not belong to a component."""
    return [name for name in names if SEPARATOR not in name]
