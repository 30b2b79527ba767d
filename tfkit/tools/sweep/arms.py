"""The arms of a sweep: each variant at each point of the grid, with the runs that it takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfkit.component import Data
from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.graph.run import Run, check_run
from tfkit.plugin.manager import Plugins
from tfkit.spec.merge import Change
from tfkit.spec.read_run import RunText, resolve_run
from tfkit.spec.read_sweep import Setting, SweepFile
from tfkit.spec.source import plain
from tfkit.spec.tree import Scalar
from tfkit.tools.cost.of_run import flops_of_step

LETTERS = 16
"""Digits of a run's digest that name its folder."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep, and its folder."""

    run: Run
    folder: Path

    @property
    def seed(self) -> int:
        """Its seed."""
        return self.run.config.seed


@dataclass(frozen=True)
class Choice:
    """A value for each setting of a kind, by path; empty where there is none."""

    values: dict[str, Any]
    changes: tuple[Change, ...]

    def words(self) -> str:
        """`lr 0.001, sequences 8`."""
        return ", ".join(f"{path.rpartition('.')[2]} {_word(value)}" for path, value in self.values.items())


@dataclass(frozen=True)
class Arm:
    """A variant at a point of the grid.

    Attributes:
        name: the variant, and the point if there is a grid.
        variant: the name of the variant.
        base: the name of the arm that it is compared to: that of the baseline at this point.
        text: the run, not resolved, before a choice of tuning is made.
    """

    name: str
    variant: str
    base: str
    text: RunText


class Arms:
    """The arms of a sweep, and the runs of each; raises SpecError with the errors of all runs."""

    def __init__(self, file: SweepFile, plugins: Plugins, folder: Path) -> None:
        self.file, self.config = file, file.config
        self._plugins, self._folder = plugins, folder / "runs"
        self._data: dict[str, Data] = {}
        self.choices = list(_choices(file.tuned))
        self.arms = _collected(self._arm(*one) for one in itertools.product(file.variants, _choices(file.grid)))
        self.trials: dict[str, list[list[Cell]]] = {}
        """For each arm, and each choice to try, a run on each seed of tuning."""
        if file.tuned:
            tried = _collected(lambda arm=arm: (arm.name, self._trials(arm)) for arm in self.arms)
            self.trials = dict(tried)
        self._cells: dict[tuple[str, int], list[Cell]] = {}
        _collected(lambda arm=arm: self.cells(arm) for arm in self.arms)

    def cells(self, arm: Arm, choice: int = 0) -> list[Cell]:
        """The runs of an arm, one for each seed, with the values of a choice."""
        key = arm.name, choice
        if key not in self._cells:
            text = self._chosen(arm.text, self.choices[choice])
            self._cells[key] = [self._cell(text, seed) for seed in self.config.seeds]
        return self._cells[key]

    def arm(self, name: str) -> Arm:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)

    def _arm(self, variant: str, point: Choice) -> Any:
        def made() -> Arm:
            where = f", {point.words()}" if point.values else ""
            text = self._chosen(self.file.variants[variant], point)
            return Arm(f"{variant}{where}", variant, f"{self.config.compare.to}{where}", text)

        return made

    def _chosen(self, text: RunText, choice: Choice) -> RunText:
        for change in choice.changes:
            text = text.assigned(change, self._plugins)
        return text

    def _trials(self, arm: Arm) -> list[list[Cell]]:
        tune = self.config.tune
        assert tune is not None
        found = []
        for choice in self.choices:
            text = self._chosen(arm.text, choice)
            if tune.steps is not None:
                text = text.of_length(Scalar(tune.steps, text.root.span))
            found.append([self._cell(text, seed) for seed in tune.seeds])
        return found

    def _cell(self, text: RunText, seed: int) -> Cell:
        span = text.root.span
        seeded = text.assigned(Change((("seed", span),), Scalar(seed, span)), self._plugins)
        run = check_run(resolve_run(seeded, self._plugins, known=self._data), count=flops_of_step)
        _check_number(self.file, run)
        return Cell(run, self._folder / run.digest[:LETTERS])


def _choices(settings: Sequence[Setting]) -> Iterator[Choice]:
    """Each combination of values."""
    for changes in itertools.product(*(one.values for one in settings)):
        yield Choice({one.path: plain(change.value) for one, change in zip(settings, changes, strict=True)}, changes)


def _collected(makers: Iterable[Any]) -> list[Any]:
    """The results of functions; raises SpecError with the errors of all of them."""
    found: list[Any] = []
    errors: list[Diagnostic] = []
    for make in makers:
        try:
            found.append(make())
        except SpecError as wrong:
            errors += wrong.diagnostics
    if errors:
        raise SpecError(*errors)
    return found


def _check_number(file: SweepFile, run: Run) -> None:
    """Raise SpecError if a run does not compute the number that variants are compared on."""
    evaluations, on = run.config.eval, file.config.compare.on
    if evaluations is None:
        help = "for instance `eval: {every: 500, splits: {val: all}}`"
        message = f"the run has no `eval`, and so no {quoted(on)} to compare"
        raise SpecError(Diagnostic(message, file.provenance.span(("compare", "on")), "compare.on", help=help))
    names = [f"{split}.{metric.kind_name()}" for split in evaluations.splits for metric in evaluations.metrics]
    if on not in names:
        notes = (f"numbers of its evaluations: {', '.join(names)}",)
        raise file.error(f"the run computes no {quoted(on)}", "compare", "on", notes=notes)


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
