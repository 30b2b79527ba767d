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
"""The number of kinds of wider shapes, and of deeper shapes, in addition to the family's."""


@dataclass(frozen=True)
class Candidate:
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

    def least(self) -> Candidate:
        """Return the cheapest size."""
        depth, width = self.depths[0], self.width or 1
        return Candidate(depth, width, self.value(depth, width))

    def around(self, budget: float, width: int) -> list[Candidate]:
        """Return the sizes of a width on both sides of the budget, or below it; empty if the smallest is above."""
        values = [self.value(depth, width) for depth in self.depths[:2]]
        slope = values[-1] - values[0]
        places = range(len(self.depths))
        if slope <= 0:  # layers that share their weights
            place = bisect_left(self.depths, width / self.shape)
        else:
            place = int((budget - values[0]) // slope)
        near = sorted({max(0, min(index, len(places) - 1)) for index in (place, place + 1)})
        candidates = [Candidate(self.depths[i], width, self.value(self.depths[i], width)) for i in near]
        return [candidate for candidate in candidates if candidate.value <= budget or not self.at_most]

    def shape_of(self, candidate: Candidate) -> float:
        """Return the shape relative to the family's, in powers of two: positive if wider, negative if deeper."""
        return log2(candidate.width / candidate.depth / self.shape) if candidate.depth else 0.0

    def widths(self, budget: float) -> Iterable[int]:
        """Return the widths for which some depth comes near the budget, with a shape similar to the family's."""
        if self.width is not None:
            return [self.width]
        widths, first, last = self.all_widths, self.depths[0], self.depths[-1]
        most = bisect_left(widths, budget, key=lambda width: self.value(first, width))
        if first == last:
            return widths[max(0, most - 1) : most + 1]
        fewest = bisect_left(widths, budget, hi=most, key=lambda width: self.value(last, width))
        far = 2.0 ** (APART * (KINDS + 1))
        low = bisect_left(widths, self.shape / far, lo=fewest, hi=most, key=lambda w: self._shape(budget, w))
        high = bisect_left(widths, self.shape * far, lo=fewest, hi=most, key=lambda w: self._shape(budget, w))
        return widths[max(0, min(low, len(widths) - 1) - 1) : high + 2]

    def _shape(self, budget: float, width: int) -> float:
        candidates = self.around(budget, width) or [Candidate(self.depths[0], width, 0)]
        return width / candidates[0].depth


def nearest(grid: Grid, budget: float) -> list[Candidate]:
    """Return the sizes nearest to a budget, one for each kind of shape, ordered by distance from the family's shape.

    Sizes that miss it by more than `TOLERANCE` are left out, unless none is nearer. If layers or width are kept, the
    one or two sizes on both sides of the budget.
    """

    def miss(candidate: Candidate) -> tuple[float, float]:
        return abs(candidate.value - budget), abs(grid.shape_of(candidate))

    candidates = [candidate for width in grid.widths(budget) for candidate in grid.around(budget, width)]
    if grid.width is not None or len(grid.depths) == 1:
        return sorted(candidates, key=miss)[:2]
    alike: dict[int, list[Candidate]] = {}
    for candidate in candidates:
        alike.setdefault(round(grid.shape_of(candidate) / APART), []).append(candidate)
    best = [min(group, key=miss) for kind, group in alike.items() if abs(kind) <= KINDS]
    if not best:
        return sorted(candidates, key=miss)[:1]
    least = min(map(miss, best))
    good = [candidate for candidate in best if miss(candidate)[0] <= TOLERANCE * budget or miss(candidate) == least]
    return sorted(good, key=lambda candidate: abs(grid.shape_of(candidate)))
