"""The place of a component in its spec."""

from __future__ import annotations

from tfkit.component import Component
from tfkit.graph.expand import Graph
from tfkit.spec.parts import parts
from tfkit.spec.provenance import Path


def place_of(graph: Graph, node: str, component: Component) -> Path:
    """The path of a component inside a node of the spec; the node's own if the component is not in it."""
    start = ("graph", node)
    paths = (path for path, part in parts(start, graph.node(node).config) if part is component)
    return next(paths, start)
