"""The place of a component in its spec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tfkit.component import Component, Config
from tfkit.graph.expand import Graph
from tfkit.spec.provenance import Path


def place_of(graph: Graph, node: str, component: Component) -> Path:
    """The path of a component inside a node of the spec; the node's own if the component is not in it."""
    start = ("graph", node)
    found = (path for path, part in _parts(start, graph.node(node).config) if part is component)
    return next(found, start)


def _parts(path: Path, part: object) -> Iterator[tuple[Path, object]]:
    """A config and everything inside it, each with its path."""
    yield path, part
    inside: Mapping[str, object] = {}
    if isinstance(part, Config):
        inside = {name: getattr(part, name) for name in type(part).model_fields}
    elif isinstance(part, Mapping):
        inside = part
    elif isinstance(part, tuple):
        inside = {str(index): one for index, one in enumerate(part)}
    for name, one in inside.items():
        yield from _parts((*path, name), one)
