"""Paired comparisons over seeds: a difference, its interval, and the chance that it is none.

Both sides of a pair have one seed, and so the same data in the same order. Their difference varies less than each of
them, as far as they are correlated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tfkit.errors import Diagnostic, SpecError

LEVEL = 0.95
ALPHA = 1 - LEVEL + 1e-12
"""The most that the probability of a false alarm may be; a bit more, so that it is not lost by rounding."""
POWER = 0.8
"""The probability to find what is there."""
MOST_PAIRS = 1000
"""The largest number of pairs that is named."""
MOST_EXACT = 12
"""Pairs up to which every flip of signs is counted; beyond, the t test gives the probability."""
ROUNDING = 1e-12
"""The part of a sum by which an equal one may differ."""
Interval = tuple[float, float]


@dataclass(frozen=True)
class Paired:
    """A difference over pairs.

    Attributes:
        pairs: their number.
        mean: the mean difference.
        interval: 95% of it, by the t distribution; None for one pair.
        p: the probability of a difference this large, or larger, if there is none; None for one pair.
        adjusted: that probability, after Holm, among all comparisons; None for one pair.
        deviation: the standard deviation of the differences; None for one pair.
        p_same: the probability of pairs this alike, or more, if the true difference were the margin; None without one.
        adjusted_same: that probability, after Holm, among all comparisons.
        correlation: that of the two sides; None where a side does not vary, or for two pairs or fewer.
        unpaired: the interval if the seeds had not been the same (Welch); None for one pair.
    """

    pairs: int
    mean: float
    interval: Interval | None = None
    p: float | None = None
    adjusted: float | None = None
    deviation: float | None = None
    p_same: float | None = None
    adjusted_same: float | None = None
    correlation: float | None = None
    unpaired: Interval | None = None

    def sure(self) -> bool:
        """True if the difference is not by chance, at 5% over all comparisons."""
        return self.adjusted is not None and self.adjusted <= ALPHA

    def same(self) -> bool:
        """True if the difference is below the margin, at 2.5% over all comparisons: its interval is within it."""
        return self.adjusted_same is not None and self.adjusted_same <= ALPHA / 2


def paired(values: Sequence[float], base: Sequence[float], margin: float | None = None) -> Paired:
    """The difference of two sides whose pairs are at the same places.

    Args:
        values: one side.
        base: the other.
        margin: the difference that begins to matter, if that is asked.

    Raises:
        SpecError: scipy is not installed.
    """
    differences = [one - other for one, other in zip(values, base, strict=True)]
    if len(differences) < 2:
        return Paired(len(differences), differences[0])
    return Paired(
        len(differences),
        float(np.mean(differences)),
        interval_of(differences),
        _p(differences),
        deviation=float(np.std(differences, ddof=1)),
        p_same=None if margin is None else _p_same(differences, margin),
        correlation=_correlation(values, base),
        unpaired=_unpaired(values, base),
    )


def interval_of(values: Sequence[float]) -> Interval:
    """95% of a mean, by the t distribution."""
    return _around(float(np.mean(values)), float(np.var(values, ddof=1)) / len(values), len(values) - 1)


def half(interval: Interval) -> float:
    """Half of the width of an interval."""
    return (interval[1] - interval[0]) / 2


def half_width(freedom: float) -> float:
    """Half of the interval of a mean whose standard error is 1, by the degrees of freedom of that error."""
    return float(scipy().special.stdtrit(freedom, (1 + LEVEL) / 2))


def _around(mean: float, variance: float, freedom: float) -> Interval:
    half = math.sqrt(variance) * half_width(freedom)
    return mean - half, mean + half


def least_p(pairs: int) -> float:
    """The smallest probability that so few pairs can have."""
    return 2.0 ** (1 - pairs) if pairs <= MOST_EXACT else 0.0


def enough(deviation: float, margin: float, comparisons: int) -> int | None:
    """The pairs that show a difference of nothing to be below a margin, in 4 of 5 cases; None beyond 1,000.

    Args:
        deviation: the standard deviation of their differences.
        margin: the margin.
        comparisons: their number, among which Holm's correction is made.
    """
    counts = np.arange(2, MOST_PAIRS + 1)
    quantile = scipy().special.stdtrit
    halves = quantile(counts - 1, 1 - (1 - LEVEL) / 2 / comparisons) + quantile(counts - 1, (1 + POWER) / 2)
    found = counts[halves * deviation <= margin * np.sqrt(counts)]
    return int(found[0]) if len(found) else None


def holm(found: Sequence[Paired]) -> list[Paired]:
    """The comparisons with their adjusted probabilities: the chance of one false claim among all stays 5%.

    That variants differ is one kind of claim, that they are the same another.
    """
    adjusted = zip(_holm([one.p for one in found]), _holm([one.p_same for one in found]), strict=True)
    return [replace(one, adjusted=p, adjusted_same=p_same) for one, (p, p_same) in zip(found, adjusted, strict=True)]


def _holm(probabilities: Sequence[float | None]) -> list[float | None]:
    known = sorted((p, index) for index, p in enumerate(probabilities) if p is not None)
    made, most = list(probabilities), 0.0
    for rank, (p, index) in enumerate(known):
        most = max(most, min(1.0, p * (len(known) - rank)))
        made[index] = most
    return made


def _p(differences: Sequence[float]) -> float:
    count = len(differences)
    if not np.any(differences):
        return 1.0
    if count > MOST_EXACT:
        error = float(np.std(differences, ddof=1)) / math.sqrt(count)
        t = float(np.mean(differences)) / error if error else math.inf
        return 2 * float(scipy().special.stdtr(count - 1, -abs(t)))
    sums = np.array(list(itertools.product((-1, 1), repeat=count))) @ np.asarray(differences)
    return float(np.mean(np.abs(sums) >= abs(sum(differences)) * (1 - ROUNDING)))


def _p_same(differences: Sequence[float], margin: float) -> float:
    """The larger probability of two one-sided t tests (https://doi.org/10.1007/BF01068419)."""
    error = float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
    room = margin - abs(float(np.mean(differences)))
    t = room / error if error else math.copysign(math.inf, room)
    return float(scipy().special.stdtr(len(differences) - 1, -t))


def _correlation(values: Sequence[float], base: Sequence[float]) -> float | None:
    if len(values) < 3 or not np.std(values) or not np.std(base):
        return None
    return float(np.corrcoef(values, base)[0, 1])


def _unpaired(values: Sequence[float], base: Sequence[float]) -> Interval:
    count, mean = len(values), float(np.mean(values) - np.mean(base))
    own, other = (float(np.var(side, ddof=1)) / count for side in (values, base))
    effective = (own + other) ** 2 / (own**2 + other**2) if own or other else 1
    return _around(mean, own + other, (count - 1) * effective)


def scipy() -> Any:
    """The package; raises SpecError if it is not installed. Its `stats` takes as long to import as half of torch."""
    try:
        import scipy  # type: ignore[import-untyped]
    except ImportError as missing:
        message = "a comparison needs `scipy`, which is not installed"
        raise SpecError(Diagnostic(message, help='pip install "tfkit[train]"; the runs stay')) from missing
    return scipy
