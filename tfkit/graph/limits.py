"""How long the sequences of a model may be."""

from __future__ import annotations

from collections.abc import Iterator

from tfkit.component import Config
from tfkit.graph.expand import Graph


def max_len(graph: Graph) -> int | None:
    """The least `max_len` of all parts of a model; None where no part has one."""
    return min(_limits(graph), default=None)


def _limits(graph: Graph) -> Iterator[int]:
    pending: list[object] = [node.config for node in graph.nodes]
    while pending:
        part = pending.pop()
        if isinstance(part, Config):
            values = {name: getattr(part, name) for name in type(part).model_fields}
            if isinstance(values.get("max_len"), int):
                yield values["max_len"]
            pending += values.values()
        elif isinstance(part, dict):
            pending += part.values()
        elif isinstance(part, tuple):
            pending += part
