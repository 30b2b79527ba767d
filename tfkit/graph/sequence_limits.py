"""Limits of a model: the length of its sequences, and the ids in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tfkit.component import Config
from tfkit.graph.expand import Graph
from tfkit.graph.order import as_list


def max_len(graph: Graph) -> int | None:
    """The least `max_len` in a model; None if it has none."""
    return min(_limits(graph), default=None)


def beyond(limit: int) -> str:
    """The limit that was exceeded, as every error names it; a model's forward uses it too (`tfkit.nn.within`)."""
    return f"max_len ({limit}), which can be set when building"


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


def rows_of(graph: Graph, name: str) -> int | None:
    """The rows of the smallest table in which an input is looked up; None if there is none."""
    return min(_rows(graph, name), default=None)


def _rows(graph: Graph, name: str) -> Iterator[int]:
    """The sizes of the tables in which an input is looked up."""
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
