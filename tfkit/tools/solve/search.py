"""The sizes of a family nearest to a budget, on a grid of depths and widths.

The parameters of all sizes follow from a few measured sizes. A matrix has two sides, and each side is proportional to
d_model, proportional to a hidden width, or constant. A sum over the matrices of all layers is therefore an integer
polynomial: linear in the layers, quadratic in d_model, linear in each hidden width. Newton's forward differences
determine the polynomial from one value per term.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import log2

from tfkit.tools.solve.sizes import Family

Value = Callable[[int, int], int]
"""Returns the parameters for a depth and a width."""

TOLERANCE = 0.02
"""Maximum difference of a size from the budget, as a fraction of the budget."""
SHAPE_DISTANCE = 0.5
"""Difference between two kinds of shapes, in powers of two of width over depth."""
KINDS = 2
"""The number of kinds of wider shapes, and of deeper shapes, in addition to the family's."""


@dataclass(frozen=True)
class GridPoint:
    """A size on the grid."""

    depth: int
    width: int
    value: int


@dataclass(frozen=True)
class Grid:
    """The space to search.

    Attributes:
        width: the fixed width; None if widths vary.
        shape: the spec's ratio of width to depth.
        value: the parameters of a size.
    """

    depths: range
    all_widths: range
    width: int | None
    shape: float
    value: Value

    def smallest(self) -> GridPoint:
        """Return the smallest size."""
        return self.point(self.depths[0], self.width or 1)

    def point(self, depth: int, width: int) -> GridPoint:
        """Return the size with a depth and a width."""
        return GridPoint(depth, width, self.value(depth, width))

    def around(self, budget: float, width: int) -> list[GridPoint]:
        """Return the sizes of a width on both sides of the budget."""
        values = [self.value(depth, width) for depth in self.depths[:2]]
        slope = values[-1] - values[0]
        if slope <= 0:  # layers that share their weights
            location = bisect_left(self.depths, width / self.shape)
        else:
            location = int((budget - values[0]) // slope)
        near = sorted({max(0, min(index, len(self.depths) - 1)) for index in (location, location + 1)})
        return [self.point(self.depths[i], width) for i in near]

    def shape_of(self, point: GridPoint) -> float:
        """Return the shape relative to the family's, in powers of two: positive if wider, negative if deeper."""
        return log2(point.width / point.depth / self.shape) if point.depth else 0.0

    def kind_of(self, point: GridPoint) -> int:
        """Return the kind of a shape: 0 for the family's, positive if wider, negative if deeper."""
        return round(self.shape_of(point) / SHAPE_DISTANCE)

    def of_shape(self, kind: int, width: int) -> GridPoint:
        """Return the size with a width whose shape is nearest to the middle of a kind."""
        depth = width / (self.shape * 2 ** (kind * SHAPE_DISTANCE))
        index = round((depth - self.depths.start) / self.depths.step)
        return self.point(self.depths[max(0, min(index, len(self.depths) - 1))], width)

    def depths_of(self, kind: int, width: int, above: int) -> range:
        """Return the depths for which a width has a shape of a kind, and more than `above` parameters."""

        def deeper(depth: int) -> int:
            return -self.kind_of(GridPoint(depth, width, 0))

        low, high = (find(self.depths, -kind, key=deeper) for find in (bisect_left, bisect_right))
        depths = self.depths[low:high]
        return depths[bisect_right(depths, above, key=lambda depth: self.value(depth, width)) :]

    def widths(self, budget: float) -> Iterable[int]:
        """Return the widths that reach the budget with a shape similar to the family's shape."""
        if self.width is not None:
            return [self.width]
        widths, first, last = self.all_widths, self.depths[0], self.depths[-1]
        end = bisect_left(widths, budget, key=lambda width: self.value(first, width))
        if first == last:
            return widths[max(0, end - 1) : end + 1]
        start = bisect_left(widths, budget, hi=end, key=lambda width: self.value(last, width))
        ratio = 2.0 ** (SHAPE_DISTANCE * (KINDS + 1))
        low = bisect_left(widths, self.shape / ratio, lo=start, hi=end, key=lambda w: self._shape(budget, w))
        high = bisect_left(widths, self.shape * ratio, lo=start, hi=end, key=lambda w: self._shape(budget, w))
        return widths[max(0, min(low, len(widths) - 1) - 1) : high + 2]

    def _shape(self, budget: float, width: int) -> float:
        return width / self.around(budget, width)[0].depth


def nearest_sizes(grid: Grid, budget: float) -> list[GridPoint]:
    """Return the sizes nearest to a budget, one for each kind of shape, ordered by distance from the family's shape.

    Sizes that differ from the budget by more than `TOLERANCE` are omitted, unless all do. If the layers or the width
    are fixed, return the nearest sizes below and above the budget.
    """

    def miss(point: GridPoint) -> tuple[float, float]:
        return abs(point.value - budget), abs(grid.shape_of(point))

    points = [point for width in grid.widths(budget) for point in grid.around(budget, width)]
    if grid.width is not None or len(grid.depths) == 1:
        return sorted(points, key=miss)[:2]
    by_shape: dict[int, list[GridPoint]] = {}
    for point in points:
        by_shape.setdefault(grid.kind_of(point), []).append(point)
    best = [min(group, key=miss) for kind, group in by_shape.items() if abs(kind) <= KINDS]
    if not best:
        return sorted(points, key=miss)[:1]
    distance = min(map(miss, best))
    good = [point for point in best if miss(point)[0] <= TOLERANCE * budget or miss(point) == distance]
    return sorted(good, key=lambda point: abs(grid.shape_of(point)))


Measure = Callable[[int, int, tuple[int, ...]], int]
"""Returns the value of a size, for its depth, width and hidden widths."""


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
        indices = [index for index, rounded in enumerate(self.rounded) if rounded]

        @functools.cache
        def at(step: int, grown: int | None = None) -> int:
            exact = self.family.hidden_at(start + step)
            hidden = [o if rounded else e for o, e, rounded in zip(d_ffs, exact, self.rounded, strict=True)]
            return measure(depth, start + step, tuple(d_ff + (index == grown) for index, d_ff in enumerate(hidden)))

        value = at(0)
        if self.family.scale is not None:
            return _Plane(start, tuple(self._hidden(start)), value, 0, 0, (0,) * len(indices), (0,) * len(indices))
        first = at(1) - value
        slopes = tuple(at(0, index) - value for index in indices)
        mixed = tuple(at(1, index) - at(1) - slope for index, slope in zip(indices, slopes, strict=True))
        return _Plane(start, tuple(self._hidden(start)), value, first, at(2) - value - 2 * first, slopes, mixed)

    def __call__(self, depth: int, width: int) -> int:
        hidden = self._hidden(width)
        value = self.base(width, hidden)
        return value + (depth - self.first) // self.stride * (self.next(width, hidden) - value)
