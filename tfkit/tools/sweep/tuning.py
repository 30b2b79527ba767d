"""Trials of an arm, and the best trial: every combination of values, or the values that Optuna suggests.

A search has no stored state (https://optuna.org): with equal seeds, Optuna suggests equal trials, whose complete runs
are reused.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from types import ModuleType
from typing import Any, Self

from tfkit.errors import Diagnostic, SpecError
from tfkit.run.read_sweep import Setting
from tfkit.run.sweep_spec import Range, SearchConfig
from tfkit.spec.source import plain_data
from tfkit.tools.sweep.arms import Arm, Arms, Choice, Trial, all_choices, call_all
from tfkit.tools.sweep.result import TrialResult, Tuned, curve_of
from tfkit.tools.sweep.work import is_complete

EDGE_FRACTION = 0.02
"""Fraction of a range that counts as its edge, at both ends."""


class Tuning:
    """The trials of an arm: every combination of values.

    Attributes:
        arm: the arm.
        trials: the trials so far; a search adds trials as their predecessors complete.
        count: the final number of trials.
    """

    def __init__(self, arms: Arms, arm: Arm, trials: Sequence[Trial], count: int) -> None:
        self.arms, self.arm, self.trials, self.count = arms, arm, list(trials), count
        self._final: dict[str, tuple[float | None, int]] = {}
        """The outcomes of trained trials by their values, so that the curves of a trial are read only once."""

    @classmethod
    def of(cls, arms: Arms, arm: Arm) -> Self:
        """Return the trials of an arm; raise SpecError with the errors of all their runs."""
        trials = call_all(partial(arms.trial, arm, choice) for choice in all_choices(arms.file.tuned))
        return cls(arms, arm, trials, len(trials))

    def waiting(self) -> list[Trial]:
        """Return the trials to train next."""
        return [trial for trial in self.trials if not is_trained(trial)]

    def go_on(self) -> bool:
        """Record the results of the trained trials; return True if there are more trials to train."""
        return False

    def best(self) -> tuple[Choice, Tuned] | None:
        """Return the choice with the best mean; None before all trials are complete, or if none has a mean."""
        best = self._best([mean for mean, _ in self._outcomes()])
        if best is None:
            return None
        edge = tuple(path for path, value in best.choice.values.items() if self._at_edge(path, value))
        return best.choice, Tuned(best.choice.values, edge)

    def results(self) -> list[TrialResult]:
        """Return the results of all trials."""
        outcomes = self._outcomes()
        best = self._best([mean for mean, _ in outcomes])
        return [
            TrialResult(
                self.arm.name,
                trial.choice.values,
                trial.choice.words(),
                self.arms.config.compare.on,
                mean,
                trial is best,
                len(trial.runs),
                diverged,
            )
            for trial, (mean, diverged) in zip(self.trials, outcomes, strict=True)
        ]

    def outcome(self, trial: Trial) -> tuple[float | None, int]:
        """Return the mean of a trial over its seeds, and the number of its runs that diverged.

        The mean is None before all runs are complete, or if it is not finite.
        """
        key = repr(trial.choice.values)
        if key in self._final:
            return self._final[key]
        complete = [sweep_run for sweep_run in trial.runs if is_complete(sweep_run)]
        curves = [curve_of(sweep_run, self.arms.config.compare.on) for sweep_run in complete]
        diverged = sum(curve.diverged for curve in curves)
        if len(curves) < len(trial.runs):
            return None, diverged
        mean = fmean(curve.last for curve in curves)
        self._final[key] = mean if math.isfinite(mean) else None, diverged
        return self._final[key]

    def rank(self, mean: float | None) -> float:
        """Return a number that is lower for a better mean; infinite for None."""
        if mean is None:
            return math.inf
        return mean if self.arms.config.compare.lower else -mean

    def _outcomes(self) -> list[tuple[float | None, int]]:
        return [self.outcome(trial) for trial in self.trials]

    def _best(self, means: Sequence[float | None]) -> Trial | None:
        """Return the trial with the best of `means`; None before all trials are complete, or if none has a mean."""
        index = min(range(len(means)), key=lambda index: self.rank(means[index]))
        return None if self.waiting() or means[index] is None else self.trials[index]

    def _at_edge(self, path: str, value: Any) -> bool:
        """Return True if a value is the smallest or largest of the numbers tried, or near an end of its range."""
        tune = self.arms.config.tune
        assert tune is not None
        if path in tune.ranges:
            return not EDGE_FRACTION <= share_of(tune.ranges[path], value) <= 1 - EDGE_FRACTION
        values = tune.over[path]
        numbers = all(isinstance(number, int | float) and not isinstance(number, bool) for number in values)
        return numbers and value in (min(values), max(values))


def share_of(range: Range, value: float) -> float:
    """Return the position of a value between the ends of its range, from 0 to 1."""
    on_scale = math.log if range.scale == "log" else float
    low, high, at = map(on_scale, (range.low, range.high, value))
    return (at - low) / (high - low)


def is_trained(trial: Trial) -> bool:
    """Return True if all runs of a trial are complete."""
    return all(map(is_complete, trial.runs))


DIGITS = 4
"""Significant digits of a value from a range. More digits would not affect a result."""


class OptunaSearch(Tuning):
    """The trials of an arm. Each is suggested after all earlier trials are complete."""

    def __init__(self, arms: Arms, arm: Arm, trials: Sequence[Trial], count: int) -> None:
        super().__init__(arms, arm, trials, count)
        assert arms.config.tune is not None
        assert arms.config.tune.search is not None
        self._study = _optuna_study(arms.config.tune.search)
        self._reported = 0
        self._suggested: Any = None
        self._catch_up()

    @classmethod
    def of(cls, arms: Arms, arm: Arm) -> Self:
        """Return the completed trials of an arm, and the next trial; raise SpecError if one of its runs is invalid."""
        assert arms.config.tune is not None
        assert arms.config.tune.search is not None
        return cls(arms, arm, (), arms.config.tune.search.trials)

    def waiting(self) -> list[Trial]:
        return self.trials[self._reported :]

    def go_on(self) -> bool:
        if self._reported < self.count:
            self._report()
        return self._catch_up()

    def _catch_up(self) -> bool:
        """Add trials until one must be trained; return False if all trials are trained."""
        while self._reported < self.count:
            if self._reported == len(self.trials):
                with warnings.catch_warnings():  # the values of diverged trials are infinite, and `gp` clips them
                    warnings.filterwarnings("ignore", "Clip non-finite values")
                    self._suggested = self._study.ask()
                    choice = _suggested_choice(self._suggested, self.arms.file.tuned)
                self.trials.append(self.arms.trial(self.arm, choice))
            if not is_trained(self.trials[-1]):
                return True
            self._report()
        return False

    def _report(self) -> None:
        """Report the result of the last trial to the study: infinite if a run diverged."""
        trial = self.trials[-1]
        mean, diverged = self.outcome(trial)
        rank = self.rank(mean)
        if math.isfinite(rank) or diverged:
            self._study.tell(self._suggested, rank)
        else:
            self._study.tell(self._suggested, state=_import_optuna().trial.TrialState.FAIL)
        self._reported += 1


def _optuna_study(config: SearchConfig) -> Any:
    samplers = _import_optuna().samplers
    kinds = {"tpe": samplers.TPESampler, "gp": samplers.GPSampler, "random": samplers.RandomSampler}
    return _import_optuna().create_study(sampler=kinds[config.sampler](seed=config.seed))


def _suggested_choice(suggestion: Any, settings: Sequence[Setting]) -> Choice:
    """Return the values that Optuna suggests."""
    changes = []
    for setting in settings:
        if setting.range is None:
            changes.append(setting.values[suggestion.suggest_categorical(setting.path, range(len(setting.values)))])
        else:
            changes.append(setting.change(_suggested_number(suggestion, setting.path, setting.range)))
    values = {setting.path: plain_data(change.value) for setting, change in zip(settings, changes, strict=True)}
    return Choice(values, tuple(changes))


def _suggested_number(suggestion: Any, path: str, range: Range) -> int | float:
    if range.scale == "whole":
        integer: int = suggestion.suggest_int(path, int(range.low), int(range.high))
        return integer
    return float(f"{suggestion.suggest_float(path, range.low, range.high, log=range.scale == 'log'):.{DIGITS}g}")


def _import_optuna() -> ModuleType:
    try:
        import optuna  # type: ignore[import-not-found,unused-ignore]
    except ImportError as missing:
        message = "a search needs `optuna`, which is not installed"
        help = 'pip install "tfkit[sweep]", or list the values'
        raise SpecError(Diagnostic(message, help=help)) from missing
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
