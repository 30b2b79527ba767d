"""The roofline of a profile: the speed of each component against the limits of its device.

Williams, Waterman and Patterson, https://doi.org/10.1145/1498765.1498785.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from tfkit.tools.common.pages import AxisScale, Child, remark, tag
from tfkit.tools.profile.report.bars import amount_text, colour, decade_text, share_text
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
    """A component of one profile: FLOPs per byte and FLOP/s, both as powers of ten, and its share of the step."""

    component: str
    label: str
    series: int
    intensity: float
    rate: float
    share: float
    hint: str

    @property
    def radius(self) -> float:
        """In pixels."""
        return max(SMALLEST, LARGEST * math.sqrt(min(1.0, self.share)))


def roofline(profiles: Sequence[Profile]) -> list[Child]:
    """Draw one roofline for all profiles, or explain that the models' FLOPs are unknown."""
    limits = list(dict.fromkeys(profile.limits for profile in profiles))
    points = [point for index, profile in enumerate(profiles) for point in _points(index, profile)]
    if not points:
        return [remark("There is no roofline: the work of this model was not counted.")]
    words = "Further right: more work for each byte. Higher: faster. On the line: as fast as the device can be."
    size = "The area of a point is its share of the step"
    rings = f"; filled is {profiles[0].name}, hollow is {profiles[1].name}" if len(profiles) > 1 else ""
    caption = f"{words} {size}{rings}."
    if any(row.floor and row.time < row.floor for profile in profiles for row in rows(profile)):
        caption += " A component above its limit had more of the device than the measurement of the limit."
    return [_picture(points, limits), remark(caption)]


def _points(series: int, profile: Profile) -> Iterator[Point]:
    for row in rows(profile):
        if not row.flops or not row.bytes or not row.flops_per_second:
            continue
        rate, intensity = row.flops_per_second, row.flops / row.bytes
        hint = f"{profile.name}, {row.label}: {amount_text(rate, 'FLOP/s')} at {amount_text(intensity, 'FLOP')} a byte"
        hint += f", {share_text(row.floor, row.time)} of the device's limit" if row.floor else ""
        share = row.time / profile.step
        yield Point(row.component, row.label, series, math.log10(intensity), math.log10(rate), share, hint)


def _picture(points: Sequence[Point], limits: Sequence[Limits]) -> Element:
    ridges = [math.log10(limit.flops / limit.bandwidth) for limit in limits]
    across = _axis([*(point.intensity for point in points), *ridges], LEFT, WIDTH - RIGHT)
    up = _axis(
        [*(point.rate for point in points), *(math.log10(limit.flops) for limit in limits)], HEIGHT - BOTTOM, TOP
    )
    box = f"0 0 {WIDTH} {HEIGHT}"
    picture = tag("svg", viewBox=box, class_="roofline", role="img", aria_label="roofline of the components")
    picture.extend(_grid(across, up))
    taken: list[Box] = []
    for limit in limits:
        picture.extend(_roof(limit, across, up, taken))
    largest = sorted(points, key=lambda point: -point.share)
    places = [(point, across(point.intensity), up(point.rate)) for point in largest]
    taken += [_around(x, y, point.radius) for point, x, y in places]
    picture.extend(_dot(*place) for place in places)
    picture.extend(_label(*place, taken) for place in places)
    return picture


def _axis(powers: Sequence[float], start: float, end: float) -> AxisScale:
    """Return the axis of powers of ten from the minimum to the maximum, with a margin."""
    return AxisScale(min(powers) - ROOM, max(powers) + ROOM, start, end)


def _grid(across: AxisScale, up: AxisScale) -> Iterator[Element]:
    for power in range(math.ceil(across.low), math.floor(across.high) + 1):
        x = across(power)
        yield tag("line", x1=x, x2=x, y1=up.start, y2=up.end, class_="grid")
        yield tag("text", decade_text(power), x=x, y=up.start + 18, class_="tick middle")
    for power in range(math.ceil(up.low), math.floor(up.high) + 1):
        y = up(power)
        yield tag("line", x1=across.start, x2=across.end, y1=y, y2=y, class_="grid")
        yield tag("text", decade_text(power), x=across.start - 8, y=y + 4, class_="tick end")
    middle = (across.start + across.end) / 2
    yield tag("text", "FLOPs per byte", x=middle, y=HEIGHT - 8, class_="axis middle")
    y = (up.start + up.end) / 2
    yield tag("text", "FLOP/s", x=16, y=y, transform=f"rotate(-90 16 {y:.0f})", class_="axis middle")


def _roof(limits: Limits, across: AxisScale, up: AxisScale, taken: list[Box]) -> list[Element]:
    """Draw the two limits: bytes per second left of the ridge, FLOP/s right of it."""
    flops, bandwidth = math.log10(limits.flops), math.log10(limits.bandwidth)
    ridge, first = flops - bandwidth, max(across.low, up.low - bandwidth)
    corners = [(first, first + bandwidth), (ridge, flops), (across.high, flops)]
    line = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in corners)
    top = up(flops)
    text = f"{amount_text(limits.flops, 'FLOP/s')}, {amount_text(limits.bandwidth, 'B/s')}"
    taken.append((across.end - len(text) * LETTER, top - LINE - 6, across.end, top + 2))
    for step in range(STEPS):  # no label may be on the slope
        x = first + (ridge - first) * step / STEPS
        taken.append(_around(across(x), up(x + bandwidth), 3))
    return [
        tag("polyline", tag("title", f"{limits.name}: {text} ({limits.source})"), points=line, class_="roof"),
        tag("line", x1=across(ridge), x2=across(ridge), y1=top, y2=up.start, class_="ridge"),
        tag("text", text, x=across.end - 4, y=top - 7, class_="tick end"),
    ]


def _dot(point: Point, x: float, y: float) -> Element:
    look = f"point hollow {colour(point.component)}" if point.series else f"point {colour(point.component)}"
    return tag("circle", tag("title", point.hint), cx=x, cy=y, r=point.radius, class_=look)


def _label(point: Point, x: float, y: float, taken: list[Box]) -> Element:
    """Place the name of a point in a free area, with a line to the point if it is not adjacent."""
    width, places = len(point.label) * LETTER, []
    for lines, side in SIDES:
        away = point.radius + 6 + 6 * abs(lines)
        left, base = x + away if side > 0 else x - away - width, y + 4 + lines * LINE
        places.append((lines, (left, base - LINE + 3, left + width, base + 3)))
    lines, box = next((place for place in places if _is_free(place[1], taken)), places[0])
    taken.append(box)
    left, _, right, bottom = box
    text = tag("text", point.label, x=left, y=bottom - 3, class_="label")
    if not lines:
        return text
    end = left - 2 if left > x else right + 2
    return tag("g", tag("line", x1=x, y1=y, x2=end, y2=bottom - 7, class_="leader"), text)


def _around(x: float, y: float, radius: float) -> Box:
    return x - radius, y - radius, x + radius, y + radius


def _is_free(box: Box, taken: Sequence[Box]) -> bool:
    """Return True if a box is within the picture and overlaps no other box."""
    left, top, right, bottom = box
    if left < LEFT or right > WIDTH - RIGHT or top < TOP or bottom > HEIGHT - BOTTOM:
        return False
    return not any(left < box[2] and box[0] < right and top < box[3] and box[1] < bottom for box in taken)
