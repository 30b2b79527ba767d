"""The place of a component in its spec."""

from __future__ import annotations

from tfkit.component import Component
from tfkit.graph.expand import Graph
from tfkit.spec.document import parts
from tfkit.spec.provenance import Path


def place_of(graph: Graph, node: str, component: Component) -> Path:
    """Return the path of a component inside a node of the spec, or the node's path if it is not in it."""
    start = ("graph", node)
    paths = (path for path, part in parts(start, graph.node(node).config) if part is component)
    return next(paths, start)
