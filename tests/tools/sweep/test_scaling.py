"""Scaling laws, fitted to losses of known and published laws, and compared to scipy."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from scipy import optimize, stats

from tfkit.errors import Diagnostic, SpecError
from tfkit.tools.common.pages import CHART_HEIGHT, MARGIN_BOTTOM
from tfkit.tools.sweep import scaling
from tfkit.tools.sweep.law import fit_law
from tfkit.tools.sweep.page import draw_scaling_laws
from tfkit.tools.sweep.result import Curve, Scaling
from tfkit.tools.sweep.scaling import check_laws, law_gains, law_of, scaling_laws
from tools import ladders

SIZES = [0.25e6, 0.5e6, 1e6, 2e6, 4e6]
E, A, EXPONENT = 1.2, 30.0, 0.3


def losses(
    random: np.random.Generator, sizes: list[float], seeds: int, noise: float, common: float = 0.0
) -> list[list[float]]:
    """Losses of the law: a part of the noise is that of the seed, in all sizes."""
    exact = E + A * np.asarray(sizes)[:, None] ** -EXPONENT
    off = noise * random.normal(size=(len(sizes), seeds)) + common * random.normal(size=(1, seeds))
    actual: list[list[float]] = (exact * np.exp(off)).tolist()
    return actual


def test_losses_without_noise_give_the_law_back() -> None:
    """In any order of sizes; the smaller sizes predict the largest, and all sizes a larger target."""
    sample = losses(np.random.default_rng(0), SIZES, 3, 0.0)
    for order in ([0, 1, 2, 3, 4], [3, 1, 4, 0, 2]):
        law = law_of([SIZES[i] for i in order], [sample[i] for i in order], 1e9)
        assert (law.floor, law.scale, law.exponent) == pytest.approx((E, A, EXPONENT), rel=1e-4)
        assert law.at(1e6) == pytest.approx(E + A * 1e6**-EXPONENT)
        assert law.intervals is not None
        assert law.intervals[0] == pytest.approx((E, E), rel=1e-3)
        assert law.held_out is not None
        assert law.at_target is not None
        assert (law.held_out.size, law.missed) == (4e6, pytest.approx(0, abs=1e-6))
        assert law.at_target.loss == pytest.approx(E + A * 1e9**-EXPONENT)


def test_the_intervals_of_one_seed_are_those_of_scipy() -> None:
    """`curve_fit` estimates the standard errors from the residuals, with as many degrees of freedom."""
    sizes = [1e5 * 2**number for number in range(8)]
    sample = losses(np.random.default_rng(3), sizes, 1, 0.002)

    def log_loss(n: Any, floor: float, log_scale: float, exponent: float) -> Any:
        return np.log(floor + np.exp(log_scale - exponent * np.log(n)))

    start = (1.0, math.log(20), 0.25)
    values, covariance = optimize.curve_fit(log_loss, sizes, np.log(sample)[:, 0], start)
    halves = stats.t.ppf(0.975, len(sizes) - 3) * np.sqrt(np.diag(covariance))
    law = law_of(sizes, sample)
    assert (law.floor, math.log(law.scale), law.exponent) == pytest.approx(tuple(values), rel=1e-5)
    assert law.intervals is not None
    floor, scale, exponent = law.intervals
    for ends, value, half in zip((floor, tuple(map(math.log, scale)), exponent), values, halves, strict=True):
        assert ends == pytest.approx((value - half, value + half), rel=1e-4)


def test_the_intervals_of_three_sizes_are_those_of_laws_of_single_seeds() -> None:
    """Three sizes have no residuals: each seed has a law, and the interval contains the mean of these laws."""
    sizes = SIZES[::2]
    sample = losses(np.random.default_rng(5), sizes, 3, 1e-4, 1e-4)
    laws = [fit_law(sizes, [[row[seed]] for row in sample]) for seed in range(3)]
    law = law_of(sizes, sample)
    assert law.intervals is not None
    assert (law.missed, law.held_out) == (None, None)
    exponents = [fit.exponent for fit in laws]
    low, high = stats.t.interval(0.95, 2, np.mean(exponents), stats.sem(exponents))
    assert np.mean(law.intervals[2]) == pytest.approx(np.mean((low, high)), abs=0.1 * (high - low))
    assert law.intervals[2][1] - law.intervals[2][0] == pytest.approx(high - low, rel=0.1)


CEREBRAS = {
    2.6e18: 2.608,
    1.3e19: 2.349,
    6.1e19: 2.181,
    2.8e20: 1.997,
    1.1e21: 1.834,
    6.3e21: 1.704,
    2.3e22: 1.572,
}
"""FLOPs and losses of Cerebras-GPT, table 8 of https://arxiv.org/abs/2304.03208."""
CEREBRAS_MUP = {2.6e18: 2.588, 1.3e19: 2.359, 6.1e19: 2.155, 2.8e20: 1.984, 1.1e21: 1.846}


def published(flops: float) -> float:
    """Equation 1 of the paper."""
    return (flops / 5.984e22) ** -0.0737 + 0.5066


def test_the_law_of_published_models_is_the_published_law() -> None:
    """Section 3.3: residuals of 0.66%, and models with muP that are 0.43% better than the law."""
    sizes = list(CEREBRAS)
    law = law_of(sizes, [[loss] for loss in CEREBRAS.values()])
    assert [law.at(size) for size in sizes] == pytest.approx([published(size) for size in sizes], abs=0.004)
    residuals = [math.log(loss / law.at(size)) for size, loss in CEREBRAS.items()]
    assert np.std(residuals) == pytest.approx(0.0066, abs=1e-4)
    gains = [loss / law.at(size) - 1 for size, loss in CEREBRAS_MUP.items()]
    assert np.mean(gains) == pytest.approx(-0.0043, abs=2e-4)
    assert law.intervals is not None
    assert law.held_out is not None
    assert law.held_out.interval is not None
    low, high = law.intervals[2]
    assert low < 0.0737 < high
    assert law.held_out.interval[0] < CEREBRAS[2.3e22] < law.held_out.interval[1]


def test_a_run_that_went_wrong_does_not_decide() -> None:
    sample = losses(np.random.default_rng(1), SIZES, 5, 0.001)
    right = law_of(SIZES, sample)
    sample[2][0] *= 1.5
    spoilt = law_of(SIZES, sample)
    assert abs(spoilt.at(4e6) - right.at(4e6)) < 0.01
    plain = np.mean(sample[2]) - (E + A * 1e6**-EXPONENT)
    assert plain > 0.15  # what a mean would have made of it


def test_the_largest_size_is_foretold_from_the_others_alone() -> None:
    sample = losses(np.random.default_rng(2), SIZES, 3, 0.0)
    sample[-1] = [loss + 0.25 for loss in sample[-1]]
    law = law_of(SIZES, sample)
    assert law.missed == pytest.approx(0.25, abs=1e-4)
    assert law.held_out is not None
    assert law.held_out.interval == pytest.approx((E + A * 4e6**-EXPONENT,) * 2, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("ladder", ladders.LADDERS, ids=str)
def test_intervals_contain_the_truth_as_often_as_they_say(ladder: tuple[int, int, float, float, float, float]) -> None:
    """In 100 ladders of each sort; `tools/ladders.py` draws 400."""
    fractions = ladders.coverage(*ladder, 100)
    assert all(stats.binomtest(round(100 * fraction), 100, 0.95).pvalue > 0.005 for fraction in fractions), fractions


def test_sizes_that_differ_from_the_law_widen_the_intervals() -> None:
    """Seeds agree, but the sizes are off the law: more than seeds explain."""
    off = np.array([0.01, -0.01, 0.01, -0.01, 0.01])
    sample = losses(np.random.default_rng(4), SIZES, 4, 1e-4)
    moved = (np.array(sample) * np.exp(off)[:, None]).tolist()
    narrow, wide = (law_of(SIZES, values).intervals for values in (sample, moved))
    assert narrow is not None
    assert wide is not None
    assert wide[2][1] - wide[2][0] > 10 * (narrow[2][1] - narrow[2][0])


# ---- the laws of a sweep ----


def scaled(name: str, factor: float, seeds: tuple[int, ...] = (0, 1)) -> Scaling:
    """A variant with the losses of the law at `factor` times its sizes."""
    random = np.random.default_rng(7)
    values = losses(random, [factor * size for size in SIZES], len(seeds), 1e-4)
    rows = tuple(map(tuple, values))
    return Scaling(name, "parameters", tuple(SIZES), rows, law_of(SIZES, rows, 1e8), seeds)


def test_a_variant_is_worth_a_factor_of_parameters() -> None:
    """Also if the two laws share only some of their seeds."""
    base, better = scaled("base", 1.0), scaled("better", 1.5)
    bases = {"base": "base", "better": "base"}
    gains = law_gains([base, better], bases)
    assert {(gain.name, gain.base) for gain in gains} == {("better", "base")}
    assert [gain.size for gain in gains] == [2.5e5, 4e6, 1e8]
    for gain in gains[:2]:
        assert gain.difference == pytest.approx(A * gain.size**-EXPONENT * (1.5**-EXPONENT - 1), rel=0.02)
        assert gain.factor == pytest.approx(1.5, rel=0.02)
        assert gain.interval is not None
        assert gain.interval[1] is not None
        assert gain.interval[0] < 1.5 < gain.interval[1]
    with_third = scaled("better", 1.5, (2, 1, 0))
    with_third = replace(with_third, losses=tuple((3 * third, *common) for third, *common in with_third.losses))
    assert law_gains([base, with_third], bases)[0].factor == pytest.approx(1.5, rel=0.02)
    assert law_gains([better], bases) == []
    assert law_gains([base, scaled("better", 1.5, (2, 3))], bases) == []


def test_a_loss_below_the_floor_of_the_baseline_is_never_reached() -> None:
    base = scaled("base", 1.0)
    rows = tuple(tuple(loss - 0.9 for loss in row) for row in base.losses)
    lower = Scaling("lower", "parameters", base.sizes, rows, law_of(base.sizes, rows), base.seeds)
    gain = law_gains([base, lower], {"base": "base", "lower": "base"})[1]
    assert gain.factor is None
    assert gain.interval is not None
    assert gain.interval[1] is None


def test_the_picture_has_the_forecasts_and_their_intervals() -> None:
    """The largest size and the target are points of each variant, in an interval that is cut at the picture's ends."""
    base, better = scaled("base", 1.0), scaled("better", 1.5)
    assert base.law.at_target is not None
    wide = replace(base.law, at_target=replace(base.law.at_target, interval=(0.0, 99.0)))
    picture = draw_scaling_laws([replace(base, law=wide), better])
    points, bars = (
        [item for item in picture.iter(sort) if item.get("class", "").startswith(word)]
        for sort, word in (("circle", "point"), ("line", "mean"))
    )
    assert len(points) == len(bars) == 4
    assert [bar.get("x1") for bar in bars] == [point.get("cx") for point in points]
    for bar, point in zip(bars, points, strict=True):
        ends = sorted(float(bar.get(name, "nan")) for name in ("y1", "y2"))
        assert 8.0 <= ends[0] <= float(point.get("cy", "nan")) <= ends[1] <= CHART_HEIGHT - MARGIN_BOTTOM
    assert (bars[1].get("y1"), bars[1].get("y2")) == (f"{CHART_HEIGHT - MARGIN_BOTTOM:g}", "8")
    assert "100.0M" in {text.text for text in picture.iter("text")}


def sweep_of(fit: SimpleNamespace, *, seeds: tuple[int, ...] = (0, 1), sizes: int = 4) -> tuple[Any, Any, Any]:
    """The arms of a sweep of two variants, their plans, and their complete runs, as curves by seed."""
    names = [(variant, number) for variant in "ab" for number in (3, 1, 0, 2)[-sizes:]]
    arms = SimpleNamespace(
        config=SimpleNamespace(fit=fit, fitted="val.loss", seeds=seeds),
        arms=[SimpleNamespace(name=f"{variant}{number}", variant=variant) for variant, number in names],
        file=SimpleNamespace(variants="ab", error=lambda message, *path, help: SpecError(Diagnostic(message))),
    )
    plans = {arm.name: SimpleNamespace(parameters=SIZES[int(arm.name[1])]) for arm in arms.arms}
    values = losses(np.random.default_rng(0), SIZES[:4], len(seeds), 0.001)
    complete = {
        arm.name: [curve(seed, loss) for seed, loss in zip(seeds, values[int(arm.name[1])], strict=True)]
        for arm in arms.arms
    }
    return cast(Any, arms), plans, complete


def curve(seed: int, loss: float, *, diverged: bool = False) -> Curve:
    return Curve(seed, "", (4,), (loss,), None, diverged=diverged)


FIT = SimpleNamespace(on="params", to=None)


@pytest.fixture(autouse=True)
def curves_are_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "curve_of", lambda run, number: run)


def test_a_variant_has_a_law_from_the_seeds_of_all_sizes() -> None:
    arms, plans, complete = sweep_of(FIT)
    del complete["a2"][1]
    complete["b0"].clear()
    (law,), notes = scaling_laws(arms, complete, plans)
    assert (law.name, law.words, law.sizes, law.seeds) == ("a", "parameters", tuple(SIZES[:4]), (0,))
    assert law.losses == tuple((complete[f"a{number}"][0].last,) for number in range(4))
    assert law.law == law_of(SIZES[:4], law.losses)
    assert notes == [
        "the law of a is fitted to 1 of 2 seeds, which have runs at all sizes",
        "b has no law: no seed has a run at every size",
    ]


@pytest.mark.parametrize(
    ("name", "replaced", "reason"),
    [
        ("a2", curve(1, 2.0, diverged=True), "a2, seed 1, diverged"),
        ("a1", curve(1, -1.0), "the loss of a1 must be a number above 0"),
        ("a3", curve(1, 3.5), r"the loss does not decrease from a2 \(1.67..\) to a3 \(2.5...\)"),
    ],
)
def test_a_variant_without_a_law_is_named_with_the_reason(name: str, replaced: Curve, reason: str) -> None:
    arms, plans, complete = sweep_of(FIT)
    complete[name][1] = replaced
    (law,), (note,) = scaling_laws(arms, complete, plans)
    assert law.name == "b"
    assert re.fullmatch(f"a has no law: {reason}", note), note


def test_a_small_increase_between_sizes_is_a_remark() -> None:
    arms, plans, complete = sweep_of(FIT)
    complete["a2"] = [curve(seed, complete["a1"][seed].last + 0.01) for seed in (0, 1)]
    laws, notes = scaling_laws(arms, complete, plans)
    assert [law.name for law in laws] == ["a", "b"]
    assert notes == ["the loss of a2 is higher than the loss of a1: more seeds would narrow the law of a"]


def test_three_sizes_are_not_tested() -> None:
    words = "the law of {} is not tested: it goes through all its 3 sizes, and {}"
    for seeds, intervals in (((0, 1), "its intervals are from seeds alone"), ((0,), "it has no intervals")):
        arms, plans, complete = sweep_of(FIT, seeds=seeds, sizes=3)
        _, notes = scaling_laws(arms, complete, plans)
        assert notes == [words.format(variant, intervals) for variant in "ab"]


def test_a_target_is_larger_than_all_sizes() -> None:
    arms, plans, complete = sweep_of(SimpleNamespace(on="params", to=3e6))
    check_laws(arms, plans)
    (law, _), _ = scaling_laws(arms, complete, plans)
    assert law.law.at_target is not None
    assert law.law.at_target.size == 3e6
    arms, plans, _ = sweep_of(SimpleNamespace(on="params", to=2e6))
    with pytest.raises(SpecError, match=r"`to` must be larger than the largest size of a, 2.0M; got 2.0M"):
        check_laws(arms, plans)
