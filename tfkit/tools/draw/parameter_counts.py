"""The parameters of a model by module, counted in a model with one layer of each variant: its layers are equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

from torch import nn

from tfkit.building.builder import build, check_parameters
from tfkit.component import Component, Layers
from tfkit.errors import Invalid
from tfkit.graph.expand import Graph, Node


class ParameterCounts:
    """Counts the parameters of a model: all of them, and those not in any box yet."""

    def __init__(self, graph: Graph) -> None:
        nodes, locations = [_shortened_node(node) for node in graph.nodes], dict[str, dict[str, None]]()
        for node, short in zip(graph.nodes, nodes, strict=True):
            if short is not node and node.stack is not None and short.stack is not None:
                locations |= _layer_paths(node.name, node.stack, short.stack)
        uncounted = graph.spec.model.model_copy(update={"parameters": None})
        model = build(replace(graph, spec=replace(graph.spec, model=uncounted), nodes=tuple(nodes)), device="meta")
        self.components: Mapping[str, Component] = model.meta["components"]
        self._classes: dict[str, str] = {}
        self._left: dict[str, int] = {}
        counted = set[nn.Parameter]()
        for path, module in model.named_modules():
            parameters = set(module.parameters(recurse=False)) - counted
            counted |= parameters
            count = sum(parameter.numel() for parameter in parameters)
            for location in _full_model_paths(path, locations):
                self._classes[location] = type(module).__name__
                if parameters:
                    self._left[location] = count
        self.total = sum(self._left.values())
        check_parameters(self.total, graph)
        self._inside: dict[str, list[str]] = {}
        for name in self._left:
            for path in accumulate(name.split("."), "{}.{}".format):
                self._inside.setdefault(path, []).append(name)

    def take(self, path: str) -> int:
        """Return the parameters of a module and of everything in it, and remove them from the counts."""
        return sum(self._left.pop(name, 0) for name in self._inside.get(path, ()))

    def label(self, path: str) -> str:
        """Return the name of a module's class."""
        return self._classes.get(path, "")

    def children(self, path: str) -> list[str]:
        """Return the names of the modules with weights directly inside a module, in order."""
        inside = [name[len(path) + 1 :] for name in self._inside.get(path, ()) if name != path]
        return list(dict.fromkeys(name.partition(".")[0] for name in inside))


def _shortened_node(node: Node) -> Node:
    """Return a stack with only the first layer of each variant, if its fields can describe that; else the node."""
    stack, config, fields = node.stack, cast(Any, node.config), type(node.config).model_fields
    if stack is None or "n_layers" not in fields:
        return node
    names = tuple(stack.variants)
    changes: dict[str, Any] = {"n_layers": len(names)}
    if "layers" in fields and config.layers is not None:
        pattern = {"pattern": names, "groups": None, "order": "in_a_row"}
        changes["layers"] = config.layers.model_copy(update=pattern)
    config = config.model_copy(update=changes)
    try:
        short = config.stack()
    except Invalid:
        return node
    expected = [stack.layers[indices[0]] for indices in stack.variants.values()]
    described = [
        replace(layer, config=first.config, context=first.context)
        for layer, first in zip(short.layers, expected, strict=False)
    ]
    return replace(node, config=config, stack=short) if described == expected else node


def _layer_paths(name: str, stack: Layers, short: Layers) -> dict[str, dict[str, None]]:
    """Return the paths of the layers and their contexts in a stack, by their paths in the shortened stack."""
    locations: dict[str, dict[str, None]] = {}
    for number, indices in enumerate(stack.variants.values()):
        for index in indices:
            locations.setdefault(f"{name}.layers.{number}", {})[f"{name}.layers.{index}"] = None
            context = f"{name}.{short.layers[number].context}"
            locations.setdefault(context, {})[f"{name}.{stack.layers[index].context}"] = None
    return locations


def _full_model_paths(path: str, locations: Mapping[str, Mapping[str, None]]) -> Iterator[str]:
    """Yield the paths of a module in the model, of which the shortened model has `path`."""
    parts = path.split(".")
    prefix, rest = ".".join(parts[:3]), parts[3:]
    for location in locations.get(prefix, (prefix,)):
        yield ".".join((location, *rest))
