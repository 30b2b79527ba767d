"""Cases of a test: all of them run with `make test-all`, and some of them with `make test`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], count: int) -> list[Any]:
    """All cases, as parameters of a test; slow are all but `count` of them, spread evenly."""
    given = list(cases)
    quick = {len(given) * number // count for number in range(count)}
    return [case if number in quick else slow(case) for number, case in enumerate(given)]


def slow(case: Any) -> Any:
    """A case that is slow."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
