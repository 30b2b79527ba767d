"""Paired comparisons over seeds: differences, intervals and p-values from one test, which flips the signs of seeds.

Both runs of a pair have one seed, and so the same data in the same order. If a variant changes nothing, the sign of its
difference on a seed is a matter of chance. All variants share their seeds, so the test flips the sign of a seed for all
variants together: it compares the largest t statistic of all variants to the values that it takes under such flips
(max-T, step-down; Westfall and Young, Resampling-Based Multiple Testing, 1993). For one variant, this is the paired
permutation test of the mean difference.

The interval of a difference contains exactly the values that this test does not reject, so it excludes 0 if and only if
the difference is significant. A t interval is narrower for few seeds, but it assumes normal differences, and it can
exclude 0 where the signs of so few seeds prove nothing. Of several variants, each interval covers its true difference
with at least 95%, because no variant is rejected more often among several than alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tfkit.tools.common.scipy_library import import_scipy

LEVEL = 0.95
ALPHA = 1 - LEVEL + 1e-12
"""Significance level, raised by 1e-12 so that a p-value of exactly 0.05 passes despite rounding."""
POWER = 0.8
"""Probability of detecting a difference that exists."""
MAX_PAIRS = 1000
"""The largest number of pairs that a remark recommends."""
MAX_FLIPS = 4096
"""Maximum number of sign patterns of a test: all patterns for up to 13 seeds, random patterns for more seeds."""
NEEDED_PAIRS = math.ceil(1 - math.log2(ALPHA))
"""Minimum number of pairs for a significant difference: with n pairs, no p-value is below 2^(1-n)."""
ROUNDING = 1e-12
"""Relative difference up to which two sums count as equal."""
Interval = tuple[float, float]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Paired:
    """A difference over pairs.

    Attributes:
        pairs: the number of pairs.
        mean: the mean difference.
        lower: the number of pairs with a difference below 0.
        higher: the number of pairs with a difference above 0.
        interval: the differences that are not rejected at 5%; None if there are too few pairs for an end.
        same: True if the interval lies within the margin, on both sides of 0.
        p: the p-value of this comparison alone; None for one pair.
        adjusted: the p-value among all comparisons; None for one pair.
        deviation: the standard deviation of the differences; None for one pair.
        correlation: Pearson correlation of the two arms; None for fewer than three pairs, or if one arm is constant.
    """

    pairs: int
    mean: float
    lower: int
    higher: int
    interval: Interval | None = None
    same: bool = False
    p: float | None = None
    adjusted: float | None = None
    deviation: float | None = None
    correlation: float | None = None

    def significant(self) -> bool:
        """Return True if the difference is significant at 5%, among all comparisons."""
        return self.adjusted is not None and self.adjusted <= ALPHA


Pairs = Mapping[int, tuple[float, float]]
"""The values of an arm and of its baseline, by seed."""


def compare_pairs(arms: Mapping[str, Pairs], margin: float | None = None) -> dict[str, Paired]:
    """Compare arms to their baselines, pair by pair; raise SpecError if scipy is not installed.

    Args:
        arms: the pairs of each arm, at least one. Arms may lack seeds.
        margin: the smallest difference that matters.
    """
    compared = {name: _pair_statistics(list(pairs.values())) for name, pairs in arms.items()}
    tested = {
        name: {seed: value - base for seed, (value, base) in pairs.items()}
        for name, pairs in arms.items()
        if len(pairs) > 1
    }
    tests = zip(tested, max_t(list(tested.values())), strict=True)
    for name, (p, adjusted, interval) in tests:
        compared[name] = replace(compared[name], p=p, adjusted=adjusted, interval=interval)
    if margin is None:
        return compared
    # The same test at the margin, for all arms together. It widens the interval of an arm that is `same` or `open`.
    bounds = {name: math.copysign(margin, compared[name].mean) for name in tested}
    shifted = [{seed: value - bounds[name] for seed, value in tested[name].items()} for name in tested]
    for name, (_, _, interval) in zip(tested, max_t(shifted), strict=True):
        arm = compared[name]
        if arm.interval is not None and interval is not None:
            low, high = (end + bounds[name] for end in interval)
            wide = min(low, arm.interval[0]), max(high, arm.interval[1])
            same = -margin < wide[0] and wide[1] < margin
            if same or not arm.significant():
                compared[name] = replace(arm, interval=wide, same=same)
    return compared


def _pair_statistics(pairs: Sequence[tuple[float, float]]) -> Paired:
    values, base = np.array(pairs).T
    differences = values - base
    several = len(pairs) > 1
    varied = len(pairs) > 2 and np.std(values) > 0 and np.std(base) > 0
    return Paired(
        len(pairs),
        float(np.mean(differences)),
        int(np.sum(differences < 0)),
        int(np.sum(differences > 0)),
        deviation=float(np.std(differences, ddof=1)) if several else None,
        correlation=float(np.corrcoef(values, base)[0, 1]) if varied else None,
    )


def max_t(arms: Sequence[Mapping[int, float]]) -> list[tuple[float, float, Interval | None]]:
    """Return the p-value of each arm alone, its p-value among all arms, and the interval of its mean difference.

    Args:
        arms: the differences of each arm by seed, at least two.
    """
    if not arms:
        return []
    seeds = sorted({seed for arm in arms for seed in arm})
    signs = _sign_patterns(len(seeds))
    flips = [_Flips(np.array([arm[s] for s in arm]), signs[:, [seeds.index(s) for s in arm]]) for arm in arms]
    order = sorted(flips, key=lambda arm: arm.tails[0])
    adjusted, largest = dict[_Flips, float](), 0.0
    for rank, arm in enumerate(order):
        largest = max(largest, arm.p(order[rank + 1 :]))
        adjusted[arm] = largest
    # A rejected arm does not widen the intervals of the remaining arms, as in the steps of the test.
    remaining = [arm for arm in order if adjusted[arm] > ALPHA]
    return [
        (arm.p([]), adjusted[arm], arm.interval([other for other in remaining if other is not arm])) for arm in flips
    ]


def _sign_patterns(seeds: int) -> Array:
    """Return sign patterns, [patterns, seeds], up to a common sign. The first pattern flips nothing."""
    if 2 ** (seeds - 1) <= MAX_FLIPS:
        bits = np.arange(2 ** (seeds - 1))[:, None] >> np.arange(seeds) & 1
        return (1 - 2 * bits).astype(np.float64)
    signs = np.random.default_rng(0).choice((-1.0, 1.0), (MAX_FLIPS, seeds))
    signs[0] = 1
    return signs


class _Flips:
    """The differences of an arm under all sign patterns.

    A sign pattern counts against a supposed difference if the data, shifted by it, has no larger t statistic than the
    flipped data. The supposed differences of a pattern are those between the mean of the flipped pairs and the mean of
    the remaining pairs.

    Attributes:
        tails: one-sided p-values of Student's t for each pattern. They make arms with different numbers of pairs
            comparable; for equal numbers, they order patterns as t does.
    """

    def __init__(self, values: Array, signs: Array) -> None:
        self._count = len(values)
        self._mean = float(values.mean())
        self._slack = ROUNDING * float(np.abs(values).max())
        total, square = float(values.sum()), float(values @ values)
        sums = signs @ values
        # The floor keeps t finite where all differences are equal.
        variance = np.maximum(square - sums**2 / self._count, max(ROUNDING * square, np.finfo(float).tiny))
        self._error = math.sqrt(variance[0] / (self._count * (self._count - 1)))
        t = np.abs(sums) * np.sqrt((self._count - 1) / (self._count * variance))
        self.tails: Array = import_scipy().special.stdtr(self._count - 1, -t)
        flipped = np.sum(signs < 0, axis=1)
        is_mixed = (flipped > 0) & (flipped < self._count)
        sizes = np.where(is_mixed, flipped, 1)
        means = np.array([(total - sums) / 2 / sizes, (total + sums) / 2 / (self._count - sizes)])
        self._low = np.where(is_mixed, means.min(axis=0), -math.inf)
        self._high = np.where(is_mixed, means.max(axis=0), math.inf)

    def p(self, family: Sequence[_Flips]) -> float:
        """Return the p-value of no difference, among the arms of `family`."""
        low, high = self._ends(family)
        return float(np.mean((low <= 0) & (high >= 0)))

    def interval(self, family: Sequence[_Flips]) -> Interval | None:
        """Return the differences whose p-value is above 5%, among the arms of `family`; None if they have no end."""
        low, high = self._ends(family)
        index = int(ALPHA * len(low))  # every range contains the mean, so its ends decide
        ends = float(np.sort(low)[index]), float(np.sort(high)[-1 - index])
        return ends if all(map(math.isfinite, ends)) else None

    def _ends(self, family: Sequence[_Flips]) -> tuple[Array, Array]:
        """Return the ends of the supposed differences that each pattern counts against."""
        low, high = self._low, self._high
        if family:
            tails = np.min([arm.tails for arm in family], axis=0)
            radius = -self._error * import_scipy().special.stdtrit(self._count - 1, tails)
            low, high = np.minimum(low, self._mean - radius), np.maximum(high, self._mean + radius)
        return low - self._slack, high + self._slack


def interval_of(values: Sequence[float]) -> Interval:
    """Return the 95% interval of a mean, by the t distribution."""
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = error * half_width(len(values) - 1)
    return mean - half, mean + half


def half_width(freedom: float) -> float:
    """Return half the width of the 95% interval of a mean with standard error 1, by the degrees of freedom."""
    return float(import_scipy().special.stdtrit(freedom, (1 + LEVEL) / 2))


def sufficient_pairs(deviation: float, margin: float, comparisons: int) -> int | None:
    """Return the number of pairs whose interval lies within a margin, in 4 of 5 cases without a difference.

    It is computed for t intervals, which are nearly as wide. None beyond 1,000.

    Args:
        deviation: the standard deviation of the differences.
        margin: the margin.
        comparisons: the number of arms that share the test.
    """
    counts = np.arange(NEEDED_PAIRS, MAX_PAIRS + 1)
    quantile = import_scipy().special.stdtrit
    halves = quantile(counts - 1, 1 - (1 - LEVEL) / 2 / comparisons) + quantile(counts - 1, (1 + POWER) / 2)
    matches = counts[halves * deviation <= margin * np.sqrt(counts)]
    return int(matches[0]) if len(matches) else None
