"""Scaling laws of the variants of a sweep, forecasts, and comparisons of variants by their laws."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean

from tfkit.tools.sweep.arms import Arms, SweepRun
from tfkit.tools.sweep.equal import SIZES, short_size
from tfkit.tools.sweep.law import PARAMETERS, LawFit, bounded_exponential, error_of, fit_law
from tfkit.tools.sweep.result import Curve, Forecast, Gain, Law, Scaling, curve_of
from tfkit.tools.train.plan import Plan


def law_of(sizes: Sequence[float], losses: Sequence[Sequence[float]], target: float | None = None) -> Law:
    """Fit a law to losses, a row for each size and a column for each seed, with a forecast at a target size.

    The law without the largest size predicts the loss at that size, if enough sizes remain.

    Raises:
        SpecError: scipy is not installed.
    """
    order = sorted(range(len(sizes)), key=lambda index: sizes[index])
    n, values = [sizes[index] for index in order], [losses[index] for index in order]
    fit, held_out, missed = fit_law(n, values), None, None
    if len(n) > PARAMETERS:
        held_out = _forecast(fit_law(n[:-1], values[:-1]), n[-1])
        missed = fmean(values[-1]) - held_out.loss
    at_target = None if target is None else _forecast(fit, target)
    return Law(fit.floor, fit.scale, fit.exponent, fit.parameter_intervals(), missed, held_out, at_target)


def _forecast(fit: LawFit, size: float) -> Forecast:
    return Forecast(size, fit.at(size), fit.forecast_interval(size))


def check_laws(arms: Arms, plans: Mapping[str, Plan]) -> None:
    """Raise SpecError if a variant has too few sizes for a law or arms of equal size, or a target is not larger."""
    fit = arms.config.fit
    if fit is None:
        return
    words = SIZES[fit.on][0]
    text = partial(short_size, words=words)
    for variant, sizes in _variant_sizes(arms, plans).items():
        if len(set(sizes.values())) < len(sizes):
            message, help = (
                f"run variants of {variant} must have different numbers of {words}",
                "move settings that are not sizes to `tune`",
            )
            raise arms.file.error(message, "fit", "on", help=help)
        if len(sizes) < PARAMETERS:
            message = f"a law needs at least {PARAMETERS} sizes, but {variant} has {len(sizes)}"
            raise arms.file.error(
                message, "fit", help="list sizes, for instance `sizes: {params: [0.25M, 0.5M, 1M, 2M]}`"
            )
        largest = max(sizes.values())
        if fit.to is not None and fit.to <= largest:
            message = f"`to` must be larger than the largest size of {variant}, {text(largest)}; got {text(fit.to)}"
            raise arms.file.error(message, "fit", "to", help="choose a larger size, or remove `to`")


def _variant_sizes(arms: Arms, plans: Mapping[str, Plan]) -> dict[str, dict[str, float]]:
    """Return the size of each arm, by its variant and its name, from the smallest to the largest."""
    assert arms.config.fit is not None
    of = SIZES[arms.config.fit.on][1]
    ordered = sorted(arms.arms, key=lambda arm: of(plans[arm.name]))
    return {
        variant: {arm.name: of(plans[arm.name]) for arm in ordered if arm.variant == variant}
        for variant in arms.file.variants
    }


def scaling_laws(
    arms: Arms, complete: Mapping[str, Sequence[SweepRun]], plans: Mapping[str, Plan]
) -> tuple[list[Scaling], list[str]]:
    """Return the laws of variants, and remarks about laws from few sizes or seeds, and about variants without a law."""
    fit = arms.config.fit
    if fit is None:
        return [], []
    laws, notes = list[Scaling](), list[str]()
    for variant, sizes in _variant_sizes(arms, plans).items():
        curves = {name: [curve_of(sweep_run, arms.config.fitted) for sweep_run in complete[name]] for name in sizes}
        rows = {name: {curve.seed: curve.last for curve in of_size} for name, of_size in curves.items()}
        seeds = tuple(seed for seed in arms.config.seeds if all(seed in row for row in rows.values()))
        if reason := _reason_without_law(curves, rows, seeds):
            notes.append(f"{variant} has no law: {reason}")
            continue
        losses = tuple(tuple(row[seed] for seed in seeds) for row in rows.values())
        law = law_of(list(sizes.values()), losses, fit.to)
        laws.append(Scaling(variant, SIZES[fit.on][0], tuple(sizes.values()), losses, law, seeds))
        means = {name: fmean(row) for name, row in zip(sizes, losses, strict=True)}
        notes += _law_remarks(variant, means, seeds, arms.config.seeds)
    return laws, notes


def _reason_without_law(
    curves: Mapping[str, Sequence[Curve]], rows: Mapping[str, Mapping[int, float]], seeds: Sequence[int]
) -> str | None:
    """Return the reason why a law cannot be fitted; None if it can."""
    for name, of_size in curves.items():
        if diverged := next((curve for curve in of_size if curve.diverged), None):
            return f"{name}, seed {diverged.seed}, diverged"
    if not seeds:
        return "no seed has a run at every size"
    means = {name: fmean(row[seed] for seed in seeds) for name, row in rows.items()}
    for name, row in rows.items():
        if not all(0 < row[seed] < math.inf for seed in seeds):
            return f"the loss of {name} must be a number above 0"
    first, *_, last = means.values()
    smaller, larger = _largest_increase(means)
    if means[larger] - means[smaller] >= first - last:
        return f"the loss does not decrease from {smaller} ({means[smaller]:.4f}) to {larger} ({means[larger]:.4f})"
    return None


def _largest_increase(means: Mapping[str, float]) -> tuple[str, str]:
    """Return the names of a size and of a larger size between which the loss increases most, or decreases least."""
    return max(combinations(means, 2), key=lambda pair: means[pair[1]] - means[pair[0]])


def _law_remarks(
    variant: str, means: Mapping[str, float], seeds: Sequence[int], all_seeds: Sequence[int]
) -> Iterator[str]:
    """Yield remarks about a law from few sizes or seeds, or from a loss that increases between sizes."""
    smaller, larger = _largest_increase(means)
    if means[larger] > means[smaller]:
        yield f"the loss of {larger} is higher than the loss of {smaller}: more seeds would narrow the law of {variant}"
    if len(seeds) < len(all_seeds):
        yield f"the law of {variant} is fitted to {len(seeds)} of {len(all_seeds)} seeds, which have runs at all sizes"
    if len(means) == PARAMETERS:
        intervals = "its intervals are from seeds alone" if len(seeds) > 1 else "it has no intervals"
        yield f"the law of {variant} is not tested: it goes through all its {PARAMETERS} sizes, and {intervals}"


def law_gains(laws: Sequence[Scaling], bases: Mapping[str, str]) -> list[Gain]:
    """Compare each variant to its baseline by their laws, at the smallest and largest size and at the target.

    `bases` are the baselines of the variants.
    """
    fitted = {scaling.name: scaling for scaling in laws}
    gains = []
    for scaling in laws:
        base = fitted.get(bases[scaling.name])
        seeds = [seed for seed in scaling.seeds if base is not None and seed in base.seeds]
        if base is None or base is scaling or not seeds:
            continue
        fit, base_fit = (_fit_of_seeds(side, seeds) for side in (scaling, base))
        at_target = scaling.law.at_target
        targets = () if at_target is None else (at_target.size,)
        gains += [
            _gain(scaling.name, base.name, fit, base_fit, size) for size in (base.sizes[0], base.sizes[-1], *targets)
        ]
    return gains


def _fit_of_seeds(scaling: Scaling, seeds: Sequence[int]) -> LawFit:
    columns = [scaling.seeds.index(seed) for seed in seeds]
    return fit_law(scaling.sizes, [[row[column] for column in columns] for row in scaling.losses])


def _gain(name: str, base_name: str, fit: LawFit, base: LawFit, size: float) -> Gain:
    """Compare two laws at a size."""
    ratio = math.log(fit.at(size) / base.at(size))
    half = error_of([(fit, fit.gradient(size)), (base, -base.gradient(size))])
    difference = fit.at(size) - base.at(size)
    factor = _equal_factor(base, size, ratio)
    if half is None:
        return Gain(name, base_name, size, difference, factor, None)
    low = _equal_factor(base, size, ratio + half)
    return Gain(name, base_name, size, difference, factor, (low or 0.0, _equal_factor(base, size, ratio - half)))


def _equal_factor(law: LawFit, size: float, ratio: float) -> float | None:
    """Return the factor of a size at which the logarithm of a law's loss changes by `ratio`; None if none does."""
    loss = law.at(size) * bounded_exponential(ratio)
    if loss <= law.floor or law.exponent == 0:
        return None
    power = (law.at(size) - law.floor) / (loss - law.floor)
    return bounded_exponential(math.log(power) / law.exponent)
