"""The differences between two specs, value by value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tfkit.console.output import merged
from tfkit.graph.expand import Graph
from tfkit.tools.show.values import Value, values_of

WORDS = frozenset({"name", "source", "description", "parameters", "checkpoint"})
"""Values at the top of a spec that do not affect the model."""


@dataclass(frozen=True)
class Difference:
    """A value that differs; None if a spec has no such value. `places` are the paths where it does."""

    path: str
    before: str | None
    after: str | None
    places: tuple[str, ...]


def differences(before: Graph, after: Graph) -> list[Difference]:
    """Compare the resolved values of two specs.

    A value that both inherit in several places, such as `d_model`, is one difference. For a component that only one of
    them has, the written values count, but not the defaults.
    """
    old, new = _values(before), _values(after)
    paths: dict[tuple[str, str | None, str | None], list[str]] = {}
    for path in merged([list(old), list(new)]):
        texts = _text(old.get(path)), _text(new.get(path))
        if texts[0] != texts[1] and not (_follows(path, old, new) or _follows(path, new, old)):
            paths.setdefault((_name(old.get(path), new.get(path)), *texts), []).append(path)
    return [Difference(name, old_text, new_text, tuple(places)) for (name, old_text, new_text), places in paths.items()]


def _follows(path: str, there: Mapping[str, Value], missing: Mapping[str, Value]) -> bool:
    """Return True if only one spec has a value and does not write it: the value comes with its component."""
    value = there.get(path)
    if value is None or path in missing or value.how == "given":
        return False
    part = path.rpartition(".")[0]
    return part not in missing or value.value == "null"


def _values(graph: Graph) -> Mapping[str, Value]:
    return {value.dotted: value for value in values_of(graph) if value.path[0] not in WORDS}


def _text(value: Value | None) -> str | None:
    return None if value is None else value.value or "..."


def _name(*values: Value | None) -> str:
    """Return the path of a value, or only its key if both specs inherit it."""
    there = [value for value in values if value is not None]
    inherited = len(there) == 2 and all(value.how == "inherited" for value in there)
    return there[0].name if inherited else there[0].dotted
