"""The fit of a scaling law, L = E + A / N^a, and intervals (https://arxiv.org/abs/2203.15556, appendix D.3).

Losses are compared on a log scale. With several seeds, the Huber loss keeps a failed run from deciding the law.

Two errors make an interval. All sizes have the same seeds, so the effect of a seed on the law is estimated from its
losses at all sizes; these effects contain what a seed changes at every size. Sizes can also differ from the law by more
than seeds explain, because the law is not exact, or because there is one seed. This error is estimated from the
residuals of the means, if there are more sizes than parameters. The degrees of freedom of the sum follow
Satterthwaite (https://doi.org/10.2307/3002019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tfkit.tools.common.scipy_library import import_scipy
from tfkit.tools.sweep.statistics import Interval, half_width

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

STARTS = (0.1, 0.3, 0.8)
"""Initial exponents of the fit."""
STEEPEST = 4.0
"""Maximum exponent."""
HUBER = 1e-3
"""Difference of logarithms beyond which a loss counts less, if all seeds have equal losses."""
TOLERANCE = 1e-12
"""Relative changes at which the search ends."""
NEGLIGIBLE = 1e-9
"""Fraction of the loss below which E is 0."""
PARAMETERS = 3
"""Number of parameters of a law, and minimum number of sizes."""


@dataclass(frozen=True)
class LawFit:
    """A law that is fitted to losses, and the effects of errors on it.

    Its parameters are E, the logarithm of A / exp(`middle`)^a, and a.

    Attributes:
        parameters: the fitted values.
        middle: the mean of the logarithms of the sizes.
        seeds: the effect of each seed on the parameters, [seeds, 3].
        sizes: the effect of a change of the logarithm of a size's losses on the parameters, [sizes, 3].
        noise: the variance of the mean over seeds of the logarithm of a loss; 0 for one seed.
        misfit: the variance of sizes around the law that seeds do not explain; None without residuals.
    """

    parameters: Numbers
    middle: float
    seeds: Numbers
    sizes: Numbers
    noise: float
    misfit: float | None

    @property
    def floor(self) -> float:
        """E, the limit of the loss for large sizes."""
        return float(self.parameters[0])

    @property
    def scale(self) -> float:
        """A."""
        return bounded_exponential(float(self.parameters[1] + self.middle * self.parameters[2]))

    @property
    def exponent(self) -> float:
        """The exponent a."""
        return float(self.parameters[2])

    def at(self, size: float) -> float:
        """Return the loss at a size."""
        return float(_losses(self.parameters, np.array([math.log(size) - self.middle]))[0])

    def parameter_intervals(self) -> tuple[Interval, Interval, Interval] | None:
        """Return the 95% intervals of E, A and a; None if no error can be estimated."""
        gradients = np.array([[1, 0, 0], [0, 1, self.middle], [0, 0, 1]], float)
        halves = [half for gradient in gradients if (half := error_of([(self, gradient)])) is not None]
        if not halves:
            return None
        centres = gradients @ self.parameters
        low, high = centres - np.array(halves), centres + np.array(halves)
        scales = (bounded_exponential(low[1]), bounded_exponential(high[1]))
        return (max(0.0, float(low[0])), float(high[0])), scales, (max(0.0, float(low[2])), float(high[2]))

    def forecast_interval(self, size: float) -> Interval | None:
        """Return the 95% interval of the mean loss over as many seeds at a size; None if no error can be estimated."""
        half = error_of([(self, self.gradient(size))], further=True)
        if half is None:
            return None
        return self.at(size) * math.exp(-half), self.at(size) * bounded_exponential(half)

    def gradient(self, size: float) -> Numbers:
        """Return the derivatives of the logarithm of the loss at a size."""
        return _slopes(self.parameters, np.array([math.log(size) - self.middle]))[0]


def error_of(terms: Sequence[tuple[LawFit, Numbers]], *, further: bool = False) -> float | None:
    """Return half the width of the 95% interval of a quantity; None if no error can be estimated.

    Args:
        terms: laws with the same seeds, each with the derivatives of the quantity by the parameters of the law.
        further: include the error of losses that the law of the first term is not fitted to.
    """
    variances, freedoms = list[float](), list[float]()
    seeds = len(terms[0][0].seeds)
    if seeds > 1:
        effects = np.sum([law.seeds @ gradient for law, gradient in terms], axis=0)
        variances.append(float(effects @ effects) * seeds / (seeds - 1))
        freedoms.append(seeds - 1)
    for law, gradient in terms:
        if law.misfit is not None:
            variances.append(law.misfit * (float(np.square(law.sizes @ gradient).sum()) + further))
            freedoms.append(len(law.sizes) - PARAMETERS)
    if not variances:
        return None
    if further and seeds > 1:
        law, _ = terms[0]
        variances.append(law.noise)
        freedoms.append(len(law.sizes) * (seeds - 1))
    total = sum(variances)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(variance**2 / count for variance, count in zip(variances, freedoms, strict=True))
    return half_width(freedom) * math.sqrt(total)


def fit_law(sizes: Sequence[float], losses: Sequence[Sequence[float]]) -> LawFit:
    """Fit a law to losses, a row for each size and a column for each seed.

    Raises:
        SpecError: scipy is not installed.
    """
    log_sizes, values = np.log(np.asarray(sizes, float)), np.asarray(losses, float)
    middle = float(log_sizes.mean())
    x, y = log_sizes - middle, np.log(values)
    n_sizes, n_seeds = y.shape
    delta = _huber_threshold(y)
    parameters = _fitted_parameters(x, values, delta)
    residuals = y - np.log(_losses(parameters, x))[:, None]
    weights = np.minimum(1, delta / np.maximum(np.abs(residuals), np.finfo(float).tiny))
    slopes = _slopes(parameters, x)
    inverse = np.linalg.pinv(np.einsum("ij,ip,iq->pq", weights, slopes, slopes))
    seeds = np.einsum("ij,ip,pq->jq", weights * residuals, slopes, inverse)
    changes = weights.sum(axis=1)[:, None] * slopes @ inverse
    noise = float(y.var(axis=1, ddof=1).mean()) / n_seeds if n_seeds > 1 else 0.0
    misfit = None
    if n_sizes > PARAMETERS:
        project = np.eye(n_sizes) - slopes @ np.linalg.pinv(slopes)
        explained = 0.0
        if n_seeds > 1:
            explained = float(np.square(project @ (y - y.mean(axis=1)[:, None])).sum()) / (n_seeds - 1) / n_seeds
        total = float(np.square(project @ residuals.mean(axis=1)).sum())
        misfit = max(0.0, total - explained) / (n_sizes - PARAMETERS)
    return LawFit(parameters, middle, seeds, changes, noise, misfit)


def _losses(parameters: Numbers, x: Numbers) -> Numbers:
    losses: Numbers = parameters[0] + np.exp(parameters[1] - parameters[2] * x)
    return losses


def _slopes(parameters: Numbers, x: Numbers) -> Numbers:
    """Return the derivatives of the logarithms of losses, [sizes, 3]."""
    power = np.exp(parameters[1] - parameters[2] * x)
    return np.stack([np.ones_like(x), power, -x * power], axis=1) / (parameters[0] + power)[:, None]


def _huber_threshold(y: Numbers) -> float:
    """Return the residual beyond which a loss counts less: twice the standard deviation of seeds.

    With one seed, no run can be distinguished from a law that does not fit, so all losses count equally.
    """
    if y.shape[1] < 2:
        return math.inf
    return 2 * float(np.sqrt(y.var(axis=1, ddof=1).mean())) or HUBER


def _fitted_parameters(x: Numbers, values: Numbers, delta: float) -> Numbers:
    """Return the parameters of the law, from the best of several initial exponents."""
    y = np.log(values)

    def residuals(at: Numbers) -> Numbers:
        return (np.log(_losses(at, x))[:, None] - y).ravel()

    def jacobian(at: Numbers) -> Numbers:
        return _slopes(at, x).repeat(y.shape[1], axis=0)

    def solved(start: Numbers, loss: str, threshold: float = 1.0) -> Any:
        # The bounds of the search keep its steps finite.
        bounds = ([0, -50, 0], [values.max(), 50, STEEPEST])
        scale = [values.min(), 1, 1]
        tolerances = {"xtol": TOLERANCE, "ftol": TOLERANCE, "gtol": TOLERANCE}
        return import_scipy().optimize.least_squares(
            residuals, start, jacobian, bounds=bounds, x_scale=scale, loss=loss, f_scale=threshold, **tolerances
        )

    fits = [solved(_initial_parameters(x, values, guess), "linear") for guess in STARTS]
    parameters: Numbers = min(fits, key=lambda fit: fit.cost).x
    if math.isfinite(delta):
        parameters = solved(parameters, "huber", delta).x
    if parameters[0] < NEGLIGIBLE * values.min():
        parameters[0] = 0  # the search ends near its bounds, not at them
    return parameters


def _initial_parameters(x: Numbers, values: Numbers, exponent: float) -> Numbers:
    """Return the law with the given exponent that is nearest to the means, within the bounds of a law."""
    shape = np.stack([np.ones_like(x), np.exp(-exponent * x)], axis=1)
    floor, scale = np.linalg.lstsq(shape, values.mean(axis=1))[0]
    minimum = values.min()
    return np.array([np.clip(floor, 0.001 * minimum, 0.999 * minimum), math.log(max(scale, 0.001 * minimum)), exponent])


def bounded_exponential(value: float) -> float:
    """Return the exponential of a number, at most exp(700)."""
    return math.exp(min(value, 700.0))
