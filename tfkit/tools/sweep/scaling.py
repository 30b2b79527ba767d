"""Scaling laws, L = E + A / N^a, with intervals over seeds (https://arxiv.org/abs/2203.15556, appendix D.3).

The law of a variant is fitted to one arm for each size, all of them trained on the same seeds. Losses are compared on a
log scale. The Huber loss keeps a single failed run from deciding the law. The bootstrap draws entire seeds, because all
sizes have the same seeds: the intervals then contain the effect of a seed on every size. Percentiles of a few seeds
would be too narrow: intervals are the bootstrap's standard error, corrected for the number of seeds, times the quantile
of t.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tfkit.tools.common.scipy_library import import_scipy
from tfkit.tools.sweep.arms import Arms, SweepRun
from tfkit.tools.sweep.equal import SIZES
from tfkit.tools.sweep.result import Law, Scaling, curve_of
from tfkit.tools.sweep.statistics import Interval, half_width
from tfkit.tools.train.plan import Plan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]


MIN_SIZES = 4
"""Minimum number of sizes for a law: one more than its parameters."""
DRAWS = 100
STARTS = (0.1, 0.3, 0.8)
"""Initial exponents of the fit."""
STEEPEST = 4.0
"""Maximum exponent."""
HUBER = 1e-3
"""Default difference of logarithms beyond which a loss counts less, if seeds do not determine it."""


def law_of(sizes: Sequence[float], losses: Sequence[Sequence[float]]) -> Law:
    """Fit a law to losses, a row for each size and a column for each seed.

    Raises:
        SpecError: scipy is not installed.
    """
    order = np.argsort(sizes)
    n, values = np.asarray(sizes, float)[order], np.asarray(losses, float)[order]
    delta = _huber_threshold(values)
    parameters = _fitted_parameters(n, values, delta, STARTS)
    smaller = _fitted_parameters(n[:-1], values[:-1], delta, STARTS)
    missed = float(values[-1].mean() - _law_of_parameters(smaller).at(n[-1]))
    return _law_of_parameters(parameters, _parameter_intervals(n, values, delta, parameters), missed)


def _law_of_parameters(
    parameters: Numbers, intervals: tuple[Interval, Interval, Interval] | None = None, missed: float = 0.0
) -> Law:
    floor, log_scale, exponent = map(float, parameters)
    return Law(floor, math.exp(log_scale), exponent, intervals, missed)


def _huber_threshold(values: Numbers) -> float:
    """Return the difference of logarithms beyond which a loss counts less: twice the standard deviation of seeds."""
    if values.shape[1] < 2:
        return HUBER
    return 2 * float(np.sqrt(np.log(values).var(axis=1, ddof=1).mean())) or HUBER


def _fitted_parameters(n: Numbers, values: Numbers, delta: float, starts: Sequence[float]) -> Numbers:
    """Return E, the logarithm of A, and a."""
    middle, least = np.log(n).mean(), values.min()
    x, y = np.log(n) - middle, np.log(values)

    def residuals(at: Numbers) -> Numbers:
        missing: Numbers = np.log(at[0] + np.exp(at[1] - at[2] * x))[:, None] - y
        return missing.ravel()

    def slopes(at: Numbers) -> Numbers:
        power = np.exp(at[1] - at[2] * x)
        each: Numbers = np.stack([np.ones_like(x), power, -x * power], axis=1) / (at[0] + power)[:, None]
        return each.repeat(y.shape[1], axis=0)

    bounds = ([0, -50, 0], [values.max(), 50, STEEPEST])
    fits = [
        import_scipy().optimize.least_squares(
            residuals,
            _initial_parameters(x, values, guess),
            slopes,
            bounds=bounds,
            loss="huber",
            f_scale=delta,
            x_scale=[least, 1, 1],
        )
        for guess in starts
    ]
    floor, scale, exponent = min(fits, key=lambda fit: fit.cost).x
    return np.array([floor, scale + exponent * middle, exponent])


def _initial_parameters(x: Numbers, values: Numbers, exponent: float) -> Numbers:
    """Return the law with the given exponent that is nearest to the means, within the bounds of a law."""
    shape = np.stack([np.ones_like(x), np.exp(-exponent * x)], axis=1)
    floor, scale = np.linalg.lstsq(shape, values.mean(axis=1))[0]
    least = values.min()
    return np.array([np.clip(floor, 0.001 * least, 0.999 * least), math.log(max(scale, 0.001 * least)), exponent])


def _parameter_intervals(
    n: Numbers, values: Numbers, delta: float, parameters: Numbers
) -> tuple[Interval, Interval, Interval] | None:
    """Return the 95% intervals of E, A and a; None for a single seed."""
    seeds = values.shape[1]
    if seeds < 2:
        return None
    random = np.random.default_rng(0)
    drawn = []
    for _ in range(DRAWS):
        columns = random.integers(seeds, size=seeds)
        drawn.append(_fitted_parameters(n, values[:, columns], delta, (parameters[2],)))
    error = np.std(drawn, axis=0, ddof=1) * math.sqrt(seeds / (seeds - 1))
    half = error * half_width(seeds - 1)
    (floor, scale, exponent), (floor_to, scale_to, exponent_to) = parameters - half, parameters + half
    scales = (_bounded_exponential(scale), _bounded_exponential(scale_to))
    return (max(0.0, float(floor)), float(floor_to)), scales, (max(0.0, float(exponent)), float(exponent_to))


def _bounded_exponential(value: float) -> float:
    return math.exp(min(value, 700.0))


def check_laws(arms: Arms, plans: Mapping[str, Plan]) -> None:
    """Raise SpecError if a variant has too few sizes for a law, or several arms of equal size."""
    fit = arms.config.fit
    if fit is None:
        return
    words = SIZES[fit.on][0]
    for variant, sizes in _variant_sizes(arms, plans).items():
        if len(set(sizes.values())) < len(sizes):
            message, help = (
                f"run variants of {variant} must have different numbers of {words}",
                "move settings that are not sizes to `tune`",
            )
            raise arms.file.error(message, "fit", "on", help=help)
        if len(sizes) < MIN_SIZES:
            message = f"a law needs at least {MIN_SIZES} sizes, but {variant} has {len(sizes)}"
            raise arms.file.error(
                message, "fit", help="list sizes, for instance `sizes: {params: [0.25M, 0.5M, 1M, 2M]}`"
            )


def _variant_sizes(arms: Arms, plans: Mapping[str, Plan]) -> dict[str, dict[str, float]]:
    """Return the size of each arm, by its variant and its name, from the smallest to the largest."""
    assert arms.config.fit is not None
    of = SIZES[arms.config.fit.on][1]
    ordered = sorted(arms.arms, key=lambda arm: of(plans[arm.name]))
    return {
        variant: {arm.name: of(plans[arm.name]) for arm in ordered if arm.variant == variant}
        for variant in arms.file.variants
    }


def scaling_laws(arms: Arms, complete: Mapping[str, Sequence[SweepRun]], plans: Mapping[str, Plan]) -> list[Scaling]:
    """Return the laws of all variants that have at least one seed with a run at every size."""
    if arms.config.fit is None:
        return []
    laws = []
    for variant, sizes in _variant_sizes(arms, plans).items():
        rows = [_losses_by_seed(complete[name], arms.config.fitted) for name in sizes]
        seeds = [seed for seed in arms.config.seeds if all(seed in row for row in rows)]
        losses = tuple(tuple(row[seed] for seed in seeds) for row in rows)
        if seeds:
            law = law_of(list(sizes.values()), losses)
            laws.append(Scaling(variant, SIZES[arms.config.fit.on][0], tuple(sizes.values()), losses, law))
    return laws


def _losses_by_seed(runs: Sequence[SweepRun], number: str) -> dict[int, float]:
    """Return the last loss of each seed, if it is a finite number above 0."""
    last = {sweep_run.seed: curve_of(sweep_run, number).last for sweep_run in runs}
    return {seed: value for seed, value in last.items() if 0 < value < math.inf}
