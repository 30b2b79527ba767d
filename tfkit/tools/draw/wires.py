"""Wires between nodes, outside the columns: memories, further inputs, tied tables."""

from __future__ import annotations

from dataclasses import dataclass, field

from tfkit.tools.draw.scene import Scene, Wire
from tfkit.tools.draw.shapes import Canvas, Disc, Point

EXIT = 10.0
"""From the top of a node to the point where a wire leaves the line to the next one."""
GUTTER, TRACK = 14.0, 11.0
"""Space next to a column, and for each wire that runs there."""
CLEAR = 3.0
"""Between a wire and a box that it passes."""
ASIDE = 14.0
"""From the side of a box to a wire that comes from above."""


@dataclass
class Places:
    """The places of things: the line of each column, bottoms and tops of nodes, and the tracks taken in gutters.

    Attributes:
        column: the number of a node's column.
        centres: the x of the line of each column.
        gutters: where the space before each column begins, and the one after the last.
    """

    column: dict[str, int]
    centres: list[float] = field(default_factory=list)
    gutters: list[float] = field(default_factory=list)
    bottoms: dict[str, float] = field(default_factory=dict)
    tops: dict[str, float] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)

    def gutter(self, wire: Wire) -> int:
        """Return the gutter of a wire: next to its target, on the side of its source; outside, within one column."""
        source, target = self.column[wire.source], self.column[wire.target]
        if source == target:
            return 0 if target == 0 else target + 1
        return target if source < target else target + 1

    def track(self, wire: Wire) -> float:
        """Return the next free track in the gutter of a wire."""
        gutter = self.gutter(wire)
        number = self.taken.get(gutter, 0)
        self.taken[gutter] = number + 1
        return self.gutters[gutter] + GUTTER + TRACK * number

    def leave(self, wire: Wire) -> tuple[Point, Point]:
        """Return the top of the source, and the point where a wire leaves the line above it."""
        x, top = self.centres[self.column[wire.source]], self.tops[wire.source]
        return (x, top), (x, top - EXIT)


def draw_wire(canvas: Canvas, scene: Scene, wire: Wire, places: Places) -> None:
    """Put a wire on the canvas, after all nodes are on it."""
    if wire.way == "tie":
        _tie(canvas, scene, wire, places)
        return
    top, leave = places.leave(wire)
    column = scene.columns[places.column[wire.source]]
    if column[-1] != wire.source or wire.source in scene.outputs:
        canvas.lines.append(Disc(*leave, 2.5, "dot"))
    if wire.way == "up":
        x, y = places.centres[places.column[wire.target]], places.bottoms[wire.target]
        points = [*_across(canvas, places, wire, leave, x), (x, y)]
    else:
        x = places.track(wire)
        points = [*_across(canvas, places, wire, leave, x), *_enter(canvas, wire.key, x)]
    look = "line" if wire.way == "up" else f"line {wire.way}"
    canvas.way(top, *points, look=look, arrow=True, start=wire.source, end=wire.key or wire.target)


def _across(canvas: Canvas, places: Places, wire: Wire, leave: Point, x: float) -> list[Point]:
    """Route from the point where a wire leaves to `x`, at a different height if boxes are in the way."""
    if _free(canvas, leave[1], leave[0], x):
        return [leave, (x, leave[1])]
    column = places.column[wire.source]
    aside = places.gutters[column + 1] + 6 if x > leave[0] else places.gutters[column] + 6
    levels = (leave[1] + step * sign for step in range(1, 400) for sign in (-1, 1))
    level = next((y for y in levels if _free(canvas, y, aside, x)), leave[1])
    return [leave, (aside, leave[1]), (aside, level), (x, level)]


def _enter(canvas: Canvas, key: str, x: float) -> list[Point]:
    """Route into the side of a box, or from above if it has neighbours."""
    left, top, right, bottom = canvas.anchors[key]
    middle, end = (top + bottom) / 2, left if x < left else right
    between = [box for box in canvas.anchors.values() if box[1] < middle < box[3] and _spans(box, x, end)]
    if not between:
        return [(x, middle), (end, middle)]
    over, inside = min(top, *(box[1] for box in between)) - 6, left + ASIDE if x < left else right - ASIDE
    return [(x, over), (inside, over), (inside, top)]


def _free(canvas: Canvas, y: float, start: float, end: float) -> bool:
    boxes = canvas.anchors.values()
    return not any(box[1] - CLEAR < y < box[3] + CLEAR and _spans(box, start, end) for box in boxes)


def _spans(box: tuple[float, float, float, float], start: float, end: float) -> bool:
    """Return True if a box overlaps the range between two x."""
    return box[0] < max(start, end) - 1 and box[2] > min(start, end) + 1


def _tie(canvas: Canvas, scene: Scene, wire: Wire, places: Places) -> None:
    table = next(scene.nodes[wire.source].boxes()).key
    x = places.track(wire)
    ends = []
    for key in (table, wire.key):
        left, top, right, bottom = canvas.anchors[key]
        ends.append((left if x < left else right, (top + bottom) / 2))
    canvas.way(ends[0], (x, ends[0][1]), (x, ends[1][1]), ends[1], look="line tie", start=table, end=wire.key)
