"""The roofline of a profile: the speed of each component against the limits of its device.

Williams, Waterman and Patterson, https://doi.org/10.1145/1498765.1498785.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from tfkit.tools.common.page import Child, remark, tag
from tfkit.tools.profile.report.bars import colour
from tfkit.tools.profile.report.numbers import amount_text, decade_text, share_text
from tfkit.tools.profile.result import Limits, Profile, rows

WIDTH, HEIGHT = 960, 440
LEFT, RIGHT, TOP, BOTTOM = 84, 20, 16, 48
SMALLEST, LARGEST = 4.0, 26.0
"""Radii of the points in pixels: a point of the largest has the area of a whole step."""
LETTER, LINE = 7.2, 15.0
"""Approximate width of a letter and height of a line of a label."""

STEPS = 80
"""Number of boxes that keep labels away from the slope of the roof."""
ROOM = 0.4
"""Powers of ten around the values."""
SIDES = ((0, 1), (0, -1), (-1, 1), (1, 1), (-1, -1), (1, -1), (2, 1), (-2, 1), (2, -1), (-2, -1), (3, 1), (-3, 1))
"""Possible places of a label: lines below the point, and to its right or its left."""

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Point:
    """A component of one profile: FLOPs per byte, FLOP/s, and its share of the step."""

    component: str
    label: str
    series: int
    intensity: float
    rate: float
    share: float
    hint: str


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis: 10^low to 10^high are from pixel `start` to pixel `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        return self.start + (math.log10(value) - self.low) / (self.high - self.low) * (self.end - self.start)


def roofline(profiles: Sequence[Profile]) -> list[Child]:
    """One picture for all profiles; a sentence if the FLOPs of their models are not known."""
    limits = list(dict.fromkeys(one.limits for one in profiles))
    points = [point for index, one in enumerate(profiles) for point in _points(index, one)]
    if not points:
        return [remark("There is no roofline: the work of this model was not counted.")]
    words = "Further right: more work for each byte. Higher: faster. On the line: as fast as the device can be."
    size = "The area of a point is its share of the step"
    rings = f"; filled is {profiles[0].name}, hollow is {profiles[1].name}" if len(profiles) > 1 else ""
    said = f"{words} {size}{rings}."
    if any(row.floor and row.time < row.floor for one in profiles for row in rows(one)):
        said += " A component above its limit had more of the device than the measurement of the limit."
    return [_picture(points, limits), remark(said)]


def _points(series: int, profile: Profile) -> list[Point]:
    made = []
    for row in rows(profile):
        if not row.flops or not row.bytes or not row.flops_per_second:
            continue
        rate, intensity = row.flops_per_second, row.flops / row.bytes
        hint = f"{profile.name}, {row.label}: {amount_text(rate, 'FLOP/s')} at {amount_text(intensity, 'FLOP')} a byte"
        hint += f", {share_text(row.floor, row.time)} of the device's limit" if row.floor else ""
        made.append(Point(row.component, row.label, series, intensity, rate, row.time / profile.step, hint))
    return made


def _picture(points: Sequence[Point], limits: Sequence[Limits]) -> Element:
    ridges = [one.flops / one.bandwidth for one in limits]
    across = _axis([*(point.intensity for point in points), *ridges], LEFT, WIDTH - RIGHT)
    up = _axis([*(point.rate for point in points), *(one.flops for one in limits)], HEIGHT - BOTTOM, TOP)
    box = f"0 0 {WIDTH} {HEIGHT}"
    picture = tag("svg", viewBox=box, class_="roofline", role="img", aria_label="roofline of the components")
    picture.extend(_grid(across, up))
    taken: list[Box] = []
    for one in limits:
        picture.extend(_roof(one, across, up, taken))
    ordered = sorted(points, key=lambda point: -point.share)
    taken += [_around(across(point.intensity), up(point.rate), _radius(point)) for point in ordered]
    picture.extend(_dot(point, across(point.intensity), up(point.rate)) for point in ordered)
    picture.extend(_label(point, across(point.intensity), up(point.rate), taken) for point in ordered)
    return picture


def _axis(values: Sequence[float], start: float, end: float) -> Axis:
    """The axis from the least to the greatest value, with some room around them."""
    return Axis(math.log10(min(values)) - ROOM, math.log10(max(values)) + ROOM, start, end)


def _decades(axis: Axis) -> list[int]:
    return list(range(math.ceil(axis.low), math.floor(axis.high) + 1))


def _grid(across: Axis, up: Axis) -> list[Element]:
    made = []
    for power in _decades(across):
        x = across(10.0**power)
        made.append(tag("line", x1=x, x2=x, y1=up.start, y2=up.end, class_="grid"))
        made.append(tag("text", decade_text(power), x=x, y=up.start + 18, class_="tick middle"))
    for power in _decades(up):
        y = up(10.0**power)
        made.append(tag("line", x1=across.start, x2=across.end, y1=y, y2=y, class_="grid"))
        made.append(tag("text", decade_text(power), x=across.start - 8, y=y + 4, class_="tick end"))
    middle = (across.start + across.end) / 2
    made.append(tag("text", "FLOPs per byte", x=middle, y=HEIGHT - 8, class_="axis middle"))
    y = (up.start + up.end) / 2
    made.append(tag("text", "FLOP/s", x=16, y=y, transform=f"rotate(-90 16 {y:.0f})", class_="axis middle"))
    return made


def _roof(limits: Limits, across: Axis, up: Axis, taken: list[Box]) -> list[Element]:
    """The two limits: bytes per second on the left of the ridge, FLOP/s on its right."""
    ridge = limits.flops / limits.bandwidth
    first = max(10.0**across.low, 10.0**up.low / limits.bandwidth)
    corners = [(first, first * limits.bandwidth), (ridge, limits.flops), (10.0**across.high, limits.flops)]
    line = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in corners)
    top = up(limits.flops)
    text = f"{amount_text(limits.flops, 'FLOP/s')}, {amount_text(limits.bandwidth, 'B/s')}"
    taken.append((across.end - len(text) * LETTER, top - LINE - 6, across.end, top + 2))
    for step in range(STEPS):  # no label may be on the slope
        x = first * (ridge / first) ** (step / STEPS)
        taken.append(_around(across(x), up(x * limits.bandwidth), 3))
    return [
        tag("polyline", tag("title", f"{limits.name}: {text} ({limits.source})"), points=line, class_="roof"),
        tag("line", x1=across(ridge), x2=across(ridge), y1=top, y2=up.start, class_="ridge"),
        tag("text", text, x=across.end - 4, y=top - 7, class_="tick end"),
    ]


def _radius(point: Point) -> float:
    return max(SMALLEST, LARGEST * math.sqrt(min(1.0, point.share)))


def _dot(point: Point, x: float, y: float) -> Element:
    shape = "point hollow" if point.series else "point"
    kind = f"{shape} {colour(point.component)}"
    return tag("circle", tag("title", point.hint), cx=x, cy=y, r=_radius(point), class_=kind)


def _label(point: Point, x: float, y: float, taken: list[Box]) -> Element:
    """The name of a point in a free place, with a line to the point if it is not beside it."""
    width, away = len(point.label) * LETTER, _radius(point) + 6
    places = []
    for lines, side in SIDES:
        left = x + away + 6 * abs(lines) if side > 0 else x - away - 6 * abs(lines) - width
        places.append((left, y + 4 + lines * LINE))
    boxes = [(left, base - LINE + 3, left + width, base + 3) for left, base in places]
    free = [index for index, box in enumerate(boxes) if _inside(box) and not any(_overlap(box, one) for one in taken)]
    place = free[0] if free else 0
    taken.append(boxes[place])
    left, base = places[place]
    text = tag("text", point.label, x=left, y=base, class_="label")
    if not SIDES[place][0]:
        return text
    end = left - 2 if left > x else left + width + 2
    return tag("g", tag("line", x1=x, y1=y, x2=end, y2=base - 4, class_="leader"), text)


def _around(x: float, y: float, radius: float) -> Box:
    return x - radius, y - radius, x + radius, y + radius


def _inside(box: Box) -> bool:
    return box[0] >= LEFT and box[2] <= WIDTH - RIGHT and box[1] >= TOP and box[3] <= HEIGHT - BOTTOM


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
