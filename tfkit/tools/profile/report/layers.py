"""The layers of a stack side by side, to show those that take longer than their neighbours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from xml.etree.ElementTree import Element

from tfkit.tools.common.page import Child, remark, tag
from tfkit.tools.profile.report.bars import by_model
from tfkit.tools.profile.report.numbers import time_text
from tfkit.tools.profile.result import ComponentTime, Profile, rows

NUMBERS = 24
"""Approximate number of layer numbers that fit below the picture."""
_LAYER = re.compile(r"(?P<stack>.+)\.layers\.(?P<index>\d+)")

Stack = dict[int, dict[str, ComponentTime]]
"""The work of each component in each layer, by the number of the layer."""


def layer_strips(profiles: Sequence[Profile]) -> list[Child]:
    """A column for each layer: its height is its time, and its cells are those of its components."""
    return by_model(profiles, _layers)


def _layers(profile: Profile) -> list[Child]:
    """The stacks of one model to one scale, and the meaning of their colours."""
    stacks = _stacks(profile)
    if not stacks:
        return [remark("This model has no stack of layers.")]
    layers = [layer for stack in stacks.values() for layer in stack.values()]
    slowest = max(_time(list(layer.values())) for layer in layers)
    cell = max(part.time for layer in layers for part in layer.values())
    labels = {row.component: row.label for row in rows(profile)}
    pictures = [_picture(name, stack, labels, slowest, cell) for name, stack in stacks.items()]
    keys = tag("span", tag("i", class_="key forward"), "forward ", tag("i", class_="key backward"), "backward")
    ramp = tag("span", "0", tag("i", class_="ramp"), f"{time_text(cell)} of a component in a layer")
    return [*pictures, tag("p", keys, ramp, class_="legend")]


def _time(parts: Sequence[ComponentTime]) -> float:
    return sum(part.time for part in parts)


def _stacks(profile: Profile) -> dict[str, Stack]:
    """The stacks of a model; the work of a component in several modules of one layer is added up."""
    stacks: dict[str, Stack] = {}
    for part in profile.parts:
        if match := _LAYER.fullmatch(part.layer):
            layer = stacks.setdefault(match["stack"], {}).setdefault(int(match["index"]), {})
            if old := layer.get(part.component):
                part = replace(part, forward=old.forward + part.forward, backward=old.backward + part.backward)
            layer[part.component] = part
    return {name: dict(sorted(stack.items())) for name, stack in stacks.items()}


def _picture(name: str, stack: Stack, labels: dict[str, str], slowest: float, cell: float) -> Element:
    """The towers of the layers, below them a strip for each component, and below these the numbers of the layers."""
    grid = tag("div", class_="heat", style=f"--layers:{len(stack)}", role="img", aria_label=f"time by layer of {name}")
    mean = sum(_time(list(layer.values())) for layer in stack.values()) / len(stack)
    grid.append(tag("div", f"{name} layer", class_="name"))
    grid.extend(_tower(index, layer, slowest) for index, layer in stack.items())
    grid.append(tag("div", f"⌀ {time_text(mean)}", class_="sum"))
    present = {component for layer in stack.values() for component in layer}
    for component in (one for one in labels if one in present):
        grid.append(tag("div", labels[component], class_="name strip"))
        parts = {index: layer.get(component) for index, layer in stack.items()}
        grid.extend(_cell(index, labels[component], part, cell) for index, part in parts.items())
        grid.append(tag("div", time_text(_time([part for part in parts.values() if part])), class_="sum"))
    every = -(-len(stack) // NUMBERS)
    numbers = [str(index) if place % every == 0 else "" for place, index in enumerate(stack)]
    grid.extend([tag("div", "layer", class_="name index"), *(tag("div", text, class_="index") for text in numbers)])
    return grid


def _tower(index: int, layer: dict[str, ComponentTime], slowest: float) -> Element:
    forward, backward = (sum(getattr(part, phase) for part in layer.values()) for phase in ("forward", "backward"))
    hint = f"layer {index}: forward {time_text(forward)}, backward {time_text(backward)}"
    blocks = [
        tag("i", class_=phase, style=f"height:{100 * time / slowest:.2f}%")
        for phase, time in (("backward", backward), ("forward", forward))
    ]
    return tag("div", *blocks, class_="tower", title=hint)


def _cell(index: int, label: str, part: ComponentTime | None, slowest: float) -> Element:
    if part is None:
        return tag("div", class_="cell none")
    hint = f"layer {index}, {label}: forward {time_text(part.forward)}, backward {time_text(part.backward)}"
    return tag("div", class_="cell", style=f"--heat:{part.time / slowest:.3f}", title=hint)
