"""Few rows that hold every pair of values: the usual way to test options that combine freely."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]
Pair = frozenset[tuple[str, Any]]


def all_pairs(axes: Mapping[str, Sequence[Any]], meeting: Collection[tuple[str, str]] | None = None) -> list[Row]:
    """Return rows of one value per axis in which every two values of different axes meet at least once.

    With `meeting`, only values of these pairs of axes do. A single axis has a row for each value.
    """
    numbers = {axis: range(len(values)) for axis, values in axes.items()}  # values may be mappings, or equal
    return [{axis: axes[axis][n] for axis, n in row.items()} for row in _rows(numbers, meeting)]


def _rows(axes: Mapping[str, Sequence[int]], meeting: Collection[tuple[str, str]] | None) -> list[Row]:
    if len(axes) == 1:
        return [{axis: value} for axis, values in axes.items() for value in values]
    pairs = combinations(axes, 2) if meeting is None else meeting
    missing = {frozenset({(a, x), (b, y)}): None for a, b in pairs for x in axes[a] for y in axes[b]}
    rows = []
    while missing:
        row = dict(sorted(next(iter(missing))))
        for axis in sorted(axes, key=lambda axis: -len(axes[axis])):
            if axis not in row:
                row[axis] = max(axes[axis], key=lambda value: _new({**row, axis: value}, axis, missing))
        for pair in _pairs(row):
            missing.pop(pair, None)
        rows.append({axis: row[axis] for axis in axes})
    return rows


def every_value(rows: Sequence[Row]) -> list[Row]:
    """Return a subset of the rows in which every value occurs at least once."""
    seen: set[tuple[str, Any]] = set()
    chosen = []
    for row in rows:
        if len(set(row.items()) - seen) > 1:
            chosen.append(row)
            seen |= set(row.items())
    for row in rows:
        if set(row.items()) - seen:
            chosen.append(row)
            seen |= set(row.items())
    return chosen


def _pairs(row: Row) -> list[Pair]:
    return [frozenset(pair) for pair in combinations(row.items(), 2)]


def _new(row: Row, axis: str, missing: Mapping[Pair, None]) -> int:
    """Count the pairs that the value of `axis` forms with the row and that are still missing."""
    mine = (axis, row[axis])
    return sum(frozenset({mine, other}) in missing for other in row.items())
