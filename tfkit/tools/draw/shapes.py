"""The elements of a picture after everything has its place: rectangles, texts and lines, in pixels, y downwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from tfkit.tools.draw.text import Line, Run, line_width

Differences = Mapping[str, frozenset[str]]
"""Differences from another picture: keys of notes, by the key of their box, for boxes that have any."""
Anchor = Literal["start", "middle", "end"]
Point = tuple[float, float]


@dataclass(frozen=True)
class Rect:
    """A rectangle with round corners; `look` names its classes."""

    x: float
    y: float
    width: float
    height: float
    radius: float
    look: str


@dataclass(frozen=True)
class Words:
    """A line of text; y is its baseline."""

    x: float
    y: float
    line: Line
    size: float
    look: str = ""
    anchor: Anchor = "start"

    def box(self) -> tuple[float, float, float, float]:
        """Return left, top, right and bottom of an area that contains the text."""
        width = line_width(self.line, self.size)
        left = self.x - {"start": 0.0, "middle": width / 2, "end": width}[self.anchor]
        return left, self.y - 0.8 * self.size, left + width, self.y + 0.22 * self.size


@dataclass(frozen=True)
class Way:
    """A line along points, straight or with round corners. `start` and `end` say what it connects."""

    points: tuple[Point, ...]
    look: str = "line"
    arrow: bool = False
    start: str = ""
    end: str = ""


@dataclass(frozen=True)
class Disc:
    """A small disc, where a line branches off; or, as `plus`, a circle where two are added."""

    x: float
    y: float
    radius: float
    look: Literal["dot", "plus"]
    key: str = ""


@dataclass(frozen=True)
class Group:
    """The shapes of one box, and its tip."""

    key: str
    title: str
    tip: tuple[tuple[str, str], ...]
    shapes: tuple[Shape, ...]


Shape = Rect | Words | Way | Disc | Group


@dataclass
class Canvas:
    """The shapes of one model in the order in which they cover each other: frames, lines, then boxes and texts.

    Attributes:
        differences: those to mark.
        anchors: the rectangles (left, top, right, bottom) of boxes that lines lead to, by the box's key.
    """

    differences: Differences = field(default_factory=dict)
    back: list[Shape] = field(default_factory=list)
    lines: list[Shape] = field(default_factory=list)
    front: list[Shape] = field(default_factory=list)
    anchors: dict[str, tuple[float, float, float, float]] = field(default_factory=dict)

    def differing(self, key: str) -> frozenset[str]:
        """Return the differences of a box."""
        return self.differences.get(key, frozenset())

    def text(self, x: float, y: float, text: str, size: float, look: str = "", anchor: Anchor = "start") -> None:
        """Draw a text in one weight, bold if `look` contains it."""
        self.front.append(Words(x, y, (Run(text, "bold" in look.split()),), size, look, anchor))

    def way(self, *points: Point, look: str = "line", arrow: bool = False, start: str = "", end: str = "") -> None:
        """Draw a line along points."""
        self.lines.append(Way(points, look, arrow, start, end))

    @contextmanager
    def group(self, key: str, title: str, tip: tuple[tuple[str, str], ...]) -> Iterator[None]:
        """Group the shapes that are drawn within."""
        outer, self.front = self.front, []
        yield
        outer.append(Group(key, title, tip, tuple(self.front)))
        self.front = outer
