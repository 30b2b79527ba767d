"""The differences between two specs, value by value: causes, and consequences through arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tfkit.console.output import merge_rows
from tfkit.graph.expand import Graph
from tfkit.tools.show.resolved_values import ResolvedValue, values_of

WORDS = frozenset({"name", "source", "description", "parameters", "checkpoint"})
"""Values at the top of a spec that do not affect the model."""


@dataclass(frozen=True)
class Difference:
    """A value that differs.

    Attributes:
        path: the path of the value; only its key if several components inherit it.
        before: the value in the first spec; None if the spec has no such value.
        after: the value in the second spec.
        paths: the paths at which the value differs.
        follows: True for a consequence of other differences: both specs contain the same arithmetic.
    """

    path: str
    before: str | None
    after: str | None
    paths: tuple[str, ...]
    follows: bool = False


def spec_differences(before: Graph, after: Graph) -> list[Difference]:
    """Compare the resolved values of two specs.

    A value that components inherit at several paths in both specs, such as `d_model`, is a single difference. For a
    component that exists in only one spec, the written values count, but not the defaults.
    """
    old, new = _values_by_path(before), _values_by_path(after)
    paths: dict[tuple[str, str | None, str | None, bool], list[str]] = {}
    for path in merge_rows([list(old), list(new)]):
        texts = _value_text(old.get(path)), _value_text(new.get(path))
        if texts[0] != texts[1] and not (_comes_along(path, old, new) or _comes_along(path, new, old)):
            follows = (
                path in old
                and path in new
                and _written_arithmetic(before, old[path]) == _written_arithmetic(after, new[path])
            )
            paths.setdefault((_value_name(old.get(path), new.get(path)), *texts, follows), []).append(path)
    return [
        Difference(name, old_text, new_text, tuple(locations), follows)
        for (name, old_text, new_text, follows), locations in paths.items()
    ]


def fields_of_causes(before: Graph, after: Graph) -> frozenset[str]:
    """Return the names of the fields, and of the components around them, whose written values differ."""
    causes = (difference for difference in spec_differences(before, after) if not difference.follows)
    return frozenset(name for cause in causes for location in cause.paths for name in location.split("."))


def _written_arithmetic(graph: Graph, value: ResolvedValue) -> str | None:
    """Return the arithmetic of a number in the spec; for a default, or anything but a number, return the value."""
    origin = graph.spec.provenance.origins.get(value.path)
    if origin is None or origin.span is None or not _is_number(value):
        return value.value
    span = origin.span
    return span.source.line(span.line)[span.column - 1 :][: span.length]


def _is_number(value: ResolvedValue) -> bool:
    try:
        return math.isfinite(float(value.value or ""))
    except ValueError:
        return False


def _comes_along(path: str, present: Mapping[str, ResolvedValue], absent: Mapping[str, ResolvedValue]) -> bool:
    """Return True for a default that exists in only one spec: the value comes with its component."""
    value = present.get(path)
    if value is None or path in absent or value.how == "given":
        return False
    part = path.rpartition(".")[0]
    return part not in absent or value.value == "null"


def _values_by_path(graph: Graph) -> Mapping[str, ResolvedValue]:
    return {value.dotted: value for value in values_of(graph) if value.path[0] not in WORDS}


def _value_text(value: ResolvedValue | None) -> str | None:
    return None if value is None else value.value or "..."


def _value_name(*values: ResolvedValue | None) -> str:
    """Return the path of a value, or only its key if both specs inherit it."""
    present = [value for value in values if value is not None]
    inherited = len(present) == 2 and all(value.how == "inherited" for value in present)
    return present[0].name if inherited else present[0].dotted
