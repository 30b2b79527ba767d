"""The owner of each module of a model: its component, node and layer, by the names that all tools use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from torch import fx

from tfkit.building.builder import graph_of
from tfkit.component import Component
from tfkit.graph.expand import Node

By = Literal["component", "node", "layer"]
"""The unit of a table's rows."""
ORDER = ("embedding", "position", "mixer", "attention", "cross_attention", "ffn", "residual", "norm")
"""The first rows of a table by component; the last row is the head."""
LABELS = {"cross_attention": "cross-attention", "ffn": "FFN"}
HEAD = "head"
ADDED = "not in the spec"
"""The component of modules and parameters that were added to a built model, such as adapters."""
_INNER_SLOTS = ("activation", "rope_scaling")
"""Slots whose components count as part of the component around them."""
_LAYER = re.compile(r"(.*?\blayers\.\d+)(?:\.|$)")


class Labelled(Protocol):
    """Protocol of configs with a display name."""

    @property
    def label(self) -> str:
        """The name of its component."""


Item = TypeVar("Item", bound=Labelled)


@dataclass(frozen=True)
class Ownership:
    """The component, node and layer that a module belongs to.

    Attributes:
        component: the slot of the nearest enclosing component, such as `attention`, `cross_attention` or `ffn`; the
            block's name for modules directly in the node, or `head` for a node that returns logits.
        label: the display name of the component; for a norm its class.
        owner: the path of the component.
        node: the node of the graph.
        layer: the layer of a stack; for other children of a stack, the child; the node, if it has no layers.
    """

    component: str
    label: str
    owner: str
    node: str
    layer: str


def added_owner(path: str) -> Ownership:
    """Return the owner of a module or parameter that is in no component of the spec."""
    return Ownership(ADDED, ADDED, path, path.partition(".")[0], _layer_path(path, False))


def owners_of(model: fx.GraphModule, paths: Iterable[str] = ()) -> dict[str, Ownership]:
    """Return the owners of each module of a built model, by the path of the module. `paths` are further paths."""
    modules: dict[str, Any] = dict(model.named_modules())
    components, nodes = model.meta["components"], graph_of(model).nodes
    blocks = {node.name: HEAD if node.output.type == "logits" else node.config.kind_name() for node in nodes}
    stacks = {node.name for node in nodes if node.stack is not None}
    roles = dict(_sublayer_roles(nodes))
    parts: dict[str, Ownership] = {}
    for path in (*modules, *paths):
        node = path.partition(".")[0]
        if node not in blocks:
            parts |= {path: added_owner(path)} if path else {}
            continue
        owner, slot = _enclosing_component(path, components)
        component = blocks[node] if slot == "block" else roles.get(owner, slot)
        is_norm = slot == "norm" and owner in modules
        label = type(modules[owner]).__name__ if is_norm else LABELS.get(component, component)
        parts[path] = Ownership(component, label, owner, node, _layer_path(path, node in stacks))
    return parts


def in_rows(items: Iterable[Item], by: str) -> Iterator[tuple[str, str, list[Item]]]:
    """Yield the name, the label and the items of each row; components are in the order of all tables.

    Args:
        items: objects with the attributes of an `Ownership`.
        by: the attribute that determines the rows.
    """
    rows: dict[str, list[Item]] = {}
    for item in items:
        rows.setdefault(getattr(item, by), []).append(item)
    for name in sorted(rows, key=component_rank) if by == "component" else rows:
        labels = {item.label for item in rows[name]}
        yield name, labels.pop() if by == "component" and len(labels) == 1 else name, rows[name]


def component_rank(component: str) -> int:
    """Return the index of a component's row."""
    return ORDER.index(component) if component in ORDER else len(ORDER) + (component == HEAD)


def _enclosing_component(path: str, components: Mapping[str, Component]) -> tuple[str, str]:
    """Return the nearest enclosing component of a module, and its slot."""
    while path and (path not in components or components[path].slot in _INNER_SLOTS):
        path = path.rpartition(".")[0]
    return path, components[path].slot if path else "block"


def _sublayer_roles(nodes: Iterable[Node]) -> Iterator[tuple[str, str]]:
    """Yield the role of each sublayer, by its path."""
    for node in nodes:
        for number, layer in enumerate(node.stack.layers if node.stack else ()):
            yield from ((f"{node.name}.layers.{number}.{step.name}", step.role) for step in layer.steps)


def _layer_path(path: str, in_stack: bool) -> str:
    """Return the layer of a stack; for other children of a stack, their names; the node if it has no layers."""
    if match := _LAYER.match(path):
        return match[1]
    return ".".join(path.split(".")[:2]) if in_stack else path.partition(".")[0]
