"""The sizes of a family that are nearest to a budget, found on its grid of depths and widths."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import log2

Value = Callable[[int, int], int]
"""The cost of a depth and a width."""

TOLERANCE = 0.02
"""The share of a budget that a size may miss it by."""
APART = 0.5
"""The difference in shape between two kinds, in powers of two of width over depth."""
KINDS = 2
"""The number of kinds of wider shapes, and of deeper ones, beside the family's own."""


@dataclass(frozen=True)
class Found:
    """A size on the grid."""

    depth: int
    width: int
    value: int


@dataclass(frozen=True)
class Grid:
    """The space to search.

    Attributes:
        width: the one that is kept, if any.
        shape: the spec's own ratio of width to depth.
        value: the cost of a size.
        at_most: True if nothing may exceed the budget; else sizes on both sides of it are as good.
    """

    depths: range
    all_widths: range
    width: int | None
    shape: float
    value: Value
    at_most: bool

    def least(self) -> Found:
        """The size that costs least."""
        depth, width = self.depths[0], self.width or 1
        return Found(depth, width, self.value(depth, width))

    def around(self, budget: float, width: int) -> list[Found]:
        """The sizes of that width on both sides of the budget, or below it; empty if even the least is above."""
        values = [self.value(depth, width) for depth in self.depths[:2]]
        slope = values[-1] - values[0]
        places = range(len(self.depths))
        if slope <= 0:  # layers that share their weights
            place = bisect_left(self.depths, width / self.shape)
        else:
            place = int((budget - values[0]) // slope)
        near = sorted({max(0, min(one, len(places) - 1)) for one in (place, place + 1)})
        found = [Found(self.depths[i], width, self.value(self.depths[i], width)) for i in near]
        return [one for one in found if one.value <= budget or not self.at_most]

    def shape_of(self, one: Found) -> float:
        """The shape relative to the family's own, in powers of two: wider if positive, deeper if negative."""
        return log2(one.width / one.depth / self.shape) if one.depth else 0.0

    def widths(self, budget: float) -> Iterable[int]:
        """The widths at which some depth comes near the budget and the shape is like the family's."""
        if self.width is not None:
            return [self.width]
        every, first, last = self.all_widths, self.depths[0], self.depths[-1]
        most = bisect_left(every, budget, key=lambda width: self.value(first, width))
        if first == last:
            return every[max(0, most - 1) : most + 1]
        fewest = bisect_left(every, budget, hi=most, key=lambda width: self.value(last, width))
        far = 2.0 ** (APART * (KINDS + 1))
        low = bisect_left(every, self.shape / far, lo=fewest, hi=most, key=lambda w: self._shape(budget, w))
        high = bisect_left(every, self.shape * far, lo=fewest, hi=most, key=lambda w: self._shape(budget, w))
        return every[max(0, min(low, len(every) - 1) - 1) : high + 2]

    def _shape(self, budget: float, width: int) -> float:
        found = self.around(budget, width) or [Found(self.depths[0], width, 0)]
        return width / found[0].depth


def nearest(grid: Grid, budget: float) -> list[Found]:
    """The sizes nearest to a budget, one for each kind of shape, from the family's own to those that differ more.

    Sizes that miss it by more than `TOLERANCE` are left out, unless none is nearer. If layers or width are kept, the
    one or two sizes on both sides of the budget.
    """

    def miss(one: Found) -> tuple[float, float]:
        return abs(one.value - budget), abs(grid.shape_of(one))

    found = [one for width in grid.widths(budget) for one in grid.around(budget, width)]
    if grid.width is not None or len(grid.depths) == 1:
        return sorted(found, key=miss)[:2]
    alike: dict[int, list[Found]] = {}
    for one in found:
        alike.setdefault(round(grid.shape_of(one) / APART), []).append(one)
    best = [min(some, key=miss) for kind, some in alike.items() if abs(kind) <= KINDS]
    if not best:
        return sorted(found, key=miss)[:1]
    least = min(map(miss, best))
    good = [one for one in best if miss(one)[0] <= TOLERANCE * budget or miss(one) == least]
    return sorted(good, key=lambda one: abs(grid.shape_of(one)))
