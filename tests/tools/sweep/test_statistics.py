"""Paired statistics, compared with written-out definitions, scipy, and simulated experiments."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from tfkit.errors import SpecError
from tfkit.run.sweep_spec import CompareConfig
from tfkit.tools.sweep.comparison import _add_differences, _pairing_remarks, result_remarks
from tfkit.tools.sweep.result import ArmResult, Curve
from tfkit.tools.sweep.statistics import (
    ALPHA,
    NEEDED_PAIRS,
    Paired,
    compare_pairs,
    interval_of,
    max_t,
    sufficient_pairs,
)

from ...sampling import chosen

Array = NDArray[np.float64]
EXPERIMENTS = 2000
RANDOM = np.random.default_rng(0)
A = [3.1, 2.9, 3.4, 3.0, 3.3, 2.8]
B = [3.0, 2.7, 3.3, 3.05, 3.1, 2.75]


def compared(values: Sequence[float] | Array, base: Sequence[float] | Array, margin: float | None = None) -> Paired:
    """The comparison of one arm."""
    pairs = {seed: (float(a), float(b)) for seed, (a, b) in enumerate(zip(values, base, strict=True))}
    return compare_pairs({"arm": pairs}, margin)["arm"]


def by_seed(differences: Array) -> list[dict[int, float]]:
    """The rows of [arms, seeds], NaN where an arm lacks a seed, as `max_t` takes them."""
    return [{seed: float(value) for seed, value in enumerate(row) if not np.isnan(value)} for row in differences]


# ---- one comparison ----


def test_a_mean_a_correlation_and_a_deviation() -> None:
    paired = compared(A, B)
    differences = np.subtract(A, B)
    assert paired.mean == pytest.approx(differences.mean())
    assert paired.deviation == pytest.approx(differences.std(ddof=1))
    assert paired.correlation == pytest.approx(stats.pearsonr(A, B).statistic)
    assert (paired.pairs, paired.lower, paired.higher) == (6, 1, 5)


@pytest.mark.parametrize("pairs", [2, 5, 6, 12, 13])
def test_p_counts_every_flip_of_signs(pairs: int) -> None:
    a, b = RANDOM.normal(0.3, 1, pairs), RANDOM.normal(0, 1, pairs)
    sizes = np.abs(a - b)
    flips = np.array(list(itertools.product((-1, 1), repeat=pairs))) @ sizes
    assert compared(a, b).p == pytest.approx(np.mean(np.abs(flips) >= abs((a - b).sum()) - 1e-12))
    assert compared(a + 9, b).p == 2.0 ** (1 - pairs)
    assert compared(a, b).adjusted == compared(a, b).p


@pytest.mark.parametrize("pairs", [5, 6])
def test_scipy_gives_the_same_p(pairs: int) -> None:
    """Called differently: both sides are passed, and exchanged within pairs."""
    for _ in range(20):
        a, b = RANDOM.normal(0.5, 1, (2, pairs))
        exchanged = stats.permutation_test(
            (a, b), lambda x, y: abs(np.mean(x - y)), permutation_type="samples", alternative="greater"
        )
        assert compared(a, b).p == pytest.approx(exchanged.pvalue)


def test_more_than_thirteen_pairs_are_flipped_at_random() -> None:
    """The t test of normal differences is close to it."""
    a, b = RANDOM.normal(0.5, 1, 25), RANDOM.normal(0, 1, 25)
    paired = compared(a, b)
    assert paired.p == compared(a, b).p
    assert paired.p == pytest.approx(stats.ttest_rel(a, b).pvalue, abs=0.02)
    assert compared(a + 9, b).p == 1 / 4096
    interval = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert paired.interval == pytest.approx((interval.low, interval.high), abs=0.1)


@pytest.mark.parametrize("pairs", [6, 9])
def test_an_interval_has_the_differences_that_are_not_rejected(pairs: int) -> None:
    """By its definition: the test is made again at 400 supposed differences."""
    values = RANDOM.normal(1, 1, pairs)
    interval = compared(values, np.zeros(pairs)).interval
    assert interval is not None
    for supposed in np.linspace(values.min() - 0.1, values.max() + 0.1, 400):
        p = compared(values, np.full(pairs, supposed)).p
        assert p is not None
        assert (interval[0] <= supposed <= interval[1]) == (p > ALPHA)
    if pairs == 6:
        assert interval == pytest.approx((values.min(), values.max()))


@pytest.mark.parametrize("pairs", [2, 3, 5])
def test_too_few_pairs_have_no_interval(pairs: int) -> None:
    """Three t intervals can exclude 0 where the signs of three pairs have a p-value of 0.25."""
    paired = compared(A[:pairs], np.array(A[:pairs]) - 1)
    assert (paired.interval, paired.p) == (None, 2.0 ** (1 - pairs))
    assert pairs < NEEDED_PAIRS == 6


@pytest.mark.parametrize("n", [1, 2, 5, 13])
def test_a_against_a_is_exactly_nothing(n: int) -> None:
    values = A[:n] * 3 if n == 13 else A[:n]
    paired = compared(values, values)
    assert paired.mean == 0
    assert paired.interval == (pytest.approx((0, 0)) if n == 13 else None)
    assert paired.p == (None if n == 1 else 1)


def test_a_constant_difference() -> None:
    paired = compared([2.0] * 13, [1.0] * 13)
    assert paired.interval == pytest.approx((1, 1))
    assert (paired.p, paired.correlation) == (2.0**-12, None)


def test_t_intervals_cover_what_they_promise() -> None:
    """2,000 experiments of five seeds whose true difference is 0.3."""
    seeds, noise = RANDOM.normal(0, 1, (EXPERIMENTS, 5)), RANDOM.normal(0, 0.4, (2, EXPERIMENTS, 5))
    differences = (seeds + noise[0] + 0.3) - (seeds + noise[1])
    covered = sum(low <= 0.3 <= high for low, high in map(interval_of, differences))
    assert 0.93 * EXPERIMENTS <= covered <= 0.97 * EXPERIMENTS


# ---- several comparisons ----


def adjusted_by_definition(differences: Array) -> list[float]:
    """Westfall and Young's step-down p-values of [arms, seeds], with t statistics, by loops."""
    arms, seeds = differences.shape

    def t(values: Array) -> float:
        return abs(float(stats.ttest_1samp(values, 0).statistic))

    observed = [t(row) for row in differences]
    order = sorted(range(arms), key=lambda arm: -observed[arm])
    flipped = [[t(row * np.array(signs)) for row in differences] for signs in itertools.product((-1, 1), repeat=seeds)]
    ps, largest = dict[int, float](), 0.0
    for rank, arm in enumerate(order):
        exceeded = [max(row[other] for other in order[rank:]) >= observed[arm] - 1e-9 for row in flipped]
        largest = max(largest, float(np.mean(exceeded)))
        ps[arm] = largest
    return [ps[arm] for arm in range(arms)]


def test_the_signs_of_a_seed_are_flipped_for_all_arms_together() -> None:
    differences = RANDOM.normal(0, 1, (3, 6)) + np.array([[3.0], [0.5], [0.0]])
    tests = max_t(by_seed(differences))
    assert [adjusted for _, adjusted, _ in tests] == pytest.approx(adjusted_by_definition(differences))
    assert [p for p, _, _ in tests] == [compared(row, np.zeros(6)).p for row in differences]


def simulated(correlation: float, effect: float, count: int, variants: int = 4, seeds: int = 6) -> Array:
    """Differences of variants from a baseline, [count, variants, seeds]; the first variant has an effect.

    A run varies by a standard deviation of 1. `correlation` is the share of its variance that belongs to its seed.
    """
    random = np.random.default_rng((seeds, round(10 * correlation), round(effect)))
    noise = random.normal(0, (1 - correlation) ** 0.5, (count, variants + 1, seeds))
    differences = noise[:, 1:] - noise[:, :1]
    differences[:, 0] += effect
    return differences


@pytest.mark.parametrize("correlation", [0.0, 0.7])
def test_an_effect_of_three_deviations_among_four_variants_on_six_seeds(correlation: float) -> None:
    """Without pairs that correlate it is found in at least 60%; Holm's correction finds it in 0%."""
    detected, alarms, count = 0, 0, 500
    for differences in simulated(correlation, 3, count):
        first, *rest = (adjusted <= ALPHA for _, adjusted, _ in max_t(by_seed(differences)))
        detected += first
        alarms += any(rest)
    assert detected >= (0.95 if correlation else 0.6) * count
    assert alarms <= 0.05 * count


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [6, 8])
@pytest.mark.parametrize("missing", [False, True])
def test_false_alarms_among_four_variants_stay_rare(seeds: int, missing: bool) -> None:
    """Among all of them, and also if the second and third lack seeds; unadjusted, more than 5% would be."""
    alarms = raw = 0
    for differences in simulated(0.5, 0, EXPERIMENTS, seeds=seeds):
        if missing:
            differences[1, 0] = differences[2, :3] = np.nan
        tests = max_t(by_seed(differences))
        alarms += any(adjusted <= ALPHA for _, adjusted, _ in tests)
        raw += any(p <= ALPHA for p, _, _ in tests)
    assert stats.binomtest(alarms, EXPERIMENTS, 0.05, alternative="greater").pvalue > 0.05
    assert raw > 0.05 * EXPERIMENTS


def test_interval_and_significance_never_contradict_each_other() -> None:
    """Each interval has its true difference in at least 95%, and excludes 0 if and only if p is at most 0.05."""
    covered = significant = 0
    experiments = 200
    for differences in simulated(0.5, 2, experiments, variants=3, seeds=7):
        for truth, (_, adjusted, interval) in zip((2, 0, 0), max_t(by_seed(differences)), strict=True):
            assert interval is not None
            assert (interval[0] <= 0 <= interval[1]) == (adjusted > ALPHA)
            covered += interval[0] <= truth <= interval[1]
            significant += adjusted <= ALPHA
    assert covered >= 0.95 * 3 * experiments
    assert experiments / 2 < significant < experiments * 1.2


def test_an_arm_with_few_seeds_does_not_hide_the_others() -> None:
    """Its t statistics are large by chance: they are compared by their tails."""
    differences = np.array([[1.0, 1.1, 0.9, 1.05, 1.2, 0.95], [0.3, -0.31, *[np.nan] * 4], [-0.1, 0.12, *[np.nan] * 4]])
    (_, adjusted, interval), *rest = max_t(by_seed(differences))
    assert adjusted == 2.0**-5
    assert interval is not None
    assert interval[0] > 0.8
    assert [adjusted for _, adjusted, _ in rest] == [1, 1]


SHIFT = 0.3
LOSS = CompareConfig(on="val.loss")


def experiment(
    random: np.random.Generator, pairs: int, variants: int, shift: float, margin: float | None = None
) -> tuple[ArmResult, ...]:
    """The results of a sweep whose losses are drawn: a part of each belongs to its seed, as in real ones."""
    seeds, noise = random.normal(3, 1, pairs), random.normal(0, 0.4, (variants + 1, pairs))
    losses = {"base": seeds + noise[0], **{f"v{i}": seeds + noise[i] + shift for i in range(1, variants + 1)}}
    result = {}
    for name, values in losses.items():
        curves = tuple(Curve(seed, "", (8,), (float(value),), None) for seed, value in enumerate(values))
        result[name] = ArmResult(name, name, "base", 1, 1, 1, float(values.mean()), None, None, None, curves)
    return _add_differences(result, LOSS.model_copy(update={"margin": margin}))


@pytest.mark.slow
@pytest.mark.parametrize(("pairs", "variants"), [(5, 1), (6, 1), (5, 3), (6, 3), (8, 3)])
def test_results_of_simulated_sweeps(pairs: int, variants: int) -> None:
    """2,000 sweeps through the code of real ones: intervals cover the truth, verdicts are rarely wrong."""
    random = np.random.default_rng((pairs, variants))
    covered = alarms = 0
    for _ in range(EXPERIMENTS):
        difference = experiment(random, pairs, 1, SHIFT)[1].difference
        assert difference is not None
        if difference.interval is not None:
            covered += difference.interval[0] <= SHIFT <= difference.interval[1]
        alarms += any(arm.verdict in ("better", "worse") for arm in experiment(random, pairs, variants, 0))
    assert covered == 0 if pairs < NEEDED_PAIRS else 0.94 * EXPERIMENTS <= covered <= 0.98 * EXPERIMENTS
    assert stats.binomtest(alarms, EXPERIMENTS, 0.05, alternative="greater").pvalue > 0.05
    assert (alarms > 0) == (pairs >= NEEDED_PAIRS)


def test_an_effect_is_found_and_its_direction_said() -> None:
    base, worse = experiment(RANDOM, 6, 1, 5.0)
    assert (base.difference, worse.verdict) == (None, "worse")
    assert experiment(RANDOM, 6, 1, -5.0)[1].verdict == "better"


def test_a_against_a_has_no_verdict() -> None:
    base = experiment(RANDOM, 6, 1, 0)[0]
    _, again = _add_differences({"base": base, "again": replace(base, name="again")}, LOSS)
    assert again.difference is not None
    assert (again.difference.mean, again.difference.p) == (0, 1)
    assert again.difference.interval == pytest.approx((0, 0), abs=1e-9)
    assert again.verdict == "open"


# ---- the same ----


def test_differences_without_spread_are_same_or_not() -> None:
    base = np.arange(6.0)
    assert compared(base, base, 0.1).same
    assert not compared(base + 1, base, 0.5).same
    assert not compared(base[:5], base[:5], 0.1).same


def test_same_is_said_of_all_variants_together() -> None:
    """One of three variants whose true difference is the margin: by chance its own interval lies within it."""
    rows = np.random.default_rng(8).normal(SHIFT, 0.2, (3, 8))
    alone = compared(rows[0], np.zeros(8), SHIFT)
    assert alone.same
    arms = {str(arm): {seed: (float(value), 0.0) for seed, value in enumerate(row)} for arm, row in enumerate(rows)}
    first, *rest = compare_pairs(arms, SHIFT).values()
    assert not first.same
    assert first.interval is not None
    assert first.interval[1] > SHIFT
    assert [arm.significant() for arm in rest] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize(("shift", "variants"), [(SHIFT, 1), (-SHIFT, 3)])
def test_what_differs_by_the_margin_is_rarely_the_same(shift: float, variants: int) -> None:
    """2,000 sweeps whose variants differ by the margin exactly, the most difficult case."""
    random = np.random.default_rng(variants)
    same = 0
    for rows in random.normal(shift, 0.2, (EXPERIMENTS, variants, 8)):
        arms = {str(arm): {seed: (float(value), 0.0) for seed, value in enumerate(row)} for arm, row in enumerate(rows)}
        same += any(arm.same for arm in compare_pairs(arms, SHIFT).values())
    assert stats.binomtest(same, EXPERIMENTS, 0.025, alternative="greater").pvalue > 0.05
    assert same > 0.01 * EXPERIMENTS


@pytest.mark.parametrize("deviation", chosen([0.2, 0.5], [0.2]))
def test_enough_seeds_are_enough(deviation: float) -> None:
    """Of variants that are the same, four of five are found to be, or nearly so; with fewer seeds, less."""
    count = sufficient_pairs(deviation, SHIFT, 1)
    assert count is not None
    shares = []
    for pairs in (count, count - 2):
        drawn = RANDOM.normal(0, deviation, (150, pairs))
        shares.append(np.mean([compared(row, np.zeros(pairs), SHIFT).same for row in drawn]))
    assert shares[0] > 0.65
    assert shares[1] < shares[0]
    assert sufficient_pairs(0.001, SHIFT, 1) == NEEDED_PAIRS
    assert sufficient_pairs(30.0, SHIFT, 1) is None


@pytest.mark.parametrize("pairs", [8, 1000])
@pytest.mark.parametrize("comparisons", [1, 3])
def test_enough_is_the_first_count_whose_t_interval_lies_within_the_margin(pairs: int, comparisons: int) -> None:
    quantiles = stats.t.ppf([1 - 0.025 / comparisons, 0.9], pairs - 1)
    largest = SHIFT * np.sqrt(pairs) / quantiles.sum()
    assert sufficient_pairs(largest * (1 - 1e-6), SHIFT, comparisons) == pairs
    assert sufficient_pairs(largest * (1 + 1e-6), SHIFT, comparisons) == (None if pairs == 1000 else pairs + 1)


@pytest.mark.parametrize(
    ("shift", "margin", "verdict"),
    [(0.0, 4.0, "same"), (0.0, 0.1, "open"), (5.0, 4.0, "worse"), (2.0, 4.0, "same"), (2.0, 2.2, "worse")],
)
def test_a_margin_tells_same_from_open(shift: float, margin: float, verdict: str) -> None:
    """A difference that is sure and does not matter is none."""
    base, arm = experiment(np.random.default_rng(5), 6, 1, shift, margin)
    assert arm.verdict == verdict
    assert arm.difference is not None
    assert arm.difference.significant() == (shift > 0)
    assert arm.difference.interval is not None
    assert (max(map(abs, arm.difference.interval)) < margin) == (verdict == "same")
    notes = [note for note in result_remarks([base, arm], margin) if note.startswith("v1 is open: about ")]
    assert len(notes) == (verdict == "open")


def test_without_scipy_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(SpecError, match="a comparison needs `scipy`"):
        compared(A, B)


@pytest.mark.parametrize(("values", "remark"), [([3.0, 2.9, 3.1, 3.2], None), ([3.2, 3.1, 2.9, 3.0], "-0.60")])
def test_pairing_that_gained_nothing_is_said(values: list[float], remark: str | None) -> None:
    """The signs of the correlation differ."""
    notes = list(_pairing_remarks("b", compared(values, [2.1, 2.0, 2.2, 2.3])))
    assert notes == ([f"pairing did not help b: the correlation of its pairs is {remark}"] if remark else [])
