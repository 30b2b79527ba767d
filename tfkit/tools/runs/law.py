"""The scaling law of runs in two variables, L = E + A / N^a + B / D^b, for N parameters and D tokens.

The fit is approach 3 of https://arxiv.org/abs/2203.15556: the Huber loss of the differences of logarithms, from several
initial exponents. Intervals come from a bootstrap over runs (https://arxiv.org/abs/2404.10102).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.plugin.manager import Plugins
from tfkit.tools.common.scipy_library import import_scipy
from tfkit.tools.runs.variants import read_runs
from tfkit.tools.sweep.law import HUBER, STARTS, STEEPEST
from tfkit.tools.sweep.result import curve_of
from tfkit.tools.sweep.statistics import Interval, half_width
from tfkit.tools.sweep.work import is_complete
from tfkit.tools.train.plan import run_plan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

DRAWS = 100
"""Samples of the bootstrap."""
MIN_RUNS = 6
"""Minimum number of runs for a law: one more than its parameters."""
MIN_SIZES = 3
"""Minimum number of different parameter counts, and of different token counts, for a law."""


@dataclass(frozen=True)
class JointLaw:
    """A law in parameters and tokens.

    Attributes:
        floor: E, the limit of the loss for many parameters and tokens.
        scales: A and B.
        exponents: a and b.
        intervals: 95% of E, A, B, a and b over runs.
        missed: the loss of the run with the most compute, minus the prediction of the law of the remaining runs.
        runs: the number of runs.
    """

    floor: float
    scales: tuple[float, float]
    exponents: tuple[float, float]
    intervals: tuple[Interval, ...]
    missed: float
    runs: int

    @property
    def growth(self) -> float:
        """Exponent with which the optimal number of parameters grows with compute, if compute is proportional to ND."""
        a, b = self.exponents
        return b / (a + b)

    def at(self, parameters: float, tokens: float) -> float:
        """Return the loss at a number of parameters and of tokens."""
        return _predicted_loss(np.array([self.floor, *self.scales, *self.exponents]), np.array([[parameters, tokens]]))[
            0
        ]


def law_of_runs(folders: Sequence[Path], plugins: Plugins, on: str) -> JointLaw:
    """Fit the law to the last values of a loss in finished runs. Raise SpecError if the runs do not determine a law."""
    sizes, losses = [], []
    for sweep_run in read_runs(folders, plugins, on):
        curve = curve_of(sweep_run, on)
        if not is_complete(sweep_run) or curve.diverged or curve.last <= 0:
            message = f"a law needs finished runs with a positive {quoted(on)}; got {quoted(str(sweep_run.folder))}"
            raise SpecError(Diagnostic(message, help="name the remaining runs"))
        size = run_plan(sweep_run.run)
        sizes.append((size.parameters, size.tokens))
        losses.append(curve.last)
    counts = [len({pair[number] for pair in sizes}) for number in (0, 1)]
    if len(sizes) < MIN_RUNS or min(counts) < MIN_SIZES:
        numbers = f"{len(sizes)} runs, {counts[0]} numbers of parameters and {counts[1]} of tokens"
        message = f"a law needs {MIN_RUNS} runs, {MIN_SIZES} numbers of parameters and {MIN_SIZES} of tokens"
        raise SpecError(Diagnostic(f"{message}; got {numbers}", help="train runs of further sizes and lengths"))
    return law_of(sizes, losses)


def law_of(sizes: Sequence[tuple[float, float]], losses: Sequence[float]) -> JointLaw:
    """Fit a law to losses at numbers of parameters and tokens. Raises SpecError if scipy is not installed."""
    points, values = np.asarray(sizes, float), np.asarray(losses, float)
    fitted = _fitted_parameters(points, values, list(product(STARTS, STARTS)))
    order = np.argsort(points.prod(axis=1), kind="stable")
    rest, last = order[:-1], order[-1]
    smaller = _fitted_parameters(points[rest], values[rest], [tuple(fitted[3:])])
    missed = float(values[last] - _predicted_loss(smaller, points[[last]])[0])
    random = np.random.default_rng(0)
    rows = (random.integers(len(values), size=len(values)) for _ in range(DRAWS))
    drawn = np.array([_fitted_parameters(points[row], values[row], [tuple(fitted[3:])]) for row in rows])
    floor, a_scale, b_scale, a, b = map(float, fitted)
    intervals = _parameter_intervals(fitted, drawn, len(values) - len(fitted))
    return JointLaw(floor, (a_scale, b_scale), (a, b), intervals, missed, len(values))


def _parameter_intervals(fitted: Numbers, drawn: Numbers, freedom: int) -> tuple[Interval, ...]:
    """Return 95% intervals: the bootstrap's standard error times the quantile of t, for A and B on a log scale."""

    def on_scale(law: Numbers) -> Numbers:
        return np.concatenate([law[..., :1], np.log(law[..., 1:3].clip(np.finfo(float).tiny)), law[..., 3:]], axis=-1)

    middle = on_scale(fitted)
    half = on_scale(drawn).std(axis=0, ddof=1) * half_width(freedom)
    ends = np.stack([middle - half, middle + half])
    ends[:, 1:3] = np.exp(ends[:, 1:3].clip(max=700))
    return tuple((max(0.0, float(low)), float(high)) for low, high in ends.T)


def _predicted_loss(law: Numbers, points: Numbers) -> Numbers:
    """Return E + A / N^a + B / D^b for E, A, B, a, b."""
    terms: Numbers = law[1:3] * points ** -law[3:]
    return np.asarray(law[0] + terms.sum(axis=1), float)


def _fitted_parameters(points: Numbers, values: Numbers, starts: Sequence[tuple[float, ...]]) -> Numbers:
    """Return E, A, B, a and b."""
    # For any exponents, scales relative to the mean size are of the order of the loss; A and B are not.
    middle = np.exp(np.log(points).mean(axis=0))
    x, y = points / middle, np.log(values)
    bounds = ([0.0] * 5, [values.max()] * 3 + [STEEPEST] * 2)

    def start(exponents: tuple[float, ...]) -> Numbers:
        """Return the law with these exponents that is nearest to the losses."""
        terms = np.column_stack([np.ones(len(x)), x ** -np.asarray(exponents)])
        scales, _ = import_scipy().optimize.nnls(terms, values)
        return np.clip([*scales, *exponents], 1e-6 * values.min(), np.array(bounds[1]) * (1 - 1e-9))

    fits = [
        import_scipy().optimize.least_squares(
            lambda at: np.log(_predicted_loss(at, x)) - y, start(exponents), bounds=bounds, loss="huber", f_scale=HUBER
        )
        for exponents in starts
    ]
    law: Numbers = min(fits, key=lambda fit: fit.cost).x
    return np.array([law[0], *(law[1:3] * middle ** law[3:]), *law[3:]])
