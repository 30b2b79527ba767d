"""A picture as SVG: text stays text, no font, file or script is requested, and both colour schemes are included."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.etree import ElementTree as ET

from tfkit.tools.common.page import tag
from tfkit.tools.draw.shapes import Group, Point, Rect, Shape, Way, Words
from tfkit.tools.draw.style import Theme, css

ROUND = 6.0
"""Radius of the corners of a line."""
TIP = 6.0
"""Length of the tip of an arrow."""
SVG = "http://www.w3.org/2000/svg"


@dataclass(frozen=True)
class Picture:
    """A drawing from (x, y) on; `title` and `description` describe it in words."""

    x: float
    y: float
    width: float
    height: float
    shapes: tuple[Shape, ...] = field(repr=False)
    title: str
    description: str

    def flat(self) -> Iterator[Shape]:
        """Yield all shapes, including those inside groups."""
        pending = list(reversed(self.shapes))
        while pending:
            shape = pending.pop()
            if isinstance(shape, Group):
                pending += reversed(shape.shapes)
            else:
                yield shape

    def _repr_svg_(self) -> str:
        """Return the SVG that a notebook shows."""
        return to_svg(self)


def to_svg(picture: Picture, theme: Theme = "auto", *, tips: bool = False) -> str:
    """Render an SVG document; with `tips`, each box carries its tip in its attributes."""
    width, height = _number(math.ceil(picture.width)), _number(math.ceil(picture.height))
    box = f"{_number(picture.x)} {_number(picture.y)} {width} {height}"
    used = {name for shape in picture.flat() for name in getattr(shape, "look", "").split()}
    about = (tag("title", picture.title), tag("desc", picture.description), tag("style", css(theme, used)))
    shapes = [element for shape in picture.shapes for element in _elements(shape, tips=tips)]
    root = tag("svg", *about, *shapes, xmlns=SVG, viewBox=box, width=width, height=height, role="img")
    return ET.tostring(root, encoding="unicode") + "\n"


def inline(picture: Picture) -> ET.Element:
    """Return the picture as an element of a page."""
    return ET.fromstring(to_svg(picture).replace(f' xmlns="{SVG}"', "", 1))


def _elements(shape: Shape, *, tips: bool) -> Iterator[ET.Element]:
    if isinstance(shape, Group):
        inside = [element for part in shape.shapes for element in _elements(part, tips=tips)]
        if tips and shape.tip:
            tip = "\n".join(f"{name}\t{value}" for name, value in shape.tip)
            yield tag("g", *inside, class_="tipped", tabindex=0, data_title=shape.title, data_tip=tip)
        else:
            yield from inside
    elif isinstance(shape, Rect):
        size = {"x": shape.x, "y": shape.y, "width": shape.width, "height": shape.height, "rx": shape.radius}
        yield tag("rect", **{key: _number(value) for key, value in size.items()}, class_=shape.look)
    elif isinstance(shape, Words):
        yield _text(shape)
    elif isinstance(shape, Way):
        yield tag("path", d=_path(shape.points), class_=shape.look)
        if shape.arrow:
            look = shape.look.replace("line", "tip").replace(" residual", "")
            yield tag("path", d=_tip(*shape.points[-2:]), class_=look)
    else:
        x, y, r = shape.x, shape.y, shape.radius
        yield tag("circle", cx=_number(x), cy=_number(y), r=_number(r), class_=shape.look)
        if shape.look == "plus":
            arm = r - 3
            cross = f"M{_pair((x - arm, y))}h{_number(2 * arm)}M{_pair((x, y - arm))}v{_number(2 * arm)}"
            yield tag("path", d=cross, class_="line")


def _text(words: Words) -> ET.Element:
    """Render a line of text. Bold runs get the accent colour, unless the entire line is bold."""
    attributes = {"x": _number(words.x), "y": _number(words.y), "font_size": _number(words.size)}
    if words.anchor != "start":
        attributes["text_anchor"] = words.anchor
    bold = all(run.bold for run in words.line)
    look = words.look
    if bold and "bold" not in look.split():
        look = f"{look} bold accent".strip().replace("muted", "")
    if look:
        attributes["class"] = look
    parts = [tag("tspan", run.text, class_="bold accent") if run.bold and not bold else run.text for run in words.line]
    return tag("text", *parts, **attributes)


def _path(points: tuple[Point, ...]) -> str:
    """Render a line along points, with rounded corners."""
    parts = [f"M{_pair(points[0])}"]
    for before, corner, behind in zip(points, points[1:], points[2:], strict=False):
        radius = min(ROUND, math.dist(before, corner) / 2, math.dist(corner, behind) / 2)
        turn, on = _towards(corner, before, radius), _towards(corner, behind, radius)
        parts.append(f"L{_pair(turn)}Q{_pair(corner)} {_pair(on)}")
    return "".join([*parts, f"L{_pair(points[-1])}"])


def _tip(before: Point, end: Point) -> str:
    """Render a triangle at the end of a line."""
    base = _towards(end, before, TIP)
    across = ((base[1] - end[1]) * 0.5, (end[0] - base[0]) * 0.5)
    corners = (end, (base[0] + across[0], base[1] + across[1]), (base[0] - across[0], base[1] - across[1]))
    return f"M{'L'.join(map(_pair, corners))}Z"


def _towards(start: Point, goal: Point, length: float) -> Point:
    whole = math.dist(start, goal) or 1.0
    return start[0] + (goal[0] - start[0]) * length / whole, start[1] + (goal[1] - start[1]) * length / whole


def _pair(point: Point) -> str:
    return f"{_number(point[0])} {_number(point[1])}"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0") if value else "0"
