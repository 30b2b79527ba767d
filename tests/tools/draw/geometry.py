"""Reads the geometry of a picture: overlapping shapes, and the ends of lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from tfkit.tools.draw.canvas import Disc, Point, Rect, ShapeGroup, Way, Words
from tfkit.tools.draw.svg import Picture

Bounds = tuple[float, float, float, float]
EPS = 0.01


def bounds(rect: Rect) -> Bounds:
    """Left, top, right and bottom."""
    return rect.x, rect.y, rect.x + rect.width, rect.y + rect.height


def overlap(a: Bounds, b: Bounds, slack: float = 0.0) -> bool:
    """Whether two rectangles share more than `slack` in both directions."""
    return min(a[2], b[2]) - max(a[0], b[0]) > slack and min(a[3], b[3]) - max(a[1], b[1]) > slack


def within(a: Bounds, b: Bounds) -> bool:
    """Whether rectangle a lies inside b."""
    return a[0] >= b[0] and a[1] >= b[1] and a[2] <= b[2] and a[3] <= b[3]


def boxes(picture: Picture) -> dict[str, Bounds]:
    """The rectangle of each box, by its key."""
    return {group.key: _outer(group) for group in picture.shapes if isinstance(group, ShapeGroup)}


def _outer(group: ShapeGroup) -> Bounds:
    """The rectangle of a box; two models next to each other have boxes of the same key."""
    rects = [value for value in group.shapes if isinstance(value, Rect) and value.look.startswith("box r-")]
    return bounds(rects[-1])


def faults(picture: Picture) -> Iterator[str]:
    """Everything that should not be: texts over each other, over an edge or a line, boxes over boxes."""
    words = [shape for shape in picture.flat() if isinstance(shape, Words)]
    page = (picture.x, picture.y, picture.x + picture.width, picture.y + picture.height)
    for number, first in enumerate(words):
        text = "".join(run.text for run in first.line)
        if not within(first.box(), page):
            yield f"`{text}` leaves the page"
        yield from (f"`{text}` and {other.line}" for other in words[:number] if overlap(first.box(), other.box()))
    rects = [shape for shape in picture.flat() if isinstance(shape, Rect)]
    if any(not within(bounds(rect), page) for rect in rects):
        yield "a box leaves the page"
    yield from _texts_out_of_boxes(words, [rect for rect in rects if not rect.look.startswith("cell")])
    yield from _crossings(picture, words)
    yield from _uneven_rows(picture)


def _uneven_rows(picture: Picture) -> Iterator[str]:
    """Rows of inner boxes with different margins on the left and on the right."""
    for group in (shape for shape in picture.shapes if isinstance(shape, ShapeGroup)):
        outer = _outer(group)
        parts = [bounds(shape) for shape in group.shapes if isinstance(shape, Rect) and shape.look == "box part"]
        for top in {part[1] for part in parts}:
            row = [part for part in parts if part[1] == top]
            left, right = min(part[0] for part in row), max(part[2] for part in row)
            if abs((left - outer[0]) - (outer[2] - right)) > EPS:
                yield f"the inner boxes of {group.key} do not fill its width"


def _texts_out_of_boxes(words: list[Words], rects: list[Rect]) -> Iterator[str]:
    """Texts that begin in a rectangle and do not end there."""
    for word in words:
        box = word.box()
        middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        around = [rect for rect in rects if within((*middle, *middle), bounds(rect))]
        for rect in around:
            if not within(box, bounds(rect)):
                yield f"`{''.join(run.text for run in word.line)}` leaves its box"


def _crossings(picture: Picture, words: list[Words]) -> Iterator[str]:
    actual = boxes(picture)
    keys = list(actual)
    for number, key in enumerate(keys):
        yield from (f"{key} and {other}" for other in keys[:number] if overlap(actual[key], actual[other]))
    grouped = [value for shape in picture.shapes if isinstance(shape, ShapeGroup) for value in shape.shapes]
    bands = [bounds(shape) for shape in picture.flat() if isinstance(shape, Rect) and shape.look.startswith("band")]
    free = [value for value in words if value not in grouped and not any(within(value.box(), band) for band in bands)]
    for way in ways(picture):
        for a, b in pairwise(way.points):
            line = (min(a[0], b[0]) - 0.5, min(a[1], b[1]) - 0.5, max(a[0], b[0]) + 0.5, max(a[1], b[1]) + 0.5)
            yield from (f"a line goes through {value.line}" for value in free if overlap(line, value.box()))
            for key, box in actual.items():
                if overlap(line, box, 0.6) and "onto" not in key:
                    yield f"a line goes through {key}"


def ways(picture: Picture) -> list[Way]:
    """All lines."""
    return [shape for shape in picture.flat() if isinstance(shape, Way)]


@dataclass
class Reader:
    """Follows lines of a picture backwards, from a point to all that it comes from."""

    picture: Picture

    def __post_init__(self) -> None:
        self.titles = {shape.key: shape.title for shape in self.picture.shapes if isinstance(shape, ShapeGroup)}
        self.boxes = boxes(self.picture)
        self.ways = ways(self.picture)
        self.sums = [shape for shape in self.picture.flat() if isinstance(shape, Disc) and shape.look == "plus"]

    def value(self, point: Point) -> str:
        """What flows through a point, as the layers' programs write it; x is what comes from below."""
        for key, (left, top, right, bottom) in self.boxes.items():
            if _same(point, ((left + right) / 2, top)):
                return f"{_name(self.titles[key])}({self.value(((left + right) / 2, bottom))})"
        for disc in self.sums:
            if _same(point, (disc.x, disc.y - disc.radius)):
                side, below = (disc.x + disc.radius, disc.y), (disc.x, disc.y + disc.radius)
                return f"{self.value(side)} + {self.value(below)}"
        ending = [way for way in self.ways if _same(way.points[-1], point)]
        through = [way for way in self.ways if any(_on(point, *pair) for pair in pairwise(way.points))]
        sources = {way.points[0]: None for way in ending or through}
        return " + ".join(self.value(source) for source in sources) if sources else "x"


def _name(title: str) -> str:
    return (
        title.lower().removeprefix("causal ").replace("self-", "").replace("-", "_").replace("× learned ", "learned_")
    )


def _same(a: Point, b: Point) -> bool:
    return abs(a[0] - b[0]) < EPS and abs(a[1] - b[1]) < EPS


def _on(point: Point, a: Point, b: Point) -> bool:
    """Whether a point lies on a line between two others, and is neither."""
    if abs(a[0] - b[0]) < EPS:
        return abs(point[0] - a[0]) < EPS and min(a[1], b[1]) < point[1] - EPS and point[1] + EPS < max(a[1], b[1])
    return abs(point[1] - a[1]) < EPS and min(a[0], b[0]) < point[0] - EPS and point[0] + EPS < max(a[0], b[0])
