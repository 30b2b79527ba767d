"""The cost of every size, derived from a few measured ones: exact for everything that matrices add up to.

A matrix has two sides, and each grows in proportion to d_model or to one hidden width, or not at all. So a sum over the
matrices of all layers is an integer polynomial: linear in the layers, quadratic in d_model, linear in each hidden
width. Newton's forward differences give it from one value for each of its terms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from tfkit.tools.solve.family import Family

Measure = Callable[[int, int, tuple[int, ...]], int]
"""The value of a size: depth, width, hidden widths."""


@dataclass(frozen=True)
class _Plane:
    """The polynomial in width and hidden widths at one depth: differences from the value at `width` and `hidden`."""

    width: int
    hidden: tuple[int, ...]
    value: int
    first: int
    second: int
    by_hidden: tuple[int, ...]
    mixed: tuple[int, ...]

    def __call__(self, width: int, hidden: list[int]) -> int:
        n = width - self.width
        value = self.value + n * self.first + n * (n - 1) // 2 * self.second
        for new, old, slope, mixed in zip(hidden, self.hidden, self.by_hidden, self.mixed, strict=True):
            value += (new - old) * (slope + n * mixed)
        return value


class Form:
    """The value of every size of a family: `form(depth, width)`."""

    def __init__(self, family: Family, measure: Measure) -> None:
        self.family = family
        depths = family.depths
        self.first, self.stride = depths.start, depths.step
        self.rounded = [hidden.d_ff * family.step % hidden.rounding != 0 for hidden in family.hidden]
        self.base = self._plane(measure, self.first)
        self.next = self._plane(measure, self.first + self.stride) if len(depths) > 1 else self.base

    def _hidden(self, width: int) -> list[int]:
        """Return the hidden widths that are not proportional to d_model because they are rounded."""
        d_ffs = self.family.hidden_at(width)
        return [d_ff for d_ff, rounded in zip(d_ffs, self.rounded, strict=True) if rounded]

    def _plane(self, measure: Measure, depth: int) -> _Plane:
        start = self.family.width
        d_ffs = self.family.hidden_at(start)
        places = [index for index, rounded in enumerate(self.rounded) if rounded]

        @functools.cache
        def at(step: int, more: int | None = None) -> int:
            exact = self.family.hidden_at(start + step)
            mine = [o if rounded else e for o, e, rounded in zip(d_ffs, exact, self.rounded, strict=True)]
            return measure(depth, start + step, tuple(d_ff + (index == more) for index, d_ff in enumerate(mine)))

        value = at(0)
        if self.family.scale is not None:
            return _Plane(start, tuple(self._hidden(start)), value, 0, 0, (0,) * len(places), (0,) * len(places))
        first = at(1) - value
        slopes = tuple(at(0, index) - value for index in places)
        mixed = tuple(at(1, index) - at(1) - slope for index, slope in zip(places, slopes, strict=True))
        return _Plane(start, tuple(self._hidden(start)), value, first, at(2) - value - 2 * first, slopes, mixed)

    def __call__(self, depth: int, width: int) -> int:
        hidden = self._hidden(width)
        value = self.base(width, hidden)
        return value + (depth - self.first) // self.stride * (self.next(width, hidden) - value)
