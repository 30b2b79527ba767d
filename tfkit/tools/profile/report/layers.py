"""The layers of a stack side by side, to show those that take longer than their neighbours."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from xml.etree.ElementTree import Element

from tfkit.tools.common.page import Child, remark, tag
from tfkit.tools.profile.report.bars import by_model
from tfkit.tools.profile.report.numbers import time_text
from tfkit.tools.profile.result import ComponentTime, Profile, rows

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
