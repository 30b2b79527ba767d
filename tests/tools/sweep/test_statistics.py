"""Paired statistics against formulas written out, scipy, and simulated experiments."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from tfkit.errors import SpecError
from tfkit.spec.sweep import CompareConfig
from tfkit.tools.sweep.curves import Curve
from tfkit.tools.sweep.remarks import _pairing, remarks
from tfkit.tools.sweep.result import Result
from tfkit.tools.sweep.results import _compared
from tfkit.tools.sweep.statistics import ALPHA, Paired, _p_same, enough, holm, interval_of, least_p, paired

EXPERIMENTS = 2000
RANDOM = np.random.default_rng(0)
A = [3.1, 2.9, 3.4, 3.0, 3.3, 2.8]
B = [3.0, 2.7, 3.3, 3.05, 3.1, 2.75]


def test_the_interval_is_that_of_the_t_test() -> None:
    found = paired(A, B)
    known = stats.ttest_rel(A, B).confidence_interval(0.95)
    assert found.interval == pytest.approx((known.low, known.high))
    differences = np.subtract(A, B)
    half = 2.5705818356 * differences.std(ddof=1) / 6**0.5  # the quantile of t with 5 degrees of freedom, from a table
    assert found.interval == pytest.approx((differences.mean() - half, differences.mean() + half))
    assert found.mean == pytest.approx(differences.mean())
    assert found.correlation == pytest.approx(stats.pearsonr(A, B).statistic)
    known = stats.ttest_ind(A, B, equal_var=False).confidence_interval(0.95)
    assert found.unpaired == pytest.approx((known.low, known.high))


@pytest.mark.parametrize("pairs", [2, 5, 6, 12])
def test_p_counts_every_flip_of_signs(pairs: int) -> None:
    a, b = RANDOM.normal(0.3, 1, pairs), RANDOM.normal(0, 1, pairs)
    sizes = np.abs(a - b)
    flips = np.array(list(itertools.product((-1, 1), repeat=pairs))) @ sizes
    assert paired(a, b).p == pytest.approx(np.mean(np.abs(flips) >= abs((a - b).sum()) - 1e-12))
    assert paired(a + 9, b).p == least_p(pairs)


@pytest.mark.parametrize("pairs", [5, 6])
def test_scipy_gives_the_same_interval_and_p(pairs: int) -> None:
    """Called otherwise: both sides are given, and exchanged within pairs."""
    for _ in range(20):
        a, b = RANDOM.normal(0.5, 1, (2, pairs))
        found = paired(a, b)
        known = stats.ttest_rel(a, b).confidence_interval(0.95)
        assert found.interval == pytest.approx((known.low, known.high))
        exchanged = stats.permutation_test(
            (a, b), lambda x, y: abs(np.mean(x - y)), permutation_type="samples", alternative="greater"
        )
        assert found.p == pytest.approx(exchanged.pvalue)


def test_beyond_twelve_pairs_it_is_the_t_test() -> None:
    a, b = RANDOM.normal(0.3, 1, 13), RANDOM.normal(0, 1, 13)
    assert paired(a, b).p == pytest.approx(stats.ttest_rel(a, b).pvalue)


@pytest.mark.parametrize("n", [1, 2, 5, 13])
def test_a_against_a_is_exactly_nothing(n: int) -> None:
    found = paired(A[:n] * 3 if n == 13 else A[:n], A[:n] * 3 if n == 13 else A[:n])
    assert found.mean == 0
    assert found.interval == (None if n == 1 else (0, 0))
    assert found.p == (None if n == 1 else 1)


def test_a_constant_difference() -> None:
    found = paired([2.0] * 13, [1.0] * 13)
    assert (found.interval, found.p, found.correlation, found.unpaired) == ((1, 1), 0, None, (1, 1))


def test_holm_by_hand() -> None:
    found = holm([Paired(6, 0, p=p) for p in (0.04, 0.01, 0.03, 0.5)] + [Paired(1, 0)])
    assert [one.adjusted for one in found] == [pytest.approx(p) for p in (0.09, 0.04, 0.09, 0.5)] + [None]
    assert [one.sure() for one in found] == [False, True, False, False, False]


def test_intervals_cover_what_they_promise() -> None:
    """2,000 experiments of five seeds whose true difference is 0.3."""
    seeds, noise = RANDOM.normal(0, 1, (EXPERIMENTS, 5)), RANDOM.normal(0, 0.4, (2, EXPERIMENTS, 5))
    differences = (seeds + noise[0] + 0.3) - (seeds + noise[1])
    covered = sum(low <= 0.3 <= high for low, high in map(interval_of, differences))
    assert 0.93 * EXPERIMENTS <= covered <= 0.97 * EXPERIMENTS


@pytest.mark.parametrize("seeds", [5, 8])
def test_false_alarms_among_three_variants_stay_rare(seeds: int) -> None:
    """2,000 sweeps of three variants that do nothing; without Holm, 8 seeds would give about 14%."""
    flips = np.array(list(itertools.product((-1, 1), repeat=seeds)))
    alarms = raw = 0
    for _ in range(EXPERIMENTS):
        base, variants = RANDOM.normal(0, 1, seeds), RANDOM.normal(0, 1, (3, seeds))
        ps = [np.mean(np.abs(flips @ one) >= abs(one.sum()) - 1e-12) for one in variants - base]
        found = holm([Paired(seeds, 0, p=float(p)) for p in ps])
        alarms += any(one.sure() for one in found)
        raw += any(p <= 0.05 for p in ps)
    assert alarms <= 0.05 * EXPERIMENTS
    assert seeds == 5 or raw > 0.06 * EXPERIMENTS


SHIFT = 0.3
LOSS = CompareConfig(on="val.loss")


def experiment(
    random: np.random.Generator, pairs: int, variants: int, shift: float, margin: float | None = None
) -> tuple[Result, ...]:
    """The results of a sweep whose losses are drawn: a part of each belongs to its seed, as in real ones."""
    seeds, noise = random.normal(3, 1, pairs), random.normal(0, 0.4, (variants + 1, pairs))
    losses = {"base": seeds + noise[0], **{f"v{i}": seeds + noise[i] + shift for i in range(1, variants + 1)}}
    found = {}
    for name, values in losses.items():
        curves = tuple(Curve(seed, "", (8,), (float(one),), None) for seed, one in enumerate(values))
        found[name] = Result(name, name, "base", 1, 1, 1, float(values.mean()), None, None, None, curves)
    return _compared(found, LOSS.model_copy(update={"margin": margin}))


@pytest.mark.slow
@pytest.mark.parametrize(("pairs", "variants"), [(5, 1), (6, 1), (5, 3), (6, 3), (8, 3)])
def test_results_of_simulated_sweeps(pairs: int, variants: int) -> None:
    """2,000 sweeps through all that a real one goes through: intervals cover the truth, verdicts are rarely wrong."""
    random = np.random.default_rng((pairs, variants))
    covered = alarms = 0
    for _ in range(EXPERIMENTS):
        one = experiment(random, pairs, 1, SHIFT)[1].difference
        assert one is not None
        assert one.interval is not None
        covered += one.interval[0] <= SHIFT <= one.interval[1]
        alarms += any(one.verdict in ("better", "worse") for one in experiment(random, pairs, variants, 0))
    assert 0.93 * EXPERIMENTS <= covered <= 0.97 * EXPERIMENTS
    assert stats.binomtest(alarms, EXPERIMENTS, 0.05, alternative="greater").pvalue > 0.05
    assert (alarms > 0) == (least_p(pairs) * variants <= 0.05)


def test_an_effect_is_found_and_its_direction_said() -> None:
    base, worse = experiment(RANDOM, 6, 1, 5.0)
    assert (base.difference, worse.verdict) == (None, "worse")
    assert experiment(RANDOM, 6, 1, -5.0)[1].verdict == "better"


def test_a_against_a_has_no_verdict() -> None:
    base = experiment(RANDOM, 6, 1, 0)[0]
    _, again = _compared({"base": base, "again": replace(base, name="again")}, LOSS)
    assert again.difference is not None
    assert (again.difference.mean, again.difference.interval, again.difference.p) == (0, (0, 0), 1)
    assert again.verdict == "open"


@pytest.mark.parametrize("shift", [0.0, 0.2, -0.4])
def test_two_one_sided_tests_are_those_of_scipy(shift: float) -> None:
    a, b = RANDOM.normal(shift, 1, 7), RANDOM.normal(0, 1, 7)
    above = stats.ttest_1samp(a - b, -0.8, alternative="greater").pvalue
    below = stats.ttest_1samp(a - b, 0.8, alternative="less").pvalue
    assert paired(a, b, 0.8).p_same == pytest.approx(max(above, below))
    assert paired(a, b).p_same is None
    assert paired(a, b).deviation == pytest.approx((a - b).std(ddof=1))


def test_differences_without_spread_are_same_or_not() -> None:
    assert paired([2.0, 3.0], [2.0, 3.0], 0.1).p_same == 0
    assert paired([2.0, 3.0], [1.0, 2.0], 0.5).p_same == 1
    assert paired([2.0], [2.0], 0.5).p_same is None


@pytest.mark.parametrize(("shift", "variants"), [(SHIFT, 1), (-SHIFT, 3)])
def test_what_differs_by_the_margin_is_rarely_the_same(shift: float, variants: int) -> None:
    """2,000 sweeps whose variants differ by the margin exactly, the most difficult case."""
    random = np.random.default_rng(variants)
    ps = np.array(
        [[_p_same(one, SHIFT) for one in random.normal(shift, 0.2, (variants, 8))] for _ in range(EXPERIMENTS)]
    )
    wrong = sum(any(one.same() for one in holm([Paired(8, 0, p=1, p_same=float(p)) for p in row])) for row in ps)
    assert stats.binomtest(wrong, EXPERIMENTS, 0.025, alternative="greater").pvalue > 0.05
    assert wrong > 0.01 * EXPERIMENTS
    assert variants == 1 or (ps <= 0.025).any(axis=1).sum() > 0.04 * EXPERIMENTS


@pytest.mark.parametrize(("deviation", "comparisons"), [(0.2, 1), (0.5, 1), (0.5, 3)])
def test_enough_seeds_are_enough(deviation: float, comparisons: int) -> None:
    """Of 2,000 variants that are the same, four of five are found to be; with two seeds fewer, less."""
    count = enough(deviation, SHIFT, comparisons)
    assert count is not None
    shares = []
    for pairs in (count, count - 2):
        drawn = RANDOM.normal(0, deviation, (EXPERIMENTS, pairs))
        shares.append(np.mean([_p_same(one, SHIFT) <= ALPHA / 2 / comparisons for one in drawn]))
    assert shares[0] > 0.78
    assert shares[1] < 0.8
    assert enough(30.0, SHIFT, 1) is None


@pytest.mark.parametrize(
    ("shift", "margin", "verdict"),
    [(0.0, 4.0, "same"), (0.0, 0.1, "open"), (5.0, 4.0, "worse"), (2.0, 4.0, "same"), (2.0, 2.4, "worse")],
)
def test_a_margin_tells_same_from_open(shift: float, margin: float, verdict: str) -> None:
    """A difference that is sure and does not matter is none."""
    base, own = experiment(np.random.default_rng(5), 6, 1, shift, margin)
    assert own.verdict == verdict
    assert own.difference is not None
    assert own.difference.sure() == (shift > 0)
    assert own.difference.interval is not None
    assert (max(map(abs, own.difference.interval)) < margin) == (verdict == "same")
    notes = [note for note in remarks([base, own], margin) if note.startswith("v1 is open: about ")]
    assert len(notes) == (verdict == "open")


def test_without_scipy_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(SpecError, match="a comparison needs `scipy`"):
        paired(A, B)


@pytest.mark.parametrize(("values", "noted"), [([3.0, 2.9, 3.1, 3.2], False), ([3.2, 3.1, 2.9, 3.0], True)])
def test_pairing_that_bought_nothing_is_said(values: list[float], noted: bool) -> None:
    """The signs of the correlation differ, and so does the wider of the two intervals."""
    base = [2.1, 2.0, 2.2, 2.3]
    found = paired(values, base)
    assert found.correlation == pytest.approx(1.0 if not noted else -0.6)
    assert [note.partition(":")[0] for note in _pairing("b", found)] == ["pairing bought nothing for b"] * noted
