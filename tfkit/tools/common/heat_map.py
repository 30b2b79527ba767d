"""Heat maps: cells in shades of two colours, in a chart of a page or as a separate picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from xml.etree.ElementTree import Element, tostring

from tfkit.tools.common.pages import CHART_WIDTH, tag

LEVELS = 8
"""The number of shades of a colour."""
STYLE = """
.map { stroke-width: 1; fill: none; shape-rendering: crispEdges; }
.low { stroke: #2f6fd0; } .high { stroke: #d6392b; } .part { stroke: #8a4fc4; }
.ground { fill: var(--track); }
"""
PICTURE_STYLE = """
text { font: 10px system-ui, sans-serif; fill: #666c73; } .end { text-anchor: end; }
.page { fill: #ffffff; } .ground { fill: #efefec; } .title { fill: #1d2024; font-weight: 600; }
@media (prefers-color-scheme: dark) {
  text { fill: #9aa0a7; } .page { fill: #1a1c1f; } .ground { fill: #25282c; } .title { fill: #e7e7e4; }
}
"""
"""Colours are written out: not all programs that draw an SVG support variables."""
CHARACTER, LINE, GAP, TOP = 5.6, 11.0, 16.0, 20.0
"""The width of a character, the height of a line, the space between maps, and the space above a map."""
MAX_LABEL = 40
"""Maximum number of characters of a label."""


@dataclass(frozen=True)
class HeatMap:
    """Values in rows, with labels."""

    title: str
    values: Sequence[Sequence[float]]
    rows: Sequence[str]
    columns: Sequence[str]


def heat_map_picture(
    title: str, maps: Sequence[HeatMap], *, per_line: int, square: bool, maximum: float | None = None
) -> str:
    """Draw maps as an SVG document, which supports light and dark mode.

    Colours are relative to `maximum`, by default the largest magnitude of all maps. Cells are squares, or as high as a
    label.
    """
    largest = maximum or max(abs(value) for heat_map in maps for row in heat_map.values for value in row) or 1.0
    left = CHARACTER * max(min(len(label), MAX_LABEL) for heat_map in maps for label in heat_map.rows) + 8
    below = CHARACTER * max(min(len(label), MAX_LABEL) for heat_map in maps for label in heat_map.columns) + 8
    width = (CHART_WIDTH - GAP) / per_line - GAP - left
    elements, top = list[Element](), TOP
    for start in range(0, len(maps), per_line):
        line = maps[start : start + per_line]
        heights = [
            width * len(heat_map.rows) / len(heat_map.columns) if square else LINE * len(heat_map.rows)
            for heat_map in line
        ]
        for index, (heat_map, height) in enumerate(zip(line, heights, strict=True)):
            box = {"x": GAP + index * (left + width + GAP) + left, "y": top, "width": width, "height": height}
            elements += _heat_map_labels(heat_map, box)
            levels = [[round(max(-1, min(1, value / largest)) * LEVELS) for value in row] for row in heat_map.values]
            elements += draw_cells(levels, box)
        top += max(heights) + below + TOP
    size = {"width": CHART_WIDTH, "height": top}
    ground = tag("rect", **size, class_="page")
    about = (tag("title", title), tag("style", STYLE + PICTURE_STYLE), ground)
    view = f"0 0 {CHART_WIDTH:g} {top:.0f}"
    root = tag("svg", *about, *elements, xmlns="http://www.w3.org/2000/svg", viewBox=view, **size, role="img")
    return tostring(root, encoding="unicode") + "\n"


def _heat_map_labels(heat_map: HeatMap, box: Mapping[str, float]) -> Iterator[Element]:
    """Draw the title of a map, labels at the left, and vertical labels below. Labels that do not fit are omitted."""
    x, y, width, height = box.values()
    yield tag("text", heat_map.title, x=x, y=y - 6, class_="title")
    step = height / len(heat_map.rows)
    for index in range(0, len(heat_map.rows), _label_stride(step)):
        label = heat_map.rows[index][:MAX_LABEL]
        yield tag("text", label, x=x - 4, y=y + step * (index + 0.5) + 3.5, class_="end")
    step = width / len(heat_map.columns)
    for index in range(0, len(heat_map.columns), _label_stride(step)):
        location = f"translate({x + step * (index + 0.5) - 3.5:.1f} {y + height + 4:.1f}) rotate(90)"
        yield tag("text", heat_map.columns[index][:MAX_LABEL], transform=location)


def _label_stride(step: float) -> int:
    return -int(-LINE // step)


def draw_cells(rows: Sequence[Sequence[int]], box: Mapping[str, float], *, high: str = "high") -> Iterator[Element]:
    """Draw rows of cells over a box: x, y, width and height.

    The level of a cell is its shade, from -`LEVELS` (colour `low`) to `LEVELS` (colour `high`). 0 has no colour.
    """
    yield tag("rect", **box, class_="ground")
    inside = tag("svg", **box, viewBox=f"0 0 {max(map(len, rows))} {len(rows)}", preserveAspectRatio="none")
    for level, path in _level_paths(rows).items():
        colour = "low" if level < 0 else high
        inside.append(tag("path", d=path, class_=f"map {colour}", stroke_opacity=abs(level) / LEVELS))
    yield inside


def _level_paths(rows: Sequence[Sequence[int]]) -> dict[int, str]:
    """Return a path for each shade. Equal neighbours in a row form a single line."""
    paths: dict[int, str] = {}
    for index, levels in enumerate(rows):
        start = 0
        for level, group in groupby(levels):
            count = len([*group])
            if level:
                paths[level] = paths.get(level, "") + f"M{start} {index}.5h{count}"
            start += count
    return paths
