"""The order in which the nodes of a graph run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

Wires: TypeAlias = Mapping[str, Mapping[str, str | list[str]]]
"""The sources of each node, by its fields: a name of a node or input, or a list of them."""


class CycleError(Exception):
    """Nodes that wait for each other: each of `names` reads the next one, and the last the first."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.names = names


def as_list(source: str | list[str]) -> list[str]:
    """Return the sources of a field as a list."""
    return [source] if isinstance(source, str) else source


def sources(fields: Mapping[str, str | list[str]]) -> Iterator[str]:
    """Yield the sources of a node."""
    return (name for source in fields.values() for name in as_list(source))


def in_order(wires: Wires) -> list[str]:
    """Return the nodes in their given order, but each after its sources; raise CycleError."""
    done: dict[str, None] = {}
    for start in wires:
        trail = {} if start in done else {start: sources(wires[start])}
        while trail:
            name = next(reversed(trail))
            source = next((name for name in trail[name] if name not in done and name in wires), None)
            if source is None:
                done[name] = None
                del trail[name]
            elif source in trail:
                raise CycleError(_first_in_front(list(trail), source, list(wires)))
            else:
                trail[source] = sources(wires[source])
    return list(done)


def _first_in_front(trail: list[str], source: str, order: list[str]) -> list[str]:
    """Return the part of a trail from `source` back to it, starting at the node that comes first in `order`."""
    names = trail[trail.index(source) :]
    first = min(range(len(names)), key=lambda index: order.index(names[index]))
    return names[first:] + names[:first]
