"""Pictures of the time of a step: by phase, by layer, and against the limits of the device.

The roofline: Williams, Waterman and Patterson, https://doi.org/10.1145/1498765.1498785.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from xml.etree.ElementTree import Element

from tfkit.tools.common.pages import ChartAxis, PageContent, remark, tag
from tfkit.tools.profile.bars import (
    BarSegment,
    amount_text,
    by_model,
    colour_legend,
    colour_of,
    decade_text,
    labelled_bar,
    optional_heading,
    ratio_text,
    share_text,
    time_text,
)
from tfkit.tools.profile.result import ComponentTime, Limits, Profile, labels_of, summed_rows

UPDATE = ("optimizer", "zero_grad")
"""Rows of a step outside the forward and backward passes."""
REMAINDER = "between the components"


def time_bars(profiles: Sequence[Profile]) -> list[PageContent]:
    """Draw the forward pass, the backward pass and the remaining time, with one scale for all profiles."""
    of = [_phase_segments(profile) for profile in profiles]
    several = len(profiles) > 1
    longest = max(_total_time(segments) for phases in of for segments in phases.values())
    children: list[PageContent] = []
    for phase in of[0]:
        if not any(_total_time(phases[phase]) for phases in of):
            continue
        children.append(optional_heading(phase, several))
        for profile, phases in zip(profiles, of, strict=True):
            time = _total_time(phases[phase])
            text = f"{time_text(time)} · {share_text(time, profile.step)}"
            children.append(labelled_bar(profile.name if several else phase, phases[phase], longest, text))
    children += [_idle_remark(profile) for profile in profiles if profile.idle]
    return [*children, colour_legend(labels_of(profiles) | {"rest": REMAINDER})]


def _idle_remark(profile: Profile) -> PageContent:
    share = share_text(profile.idle, profile.step)
    return remark(f"{profile.name}: the accelerator waits for {time_text(profile.idle)} of each step, {share}.")


def _phase_segments(profile: Profile) -> dict[str, list[BarSegment]]:
    """Return the segments of each phase, in the order in which the phases run."""
    phases: dict[str, list[BarSegment]] = {"forward": [], "backward": [], "update": []}
    for row in summed_rows(profile):
        before = "update" if row.component in UPDATE else "forward"
        phases[before].append(_bar_segment(profile, row.component, row.label, before, row.forward))
        phases["backward"].append(_bar_segment(profile, row.component, row.label, "backward", row.backward))
    phases["rest"] = [_bar_segment(profile, "rest", REMAINDER, "", profile.unattributed)]
    return phases


def _total_time(segments: Sequence[BarSegment]) -> float:
    return sum(segment.value for segment in segments)


def _bar_segment(profile: Profile, name: str, label: str, phase: str, time: float) -> BarSegment:
    share = share_text(time, profile.step)
    return BarSegment(name, time, label, share, f"{label} {phase}: {time_text(time)}, {share} of the step")


def floor_bars(profiles: Sequence[Profile]) -> list[PageContent]:
    """Draw the measured time by component, and inside it the minimum time for its FLOPs and bytes."""
    of = [{row.component: row for row in summed_rows(profile) if row.floor} for profile in profiles]
    if not any(of):
        return [remark("There is no prediction: the work of this model was not counted.")]
    longest = max(row.time for components in of for row in components.values())
    several = len(profiles) > 1
    children: list[PageContent] = []
    for name, label in labels_of(profiles).items():
        bars = [
            _floor_bar(profile.name if several else label, components[name], longest)
            for profile, components in zip(profiles, of, strict=True)
            if name in components
        ]
        children += [optional_heading(label, several), *bars] if bars else []
    words = "The bar is measured; its dark section is the floor, the least time by the limits of the device."
    return [*children, remark(f"{words} A component at 1.00× could not be faster without doing less.")]


def _floor_bar(label: str, row: ComponentTime, longest: float) -> PageContent:
    """Draw the floor as the dark section of the measured time, or as the full bar if the measured time is shorter."""
    floor = row.floor or 0.0
    hint = f"{row.label}: measured {time_text(row.time)}, floor {time_text(floor)}"
    sections = (min(floor, row.time), max(0.0, row.time - floor))
    text = f"{time_text(floor)} → {time_text(row.time)} · {ratio_text(row.time, floor)}"
    segments = [BarSegment(row.component, seconds, "", "", hint) for seconds in sections]
    return labelled_bar(label, segments, longest, text, look="bar bullet")


NUMBERS = 24
"""Approximate number of layer numbers for which the picture has room."""
_LAYER = re.compile(r"(?P<stack>.+)\.layers\.(?P<index>\d+)")


@dataclass(frozen=True)
class LayerTimes:
    """A layer of a stack: its work, and the work of each component in it."""

    index: int
    whole: ComponentTime
    parts: Mapping[str, ComponentTime]


def layer_strips(profiles: Sequence[Profile]) -> list[PageContent]:
    """Draw a column for each layer, as high as its time, with a cell per component."""
    return by_model(profiles, _stack_strips)


def _stack_strips(profile: Profile) -> list[PageContent]:
    """Draw the stacks of one model on one scale, with a legend."""
    stacks: dict[str, list[LayerTimes]] = {}
    for whole in summed_rows(profile, "layer"):
        if match := _LAYER.fullmatch(whole.layer):
            part_profile = replace(profile, parts=tuple(part for part in profile.parts if part.layer == whole.layer))
            layer = LayerTimes(int(match["index"]), whole, {row.component: row for row in summed_rows(part_profile)})
            stacks.setdefault(match["stack"], []).append(layer)
    if not stacks:
        return [remark("This model has no stack of layers.")]
    layers = [layer for stack in stacks.values() for layer in stack]
    slowest = max(layer.whole.time for layer in layers)
    cell = max(part.time for layer in layers for part in layer.parts.values())
    labels = {row.component: row.label for row in summed_rows(profile)}
    pictures = [_layer_heat_map(name, stack, labels, slowest, cell) for name, stack in stacks.items()]
    keys = tag("span", tag("i", class_="key forward"), "forward ", tag("i", class_="key backward"), "backward")
    ramp = tag("span", "0", tag("i", class_="ramp"), f"{time_text(cell)} of a component in a layer")
    return [*pictures, tag("p", keys, ramp, class_="legend")]


def _layer_heat_map(
    name: str, stack: Sequence[LayerTimes], labels: Mapping[str, str], slowest: float, cell: float
) -> Element:
    """Draw a column for each layer, a strip for each component below the columns, and the layer numbers."""
    grid = tag("div", class_="heat", style=f"--layers:{len(stack)}", role="img", aria_label=f"time by layer of {name}")
    mean = sum(layer.whole.time for layer in stack) / len(stack)
    towers = [_layer_tower(layer, slowest) for layer in stack]
    grid.extend([tag("div", f"{name} layer", class_="name"), *towers, tag("div", f"⌀ {time_text(mean)}", class_="sum")])
    for component, label in labels.items():
        if times := [layer.parts[component].time for layer in stack if component in layer.parts]:
            cells = [_heat_cell(layer.index, label, layer.parts.get(component), cell) for layer in stack]
            total = tag("div", time_text(sum(times)), class_="sum")
            grid.extend([tag("div", label, class_="name strip"), *cells, total])
    spacing = -(-len(stack) // NUMBERS)
    numbers = [str(layer.index) if location % spacing == 0 else "" for location, layer in enumerate(stack)]
    grid.extend([tag("div", "layer", class_="name index"), *(tag("div", text, class_="index") for text in numbers)])
    return grid


def _layer_tower(layer: LayerTimes, slowest: float) -> Element:
    blocks = [
        tag("i", class_=phase, style=f"height:{100 * time / slowest:.2f}%")
        for phase, time in (("backward", layer.whole.backward), ("forward", layer.whole.forward))
    ]
    return tag("div", *blocks, class_="tower", title=_time_hint(f"layer {layer.index}", layer.whole))


def _heat_cell(index: int, label: str, part: ComponentTime | None, slowest: float) -> Element:
    if part is None:
        return tag("div", class_="cell none")
    style = f"--heat:{part.time / slowest:.3f}"
    return tag("div", class_="cell", style=style, title=_time_hint(f"layer {index}, {label}", part))


def _time_hint(name: str, part: ComponentTime) -> str:
    return f"{name}: forward {time_text(part.forward)}, backward {time_text(part.backward)}"


WIDTH, HEIGHT = 960, 440
LEFT_MARGIN, RIGHT_MARGIN, TOP_MARGIN, BOTTOM_MARGIN = 84, 20, 16, 48
MIN_RADIUS, MAX_RADIUS = 4.0, 26.0
"""Radii of the points in pixels. The area of a point with the largest radius stands for a full step."""
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
class RooflinePoint:
    """A component of one profile: FLOPs per byte and FLOP/s, both as powers of ten, and its fraction of the step."""

    component: str
    label: str
    series: int
    intensity: float
    rate: float
    share: float
    hint: str

    @property
    def radius(self) -> float:
        """Radius of the point, in pixels."""
        return max(MIN_RADIUS, MAX_RADIUS * math.sqrt(min(1.0, self.share)))


def roofline_chart(profiles: Sequence[Profile]) -> list[PageContent]:
    """Draw one roofline for all profiles, or explain that the models' FLOPs are unknown."""
    limits = list(dict.fromkeys(profile.limits for profile in profiles))
    points = [point for index, profile in enumerate(profiles) for point in _roofline_points(index, profile)]
    if not points:
        return [remark("There is no roofline: the work of this model was not counted.")]
    words = "Further right: more work for each byte. Higher: faster. On the line: as fast as the device can be."
    size = "The area of a point is its share of the step"
    rings = f"; filled is {profiles[0].name}, hollow is {profiles[1].name}" if len(profiles) > 1 else ""
    caption = f"{words} {size}{rings}."
    if any(row.floor and row.time < row.floor for profile in profiles for row in summed_rows(profile)):
        caption += " A component above its limit had more of the device than the measurement of the limit."
    return [_roofline_picture(points, limits), remark(caption)]


def _roofline_points(series: int, profile: Profile) -> Iterator[RooflinePoint]:
    for row in summed_rows(profile):
        if not row.flops or not row.bytes or not row.flops_per_second:
            continue
        rate, intensity = row.flops_per_second, row.flops / row.bytes
        hint = f"{profile.name}, {row.label}: {amount_text(rate, 'FLOP/s')} at {amount_text(intensity, 'FLOP')} a byte"
        hint += f", {share_text(row.floor, row.time)} of the device's limit" if row.floor else ""
        share = row.time / profile.step
        yield RooflinePoint(row.component, row.label, series, math.log10(intensity), math.log10(rate), share, hint)


def _roofline_picture(points: Sequence[RooflinePoint], limits: Sequence[Limits]) -> Element:
    ridges = [math.log10(limit.flops / limit.bandwidth) for limit in limits]
    across = _power_axis([*(point.intensity for point in points), *ridges], LEFT_MARGIN, WIDTH - RIGHT_MARGIN)
    up = _power_axis(
        [*(point.rate for point in points), *(math.log10(limit.flops) for limit in limits)],
        HEIGHT - BOTTOM_MARGIN,
        TOP_MARGIN,
    )
    box = f"0 0 {WIDTH} {HEIGHT}"
    picture = tag("svg", viewBox=box, class_="roofline", role="img", aria_label="roofline of the components")
    picture.extend(_grid_lines(across, up))
    taken: list[Box] = []
    for limit in limits:
        picture.extend(_roof_lines(limit, across, up, taken))
    largest = sorted(points, key=lambda point: -point.share)
    locations = [(point, across(point.intensity), up(point.rate)) for point in largest]
    taken += [_box_around(x, y, point.radius) for point, x, y in locations]
    picture.extend(_point_circle(*location) for location in locations)
    picture.extend(_point_label(*location, taken) for location in locations)
    return picture


def _power_axis(powers: Sequence[float], start: float, end: float) -> ChartAxis:
    """Return the axis of powers of ten from the minimum to the maximum, with a margin."""
    return ChartAxis(min(powers) - ROOM, max(powers) + ROOM, start, end)


def _grid_lines(across: ChartAxis, up: ChartAxis) -> Iterator[Element]:
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


def _roof_lines(limits: Limits, across: ChartAxis, up: ChartAxis, taken: list[Box]) -> list[Element]:
    """Draw the two limits: bytes per second left of the ridge, FLOP/s right of the ridge."""
    flops, bandwidth = math.log10(limits.flops), math.log10(limits.bandwidth)
    ridge, first = flops - bandwidth, max(across.low, up.low - bandwidth)
    corners = [(first, first + bandwidth), (ridge, flops), (across.high, flops)]
    line = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in corners)
    top = up(flops)
    text = f"{amount_text(limits.flops, 'FLOP/s')}, {amount_text(limits.bandwidth, 'B/s')}"
    taken.append((across.end - len(text) * LETTER, top - LINE - 6, across.end, top + 2))
    for step in range(STEPS):  # no label may be on the slope
        x = first + (ridge - first) * step / STEPS
        taken.append(_box_around(across(x), up(x + bandwidth), 3))
    return [
        tag("polyline", tag("title", f"{limits.name}: {text} ({limits.source})"), points=line, class_="roof"),
        tag("line", x1=across(ridge), x2=across(ridge), y1=top, y2=up.start, class_="ridge"),
        tag("text", text, x=across.end - 4, y=top - 7, class_="tick end"),
    ]


def _point_circle(point: RooflinePoint, x: float, y: float) -> Element:
    look = f"point hollow {colour_of(point.component)}" if point.series else f"point {colour_of(point.component)}"
    return tag("circle", tag("title", point.hint), cx=x, cy=y, r=point.radius, class_=look)


def _point_label(point: RooflinePoint, x: float, y: float, taken: list[Box]) -> Element:
    """Place the name of a point in a free area, with a line to the point if it is not adjacent."""
    width, locations = len(point.label) * LETTER, []
    for lines, side in SIDES:
        away = point.radius + 6 + 6 * abs(lines)
        left, base = x + away if side > 0 else x - away - width, y + 4 + lines * LINE
        locations.append((lines, (left, base - LINE + 3, left + width, base + 3)))
    lines, box = next((location for location in locations if _is_free(location[1], taken)), locations[0])
    taken.append(box)
    left, _, right, bottom = box
    text = tag("text", point.label, x=left, y=bottom - 3, class_="label")
    if not lines:
        return text
    end = left - 2 if left > x else right + 2
    return tag("g", tag("line", x1=x, y1=y, x2=end, y2=bottom - 7, class_="leader"), text)


def _box_around(x: float, y: float, radius: float) -> Box:
    return x - radius, y - radius, x + radius, y + radius


def _is_free(box: Box, taken: Sequence[Box]) -> bool:
    """Return True if a box is within the picture and overlaps no other box."""
    left, top, right, bottom = box
    if left < LEFT_MARGIN or right > WIDTH - RIGHT_MARGIN or top < TOP_MARGIN or bottom > HEIGHT - BOTTOM_MARGIN:
        return False
    return not any(left < box[2] and box[0] < right and top < box[3] and box[1] < bottom for box in taken)
