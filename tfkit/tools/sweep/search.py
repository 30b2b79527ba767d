"""Trials that Optuna asks for, one after the other, each chosen by the results of those before (https://optuna.org).

Nothing is stored: equal seeds ask for equal trials, whose runs are then found or made.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Self

from tfkit.errors import Diagnostic, SpecError
from tfkit.spec.read_sweep import Setting
from tfkit.spec.source import plain
from tfkit.spec.sweep import Range, SearchConfig
from tfkit.tools.sweep.arms import Arm, Arms, Choice, Trial
from tfkit.tools.sweep.tuning import Tuning, is_made

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
