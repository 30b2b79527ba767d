"""Limits of a model: the length of its sequences, and the ids in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tfkit.component import Config
from tfkit.graph.expand import Graph
from tfkit.graph.order import as_list
from tfkit.spec.document import parts


def max_len(graph: Graph) -> int | None:
    """Return the smallest `max_len` in a model; None if it has none."""
    return min(_limits(graph), default=None)


def beyond(limit: int) -> str:
    """Describe a limit that was exceeded, for every error that names it, including errors of a model's forward."""
    return f"max_len ({limit}), which can be set when building"


def _limits(graph: Graph) -> Iterator[int]:
    for part in (part for node in graph.nodes for _, part in parts((), node.config)):
        limit = dict(part).get("max_len") if isinstance(part, Config) else None
        if isinstance(limit, int):
            yield limit


def rows_of(graph: Graph, name: str) -> int | None:
    """Return the rows of the smallest table that looks up an input; None if there is none."""
    return min(_rows(graph, name), default=None)


def _rows(graph: Graph, name: str) -> Iterator[int]:
    """Yield the sizes of the tables that look up an input."""
    for node in graph.nodes:
        for field, source in node.wires.items():
            if name not in as_list(source):
                continue
            value = getattr(node.config, field)
            table = node.config.table()
            if isinstance(value, Mapping):
                yield value[name]
            elif table is not None and table.rows is not None:
                yield table.rows
