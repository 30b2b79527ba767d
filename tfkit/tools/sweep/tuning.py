"""Trials of an arm, and the best of them: every combination of values, or the values that Optuna suggests.

A search stores nothing (https://optuna.org). Equal seeds suggest equal trials, and their complete runs are reused.
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
from tfkit.spec.read_sweep import Setting
from tfkit.spec.source import plain
from tfkit.spec.sweep import Range, SearchConfig
from tfkit.tools.sweep.arms import Arm, Arms, Choice, Trial, choices, collected
from tfkit.tools.sweep.result import Tried, Tuned, curve_of
from tfkit.tools.sweep.work import is_complete

NEAR = 0.02
"""The part of a range that is its edge, on both sides."""


class Tuning:
    """The trials of an arm: every combination of values.

    Attributes:
        arm: the arm.
        trials: those that are known; a search knows more as they are made.
        count: their number in the end.
    """

    def __init__(self, arms: Arms, arm: Arm, trials: Sequence[Trial], count: int) -> None:
        self.arms, self.arm, self.trials, self.count = arms, arm, list(trials), count

    @classmethod
    def of(cls, arms: Arms, arm: Arm) -> Self:
        """The trials of an arm; raises SpecError with the errors of all their runs."""
        every = collected(partial(arms.trial, arm, choice) for choice in choices(arms.file.tuned))
        return cls(arms, arm, every, len(every))

    def waiting(self) -> list[Trial]:
        """The trials to make next."""
        return [trial for trial in self.trials if not is_made(trial)]

    def go_on(self) -> bool:
        """Take in what was made; return True if there are more trials to make."""
        return False

    def best(self) -> tuple[Choice, Tuned] | None:
        """The choice with the best mean over the seeds of tuning; None if trials are to be made, or none has a mean."""
        best = self._best(self._means())
        if best is None:
            return None
        edge = tuple(path for path, value in best.choice.values.items() if self._at_edge(path, value))
        return best.choice, Tuned(best.choice.values, edge)

    def tried(self) -> list[Tried]:
        """All trials as data."""
        means, on = self._means(), self.arms.config.compare.on
        best = self._best(means)
        return [
            Tried(
                self.arm.name,
                trial.choice.values,
                trial.choice.words(),
                on,
                mean,
                trial is best,
                len(trial.cells),
                self.diverged(trial),
            )
            for trial, mean in zip(self.trials, means, strict=True)
        ]

    def mean(self, trial: Trial) -> float | None:
        """The mean of a trial over its seeds; None until its runs are made, or if it is no finite number."""
        if not is_made(trial):
            return None
        mean = fmean(curve_of(cell, self.arms.config.compare.on).last for cell in trial.cells)
        return mean if math.isfinite(mean) else None

    def diverged(self, trial: Trial) -> int:
        """Return the number of runs of a trial that diverged."""
        curves = (curve_of(cell, self.arms.config.compare.on) for cell in trial.cells if is_complete(cell))
        return sum(curve.diverged for curve in curves)

    def rank(self, mean: float | None) -> float:
        """A mean as a number of which less is better; infinite for none."""
        if mean is None:
            return math.inf
        return mean if self.arms.config.compare.lower else -mean

    def _means(self) -> list[float | None]:
        return [self.mean(trial) for trial in self.trials]

    def _best(self, means: Sequence[float | None]) -> Trial | None:
        """The trial with the best of the means; None if trials are to be made, or none has a mean."""
        index = min(range(len(means)), key=lambda index: self.rank(means[index]))
        return None if self.waiting() or means[index] is None else self.trials[index]

    def _at_edge(self, path: str, value: Any) -> bool:
        """True if a value is the least or the largest of the numbers that were tried, or near the end of a range."""
        tune = self.arms.config.tune
        assert tune is not None
        if path in tune.ranges:
            return not NEAR <= share_of(tune.ranges[path], value) <= 1 - NEAR
        tried = tune.over[path]
        numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in tried)
        return numbers and value in (min(tried), max(tried))


def share_of(range: Range, value: float) -> float:
    """The place of a value between the ends of its range, 0 to 1."""
    on_scale = math.log if range.scale == "log" else float
    low, high, at = map(on_scale, (range.low, range.high, value))
    return (at - low) / (high - low)


def is_made(trial: Trial) -> bool:
    """True if all runs of a trial are complete."""
    return all(map(is_complete, trial.cells))


DIGITS = 4
"""Significant digits of a value from a range: nobody reads more, and no result depends on them."""


class Search(Tuning):
    """The trials of an arm, each asked for when those before it are made."""

    def __init__(self, arms: Arms, arm: Arm, trials: Sequence[Trial], count: int) -> None:
        super().__init__(arms, arm, trials, count)
        assert arms.config.tune is not None
        assert arms.config.tune.search is not None
        self._study = _study(arms.config.tune.search)
        self._told = 0
        self._asked: Any = None
        self._catch_up()

    @classmethod
    def of(cls, arms: Arms, arm: Arm) -> Self:
        """The trials of an arm that were made, and the next one; raises SpecError."""
        assert arms.config.tune is not None
        assert arms.config.tune.search is not None
        return cls(arms, arm, (), arms.config.tune.search.trials)

    def waiting(self) -> list[Trial]:
        return self.trials[self._told :]

    def go_on(self) -> bool:
        if self._told < self.count:
            self._tell()
        return self._catch_up()

    def _catch_up(self) -> bool:
        """Ask for trials until one is to be made; return False if all were."""
        while self._told < self.count:
            if self._told == len(self.trials):
                with warnings.catch_warnings():  # the values of diverged trials are infinite, and `gp` clips them
                    warnings.filterwarnings("ignore", "Clip non-finite values")
                    self._asked = self._study.ask()
                    choice = _choice(self._asked, self.arms.file.tuned)
                self.trials.append(self.arms.trial(self.arm, choice))
            if not is_made(self.trials[-1]):
                return True
            self._tell()
        return False

    def _tell(self) -> None:
        """Report the result of the last trial to the study: infinite if a run diverged."""
        trial = self.trials[-1]
        rank = self.rank(self.mean(trial))
        if math.isfinite(rank) or self.diverged(trial):
            self._study.tell(self._asked, rank)
        else:
            self._study.tell(self._asked, state=_optuna().trial.TrialState.FAIL)
        self._told += 1


def _study(config: SearchConfig) -> Any:
    samplers = _optuna().samplers
    kinds = {"tpe": samplers.TPESampler, "gp": samplers.GPSampler, "random": samplers.RandomSampler}
    return _optuna().create_study(sampler=kinds[config.sampler](seed=config.seed))


def _choice(asked: Any, settings: Sequence[Setting]) -> Choice:
    """The values that Optuna asks for."""
    changes = []
    for setting in settings:
        if setting.range is None:
            changes.append(setting.values[asked.suggest_categorical(setting.path, range(len(setting.values)))])
        else:
            changes.append(setting.change(_number(asked, setting.path, setting.range)))
    values = {one.path: plain(change.value) for one, change in zip(settings, changes, strict=True)}
    return Choice(values, tuple(changes))


def _number(asked: Any, path: str, range: Range) -> int | float:
    if range.scale == "whole":
        whole: int = asked.suggest_int(path, int(range.low), int(range.high))
        return whole
    return float(f"{asked.suggest_float(path, range.low, range.high, log=range.scale == 'log'):.{DIGITS}g}")


def _optuna() -> ModuleType:
    try:
        import optuna  # type: ignore[import-not-found,unused-ignore]
    except ImportError as missing:
        message = "a search needs `optuna`, which is not installed"
        help = 'pip install "tfkit[sweep]", or list the values'
        raise SpecError(Diagnostic(message, help=help)) from missing
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
