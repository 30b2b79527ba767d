"""Wires from one node to another, beside the columns: memories, further inputs, tied tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tfkit.tools.draw.scene import Scene, WireKind
from tfkit.tools.draw.shapes import Canvas, Disc, Point

EXIT = 10.0
"""From the top of a node to the point where a wire leaves the line to the next one."""
GUTTER, TRACK = 14.0, 11.0
"""Space beside a column, and for each wire that runs there."""
CLEAR = 3.0
"""Between a wire and a box that it passes."""
ASIDE = 14.0
"""From the side of a box to a wire that comes from above."""


@dataclass(frozen=True)
class Route:
    """A wire from a node to a box of another one, or (`up`) to the bottom of that."""

    source: str
    target: str
    way: WireKind
    key: str


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

    def gutter(self, route: Route) -> int:
        """The gutter of a route: beside its target, on the side of its source; outside, within one column."""
        source, target = self.column[route.source], self.column[route.target]
        if source == target:
            return 0 if target == 0 else target + 1
        return target if source < target else target + 1

    def track(self, route: Route) -> float:
        """The next free place in the gutter of a route."""
        gutter = self.gutter(route)
        number = self.taken.get(gutter, 0)
        self.taken[gutter] = number + 1
        return self.gutters[gutter] + GUTTER + TRACK * number

    def leave(self, route: Route) -> tuple[Point, Point]:
        """The top of the source, and the point where a wire leaves the line above it."""
        x, top = self.centres[self.column[route.source]], self.tops[route.source]
        return (x, top), (x, top - EXIT)


def routes_of(scene: Scene) -> Iterator[Route]:
    """All wires that lead further than from a node to the one above it."""
    columns = {name: number for number, column in enumerate(scene.columns) for name in column}
    for wire in scene.wires:
        if wire.way == "tie":
            boxes = list(scene.nodes[wire.target].boxes())
            user = next((box.key for box in boxes if box.tied), boxes[-1].key)
            yield Route(_nearest(scene, wire.source, wire.target), wire.target, "tie", user)
        elif wire.way == "up":
            if columns[wire.source] != columns[wire.target]:
                yield Route(wire.source, wire.target, "up", "")
        else:
            boxes = list(scene.nodes[wire.target].boxes())
            crossed = [box.key for box in boxes if wire.way == "memory" and box.role == "cross_attention"]
            yield from (Route(wire.source, wire.target, wire.way, key) for key in crossed or [boxes[0].key])


def _nearest(scene: Scene, source: str, target: str) -> str:
    """A node below the target that uses the same table, if there is one in its column."""
    users = [wire.target for wire in scene.wires if wire.way == "tie" and wire.source == source]
    column = next(column for column in scene.columns if target in column)
    below = [name for name in column[: column.index(target)] if name in (source, *users)]
    return below[0] if below else source


def draw_route(canvas: Canvas, scene: Scene, route: Route, places: Places) -> None:
    """Put a wire on the canvas, after all nodes are on it."""
    if route.way == "tie":
        _tie(canvas, scene, route, places)
        return
    top, leave = places.leave(route)
    column = scene.columns[places.column[route.source]]
    if column[-1] != route.source or route.source in scene.outputs:
        canvas.lines.append(Disc(*leave, 2.5, "dot"))
    if route.way == "up":
        x, y = places.centres[places.column[route.target]], places.bottoms[route.target]
        points = [*_across(canvas, places, route, leave, x), (x, y)]
    else:
        x = places.track(route)
        points = [*_across(canvas, places, route, leave, x), *_enter(canvas, route.key, x)]
    look = "line" if route.way == "up" else f"line {route.way}"
    canvas.way(top, *points, look=look, arrow=True, start=route.source, end=route.key or route.target)


def _across(canvas: Canvas, places: Places, route: Route, leave: Point, x: float) -> list[Point]:
    """From the point where a wire leaves to that height at `x`, or to another one if boxes are in its way."""
    if _free(canvas, leave[1], leave[0], x):
        return [leave, (x, leave[1])]
    column = places.column[route.source]
    aside = places.gutters[column + 1] + 6 if x > leave[0] else places.gutters[column] + 6
    levels = (leave[1] + step * sign for step in range(1, 400) for sign in (-1, 1))
    level = next((y for y in levels if _free(canvas, y, aside, x)), leave[1])
    return [leave, (aside, leave[1]), (aside, level), (x, level)]


def _enter(canvas: Canvas, key: str, x: float) -> list[Point]:
    """Into the side of a box; from above if others are beside it."""
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
    """True if a box is somewhere between two x."""
    return box[0] < max(start, end) - 1 and box[2] > min(start, end) + 1


def _tie(canvas: Canvas, scene: Scene, route: Route, places: Places) -> None:
    table = next(scene.nodes[route.source].boxes()).key
    x = places.track(route)
    ends = []
    for key in (table, route.key):
        left, top, right, bottom = canvas.anchors[key]
        ends.append((left if x < left else right, (top + bottom) / 2))
    canvas.way(ends[0], (x, ends[0][1]), (x, ends[1][1]), ends[1], look="line tie", start=table, end=route.key)
