"""A sweep from its file to its results: first the trials of tuning, then the runs of all seeds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfkit.plugin.manager import Plugins
from tfkit.spec.read_sweep import read_sweep
from tfkit.tools.common.atomic_files import write_file
from tfkit.tools.sweep.arms import Arms, Cell
from tfkit.tools.sweep.equal import check_equal, sizes
from tfkit.tools.sweep.results import Results, Tuned, best_choice, results
from tfkit.tools.sweep.work import is_complete, missing, work
from tfkit.tools.train.plan import Plan

PAGE = "report.html"
Told = Callable[[str, tuple[int, int], tuple[int, int]], None]


@dataclass(frozen=True)
class Row:
    """The runs of an arm, or its trials: their number, those complete, and their steps and FLOPs together."""

    name: str
    parameters: int
    runs: int
    there: int
    steps: int
    flops: int


@dataclass(frozen=True)
class Outline:
    """A sweep before it runs. `different` counts a run once that several arms share, and `missing` of those to make."""

    name: str
    folder: str
    different: int
    missing: int
    rows: tuple[Row, ...]


class Sweep:
    """A sweep that was read and checked; raises SpecError.

    Args:
        name: a file, or the name of a sweep that comes with tfkit.
        plugins: the plugins.
        folder: the place of its runs.
        sets: changes of the run that all variants begin with.
    """

    def __init__(
        self, name: str | os.PathLike[str], plugins: Plugins, folder: Path | None, *, sets: Iterable[str] = ()
    ) -> None:
        self.file = read_sweep(name, plugins, sets=sets)
        self.folder = folder or Path("sweeps") / self.file.name
        self.arms = Arms(self.file, plugins, self.folder)
        self._sizes = self._checked({})

    def _checked(self, choices: dict[str, int]) -> dict[str, Plan]:
        found = sizes(self.arms, choices)
        check_equal(self.arms, found, self.folder)
        return found

    def outline(self) -> Outline:
        """Its runs and costs. Runs whose values are yet to be tuned count with those that are tried first."""
        chosen, rows, every = self._chosen(), list[Row](), list[Cell]()
        for arm in self.arms.arms:
            size = self._sizes[arm.name]
            trials = [cell for cells in self.arms.trials.get(arm.name, ()) for cell in cells]
            if trials:
                rows.append(_row(f"{arm.name}, tuning", trials, size))
            known = not trials or arm.name in chosen
            index = chosen[arm.name][0] if arm.name in chosen else 0
            cells = self.arms.cells(arm, index)
            rows.append(_row(arm.name, cells, size, known=known))
            every += [*trials, *cells]
        different = len({cell.run.digest for cell in every})
        return Outline(self.file.name, str(self.folder), different, len(missing(every)), tuple(rows))

    def run(self, *, jobs: int, options: Sequence[str] = (), told: Told = lambda *numbers: None) -> Results:
        """Make the runs that are missing, and compare all.

        Args:
            jobs: processes at once.
            options: those of `tfkit train` that choose plugins.
            told: called with a word for the stage, and the runs and steps that are done and that there are.
        """
        trials = [cell for choices in self.arms.trials.values() for cells in choices for cell in cells]
        errors = _made("tuning", trials, jobs, options, told)
        chosen = self._chosen()
        if chosen:
            self._sizes = self._checked({name: index for name, (index, _) in chosen.items()})
        errors |= _made("runs", list(self._cells(chosen)), jobs, options, told)
        return results(self.arms, chosen, self._sizes, errors)

    def write(self, found: Results) -> Path:
        """Write the page of the results; return its path."""
        from tfkit.tools.sweep.page import page

        place = self.folder / PAGE
        place.parent.mkdir(parents=True, exist_ok=True)
        write_file(place, page(self.arms, found))
        return place

    def _chosen(self) -> dict[str, tuple[int, Tuned]]:
        """The choice of each arm whose trials are complete."""
        found = ((arm.name, best_choice(self.arms, arm)) for arm in self.arms.arms if self.arms.trials)
        return {name: choice for name, choice in found if choice is not None}

    def _cells(self, chosen: dict[str, tuple[int, Tuned]]) -> Iterator[Cell]:
        """The runs of all seeds, arm by arm, so that pairs are complete early; none of an arm that is not tuned."""
        ready = [arm for arm in self.arms.arms if arm.name in chosen or not self.arms.trials]
        every = [self.arms.cells(arm, chosen[arm.name][0] if chosen else 0) for arm in ready]
        for pair in zip(*every, strict=True):
            yield from pair


def _made(what: str, cells: Sequence[Cell], jobs: int, options: Sequence[str], told: Told) -> dict[str, str]:
    """Make the missing runs of a stage; return the errors by folder."""
    wanted = missing(cells)
    steps = sum(cell.run.steps for cell in wanted)
    wrong = work(
        wanted,
        jobs=jobs,
        options=options,
        told=lambda runs, done: told(what, (runs, len(wanted)), (done, steps)),
    )
    return {str(cell.folder): wrong[cell.run.digest] for cell in wanted if cell.run.digest in wrong}


def _row(name: str, cells: Sequence[Cell], size: Plan, *, known: bool = True) -> Row:
    steps = sum(cell.run.steps for cell in cells)
    there = sum(map(is_complete, cells)) if known else 0
    return Row(name, size.parameters, len(cells), there, steps, round(size.flops / size.steps * steps))
