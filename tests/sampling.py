"""Selection of test cases: `make test-all` runs all cases, `make test` runs a sample."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

import pytest
from _pytest.mark import ParameterSet

T = TypeVar("T")


def chosen(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """All cases, as parameters of a test; slow are those that are not among the `quick` ones."""
    return [case if case in quick else slow(case) for case in cases]


def some(cases: Iterable[Any], count: int) -> list[Any]:
    """All cases, as parameters of a test; slow are all but `count` of them, spread evenly."""
    options = list(cases)
    return chosen(options, spread(options, count))


def spread(cases: Sequence[T], count: int) -> list[T]:
    """This many of the cases, spread evenly."""
    return [cases[len(cases) * number // count] for number in range(count)]


def slow(case: Any) -> Any:
    """A case that is slow."""
    if isinstance(case, ParameterSet):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
