"""The time of a step: by phase, against the limits of the device, and by layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from xml.etree.ElementTree import Element

from tfkit.tools.common.pages import Child, remark, tag
from tfkit.tools.profile.report.bars import (
    Segment,
    by_model,
    heading,
    labelled,
    legend,
    ratio_text,
    share_text,
    time_text,
)
from tfkit.tools.profile.result import ComponentTime, Profile, labels_of, rows

UPDATE = ("optimizer", "zero_grad")
"""The rows of a step outside forward and backward."""
REST = "between the components"


def time_bars(profiles: Sequence[Profile]) -> list[Child]:
    """Draw the forward, the backward and the time around them, of all profiles on one scale."""
    of = [_phases(profile) for profile in profiles]
    several = len(profiles) > 1
    longest = max(_length(segments) for phases in of for segments in phases.values())
    children: list[Child] = []
    for phase in of[0]:
        if not any(_length(phases[phase]) for phases in of):
            continue
        children.append(heading(phase, several))
        for profile, phases in zip(profiles, of, strict=True):
            time = _length(phases[phase])
            text = f"{time_text(time)} · {share_text(time, profile.step)}"
            children.append(labelled(profile.name if several else phase, phases[phase], longest, text))
    children += [_idle(profile) for profile in profiles if profile.idle]
    return [*children, legend(labels_of(profiles) | {"rest": REST})]


def _idle(profile: Profile) -> Child:
    share = share_text(profile.idle, profile.step)
    return remark(f"{profile.name}: the accelerator waits for {time_text(profile.idle)} of each step, {share}.")


def _phases(profile: Profile) -> dict[str, list[Segment]]:
    """Return the segments of each phase, in the order in which the phases run."""
    phases: dict[str, list[Segment]] = {"forward": [], "backward": [], "update": []}
    for row in rows(profile):
        before = "update" if row.component in UPDATE else "forward"
        phases[before].append(_segment(profile, row.component, row.label, before, row.forward))
        phases["backward"].append(_segment(profile, row.component, row.label, "backward", row.backward))
    phases["rest"] = [_segment(profile, "rest", REST, "", profile.unattributed)]
    return phases


def _length(segments: Sequence[Segment]) -> float:
    return sum(segment.value for segment in segments)


def _segment(profile: Profile, name: str, label: str, phase: str, time: float) -> Segment:
    share = share_text(time, profile.step)
    return Segment(name, time, label, share, f"{label} {phase}: {time_text(time)}, {share} of the step")


def floors(profiles: Sequence[Profile]) -> list[Child]:
    """Draw the measured time by component, and within it the least time for its FLOPs and bytes."""
    of = [{row.component: row for row in rows(profile) if row.floor} for profile in profiles]
    if not any(of):
        return [remark("There is no prediction: the work of this model was not counted.")]
    longest = max(row.time for components in of for row in components.values())
    several = len(profiles) > 1
    children: list[Child] = []
    for name, label in labels_of(profiles).items():
        bars = [
            _bullet(profile.name if several else label, components[name], longest)
            for profile, components in zip(profiles, of, strict=True)
            if name in components
        ]
        children += [heading(label, several), *bars] if bars else []
    words = "The bar is measured; its dark section is the floor, the least time by the limits of the device."
    return [*children, remark(f"{words} A component at 1.00× could not be faster without doing less.")]


def _bullet(label: str, row: ComponentTime, longest: float) -> Child:
    """Draw the floor as the dark section of the measured time, or as all of it if the measured time is shorter."""
    floor = row.floor or 0.0
    hint = f"{row.label}: measured {time_text(row.time)}, floor {time_text(floor)}"
    sections = (min(floor, row.time), max(0.0, row.time - floor))
    text = f"{time_text(floor)} → {time_text(row.time)} · {ratio_text(row.time, floor)}"
    segments = [Segment(row.component, seconds, "", "", hint) for seconds in sections]
    return labelled(label, segments, longest, text, look="bar bullet")


NUMBERS = 24
"""Approximate number of layer numbers that fit below the picture."""
_LAYER = re.compile(r"(?P<stack>.+)\.layers\.(?P<index>\d+)")


@dataclass(frozen=True)
class Layer:
    """A layer of a stack: its work, and the work of each component in it."""

    index: int
    whole: ComponentTime
    parts: Mapping[str, ComponentTime]


def layer_strips(profiles: Sequence[Profile]) -> list[Child]:
    """Draw a column for each layer, as high as its time, with a cell per component."""
    return by_model(profiles, _layers)


def _layers(profile: Profile) -> list[Child]:
    """Draw the stacks of one model on one scale, with a legend."""
    stacks: dict[str, list[Layer]] = {}
    for whole in rows(profile, "layer"):
        if match := _LAYER.fullmatch(whole.layer):
            part_profile = replace(profile, parts=tuple(part for part in profile.parts if part.layer == whole.layer))
            layer = Layer(int(match["index"]), whole, {row.component: row for row in rows(part_profile)})
            stacks.setdefault(match["stack"], []).append(layer)
    if not stacks:
        return [remark("This model has no stack of layers.")]
    layers = [layer for stack in stacks.values() for layer in stack]
    slowest = max(layer.whole.time for layer in layers)
    cell = max(part.time for layer in layers for part in layer.parts.values())
    labels = {row.component: row.label for row in rows(profile)}
    pictures = [_picture(name, stack, labels, slowest, cell) for name, stack in stacks.items()]
    keys = tag("span", tag("i", class_="key forward"), "forward ", tag("i", class_="key backward"), "backward")
    ramp = tag("span", "0", tag("i", class_="ramp"), f"{time_text(cell)} of a component in a layer")
    return [*pictures, tag("p", keys, ramp, class_="legend")]


def _picture(name: str, stack: Sequence[Layer], labels: Mapping[str, str], slowest: float, cell: float) -> Element:
    """Draw the towers of the layers, a strip for each component below them, and the layer numbers."""
    grid = tag("div", class_="heat", style=f"--layers:{len(stack)}", role="img", aria_label=f"time by layer of {name}")
    mean = sum(layer.whole.time for layer in stack) / len(stack)
    towers = [_tower(layer, slowest) for layer in stack]
    grid.extend([tag("div", f"{name} layer", class_="name"), *towers, tag("div", f"⌀ {time_text(mean)}", class_="sum")])
    for component, label in labels.items():
        if times := [layer.parts[component].time for layer in stack if component in layer.parts]:
            cells = [_cell(layer.index, label, layer.parts.get(component), cell) for layer in stack]
            total = tag("div", time_text(sum(times)), class_="sum")
            grid.extend([tag("div", label, class_="name strip"), *cells, total])
    spacing = -(-len(stack) // NUMBERS)
    numbers = [str(layer.index) if place % spacing == 0 else "" for place, layer in enumerate(stack)]
    grid.extend([tag("div", "layer", class_="name index"), *(tag("div", text, class_="index") for text in numbers)])
    return grid


def _tower(layer: Layer, slowest: float) -> Element:
    blocks = [
        tag("i", class_=phase, style=f"height:{100 * time / slowest:.2f}%")
        for phase, time in (("backward", layer.whole.backward), ("forward", layer.whole.forward))
    ]
    return tag("div", *blocks, class_="tower", title=_hint(f"layer {layer.index}", layer.whole))


def _cell(index: int, label: str, part: ComponentTime | None, slowest: float) -> Element:
    if part is None:
        return tag("div", class_="cell none")
    style = f"--heat:{part.time / slowest:.3f}"
    return tag("div", class_="cell", style=style, title=_hint(f"layer {index}, {label}", part))


def _hint(name: str, part: ComponentTime) -> str:
    return f"{name}: forward {time_text(part.forward)}, backward {time_text(part.backward)}"
