"""Scaling laws, fitted to losses of a known law."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from scipy import stats

from tfkit.tools.sweep import scaling
from tfkit.tools.sweep.scaling import law_of, scaling_laws

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


@pytest.fixture(autouse=True)
def draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "DRAWS", 20)


def test_losses_without_noise_give_the_law_back() -> None:
    """In any order of sizes; and the law of the others predicts the largest."""
    sample = losses(np.random.default_rng(0), SIZES, 3, 0.0)
    for order in ([0, 1, 2, 3, 4], [3, 1, 4, 0, 2]):
        law = law_of([SIZES[i] for i in order], [sample[i] for i in order])
        assert (law.floor, law.scale, law.exponent) == pytest.approx((E, A, EXPONENT), rel=1e-4)
        assert law.missed == pytest.approx(0, abs=1e-6)
        assert law.at(1e6) == pytest.approx(E + A * 1e6**-EXPONENT)
        assert law.intervals is not None
        assert law.intervals[0] == pytest.approx((E, E), rel=1e-3)


def test_four_sizes_of_one_seed() -> None:
    law = law_of(SIZES[:4], losses(np.random.default_rng(0), SIZES[:4], 1, 0.0))
    assert law.intervals is None
    assert law.exponent == pytest.approx(EXPONENT, rel=1e-3)


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
    assert law_of(SIZES, sample).missed == pytest.approx(0.25, abs=1e-4)


def test_a_variant_has_a_law_from_the_seeds_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "_losses_by_seed", lambda runs, number: runs)
    monkeypatch.setattr(scaling, "law_of", lambda *args: args)
    names = [(variant, number) for variant in "ab" for number in (3, 1, 0, 2)]
    arms = SimpleNamespace(
        config=SimpleNamespace(fit=SimpleNamespace(on="params"), fitted="val.loss", seeds=[0, 1]),
        arms=[SimpleNamespace(name=f"{variant}{number}", variant=variant) for variant, number in names],
        file=SimpleNamespace(variants=["a", "b"]),
    )
    plans = {arm.name: SimpleNamespace(parameters=SIZES[int(arm.name[1])]) for arm in arms.arms}
    values = losses(np.random.default_rng(0), SIZES[:4], 2, 0.001)
    complete = {arm.name: dict(enumerate(values[int(arm.name[1])])) for arm in arms.arms}
    del complete["a2"][1]
    complete["b0"].clear()
    (law,) = scaling_laws(cast(Any, arms), cast(Any, complete), cast(Any, plans))
    assert (law.name, law.words, law.sizes) == ("a", "parameters", tuple(SIZES[:4]))
    assert law.losses == tuple((row[0],) for row in values)
    assert law.law == (SIZES[:4], law.losses)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "seeds", "noise", "common"), [(4, 5, 0.003, 0.002), (5, 6, 0.005, 0.0)])
def test_intervals_hold_the_law_as_often_as_they_say(
    sizes: int, seeds: int, noise: float, common: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """150 ladders. The percentiles of the bootstrap, which are usual, would hold it in 65 to 80% of them."""
    monkeypatch.setattr(scaling, "DRAWS", 60)
    random, tensors, count = np.random.default_rng((sizes, seeds)), np.zeros(3, int), 150
    for _ in range(count):
        law = law_of(SIZES[:sizes], losses(random, SIZES[:sizes], seeds, noise, common))
        assert law.intervals is not None
        tensors += [low <= true <= high for (low, high), true in zip(law.intervals, (E, A, EXPONENT), strict=True)]
    assert all(stats.binomtest(int(tensor), count, 0.95).pvalue > 0.01 for tensor in tensors), tensors / count
