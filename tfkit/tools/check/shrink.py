"""The smallest model in which a property is broken."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from tfkit.building.placement import thread_count
from tfkit.errors import SpecError
from tfkit.graph.expand import expand
from tfkit.spec.load import take_spec
from tfkit.spec.render import Data, lines_of, spec_data
from tfkit.tools.check.measure import Outcome, Property, outcome_of
from tfkit.tools.check.model_under_test import ModelUnderTest

FRACTION = 0.1
"""Smallest size of a deviation in a shrunk model, relative to its size before: rounding is no bug."""
_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")

_Path: TypeAlias = tuple[Any, ...]
"""The keys and indices of a value in a spec."""


@dataclass(frozen=True)
class ShrunkModel:
    """The smallest model in which a property is broken.

    Attributes:
        text: its spec.
        outcome: the result of the property in this model.
        n_values: the number of values in its spec.
        n_values_before: the number of values in the spec of the model that was shrunk.
    """

    text: str
    outcome: Outcome
    n_values: int
    n_values_before: int


def shrink(
    subject: ModelUnderTest,
    broken: Property,
    outcome: Outcome,
    *,
    on_progress: Callable[[int, int], Any] = lambda n_values, n_values_before: None,
) -> ShrunkModel:
    """Remove and reduce the values of a spec as long as a property is broken in the same component.

    No single value of the result can be removed, and no number can be replaced by 1, 2, its half or its predecessor:
    the property would hold or be broken in another way, or the spec would be invalid. Inputs become shorter, too, if
    `max_len` does. Hierarchical delta debugging (https://doi.org/10.1145/1134285.1134307): parts are removed before
    the values in them.

    Args:
        subject: a model without trained weights.
        broken: the property.
        outcome: its result for the model.
        on_progress: called with the number of values, now and before.
    """
    data: Data = spec_data(subject.graph.spec.model.model_copy(update={"parameters": None}))
    before, changed, original = _count(data), True, outcome
    with thread_count(1):
        while changed:
            changed = False
            for reduce in _reductions(data):
                smaller = reduce(data)
                result = None if smaller is None else _outcome_in(smaller, subject, broken)
                if result is not None and _is_same_fault(result, original):
                    data, outcome, changed = smaller, result, True
                    on_progress(_count(data), before)
    assert isinstance(data, dict)
    return ShrunkModel("\n".join([*lines_of(data, 0), ""]), outcome, _count(data), before)


def _outcome_in(data: Any, subject: ModelUnderTest, measured: Property) -> Outcome | None:
    """Return the result of a property in the model of a spec; None if the spec is invalid."""
    try:
        graph = expand(take_spec(data, subject.plugins))
    except SpecError:
        return None
    return outcome_of(measured, replace(subject, graph=graph))


def _is_same_fault(outcome: Outcome, original: Outcome) -> bool:
    """Return True if a property is broken in the same component, by a deviation of similar size or the same error."""
    if _without_numbers(outcome.status, outcome.component) != _without_numbers(original.status, original.component):
        return False
    if original.worst is None:
        return outcome.worst is None and _without_numbers(outcome.detail) == _without_numbers(original.detail)
    return outcome.worst is not None and outcome.worst >= FRACTION * original.worst


def _without_numbers(*texts: str) -> list[str]:
    return [_NUMBER.sub("", text) for text in texts]


def _reductions(data: Data) -> Sequence[Callable[[Data], Data]]:
    """Return the functions that make a spec smaller, or return None for a spec that is too small for them.

    Equal values move to the top of the spec, then parts are removed, large ones first, then numbers are reduced. The
    last items of a list are removed first, so that the indices of the other items stay valid.
    """
    paths = [*_paths(data)]
    paths.sort(key=lambda path: (len(path), -_count(_at(data, path)), [type(key) is int and -key for key in path]))
    numbers = [path for path in paths if type(_at(data, path)) is int]
    return [
        *(
            partial(_with_shared_value, key=key)
            for key in dict.fromkeys(path[-1] for path in paths)
            if type(key) is str
        ),
        *(partial(_without, path=path) for path in paths),
        *(partial(_with_number, path=path, number=number) for path in numbers for number in _smaller(_at(data, path))),
    ]


def _smaller(number: int) -> Sequence[int]:
    return [*dict.fromkeys((1, 2, number // 2, number - 1))]


def _with_shared_value(data: Data, key: str) -> Data:
    """Move a value that several nodes have to the top of the spec, from where they inherit it."""
    paths = [path for path in _paths(data) if path[-1] == key]
    values = [_at(data, path) for path in paths]
    if len(paths) < 2 or (key,) in paths or any(value != values[0] for value in values[1:]):
        return None
    for path in paths:
        data = _without(data, path)
    assert isinstance(data, dict)
    return {**{name: value for name, value in data.items() if name != "graph"}, key: values[0], "graph": data["graph"]}


def _with_number(data: Data, path: _Path, number: int) -> Data:
    value = _at(data, path)
    return _with(data, path, number) if type(value) is int and number < value else None


def _paths(data: Data, path: _Path = ()) -> Iterator[_Path]:
    for key, value in _items(data):
        yield (*path, key)
        yield from _paths(value, (*path, key))


def _items(data: Data) -> list[tuple[Any, Data]]:
    if isinstance(data, dict):
        return [*data.items()]
    return [*enumerate(data)] if isinstance(data, list) else []


def _count(data: Data) -> int:
    items = _items(data)
    return sum(_count(value) for _, value in items) if items else 1


def _at(data: Any, path: _Path) -> Any:
    """Return the value at a path; None if there is none."""
    try:
        for key in path:
            data = data[key]
    except (LookupError, TypeError):
        return None
    return data


def _with(data: Any, path: _Path, value: Any) -> Any:
    if not path:
        return value
    changed = data.copy()
    changed[path[0]] = _with(data[path[0]], path[1:], value)
    return changed


def _without(data: Data, path: _Path) -> Data:
    """Remove a value; return None if it is not there. A mapping with only a kind becomes the word of the kind."""
    parent = _at(data, path[:-1])
    if not isinstance(parent, dict | list) or path[-1] not in [key for key, _ in _items(parent)]:
        return None
    smaller: Any = parent.copy()
    del smaller[path[-1]]
    if isinstance(smaller, dict) and [*smaller] == ["kind"] and smaller["kind"] != "none":
        smaller = smaller["kind"]
    return _with(data, path[:-1], smaller)
