"""A sweep from its file to its results: first the trials of tuning, then the runs of all seeds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from tfkit.graph.run import Run
from tfkit.plugin.manager import Plugins
from tfkit.spec.read_sweep import read_sweep
from tfkit.spec.sweep import CompareConfig
from tfkit.tools.common.atomic_files import write_file, writing
from tfkit.tools.sweep.arms import NOTHING, Arms, Cell, Choice, check_margin, check_number, collected
from tfkit.tools.sweep.equal import check_equal, sizes
from tfkit.tools.sweep.remarks import plan_remarks
from tfkit.tools.sweep.result import Results, Tuned, speed_of
from tfkit.tools.sweep.results import results
from tfkit.tools.sweep.scaling import check_laws
from tfkit.tools.sweep.statistics import NEEDED_PAIRS
from tfkit.tools.sweep.tuning import Search, Tuning
from tfkit.tools.sweep.work import Failed, check_runs, is_complete, missing, work
from tfkit.tools.train.plan import Plan

PAGE = "report.html"
Told = Callable[[str, tuple[int, int], tuple[int, int]], None]


@dataclass(frozen=True)
class Row:
    """The runs of an arm, or its trials.

    Attributes:
        name: the arm.
        parameters: those of its model.
        runs: their number.
        there: those that are complete.
        steps: the steps of all of them.
        flops: their FLOPs.
        memory: the bytes in use at the peak of one, as predicted.
        seconds: the time of all of them, if all are as quick as the arm's runs and trials that are there; if none is,
            the least that their device needs; None where nothing is known of it.
    """

    name: str
    parameters: int
    runs: int
    there: int
    steps: int
    flops: int
    memory: int
    seconds: float | None


@dataclass(frozen=True)
class Outline:
    """A sweep before it runs.

    Attributes:
        name: the sweep.
        folder: its folder.
        different: the number of runs; a run that several arms share counts once.
        missing: the number of runs to train.
        seeds: the number of seeds.
        needed: the number of seeds that a verdict needs; None if no arm is compared to another.
        rows: the runs of each arm.
    """

    name: str
    folder: str
    different: int
    missing: int
    seeds: int
    needed: int | None
    rows: tuple[Row, ...]


class Sweep:
    """A sweep that was read and checked; raises SpecError.

    Args:
        name: a file, or the name of a sweep that comes with tfkit.
        plugins: the plugins.
        folder: the place of its runs.
        sets: changes of the run that all variants begin with.
        shown: the number to compare the runs on, once they are made; that of the file unless given. What is tuned is
            tuned by that of the file.
        allow_change: take runs that were trained by other code than their kinds have now.
    """

    def __init__(
        self,
        name: str | os.PathLike[str],
        plugins: Plugins,
        folder: Path | None,
        *,
        sets: Iterable[str] = (),
        shown: CompareConfig | None = None,
        allow_change: bool = False,
    ) -> None:
        self.file = read_sweep(name, plugins, sets=list(sets))
        self.folder = folder or Path("sweeps") / self.file.name
        self.arms = Arms(self.file, plugins, self.folder, allow_change=allow_change)
        self._plugins = plugins
        self._tunings = self._tuned()
        check_runs(cell for tuning in self._tunings.values() for trial in tuning.trials for cell in trial.cells)
        self._sized = self._choices()
        check_runs(cell for arm in self.arms.arms for cell in self.arms.cells(arm, self._sized[arm.name]))
        self._sizes = self._checked()
        self._shown = shown or self.file.config.compare
        check_margin(self._shown, len(self.file.variants))
        for arm, run in self._first_runs().items():
            check_number(arm, run, self._shown.on)

    def _tuned(self) -> dict[str, Tuning]:
        """The trials of each arm by its name; empty if nothing is tuned."""
        tune = self.file.config.tune
        if tune is None:
            return {}
        kind = Tuning if tune.search is None else Search
        return {one.arm.name: one for one in collected(partial(kind.of, self.arms, arm) for arm in self.arms.arms)}

    def _checked(self) -> dict[str, Plan]:
        found = sizes(self.arms, self._sized, self._plugins)
        check_equal(self.arms, found, self.folder)
        check_laws(self.arms, found)
        return found

    def outline(self) -> Outline:
        """Its runs and costs. Runs whose values are yet to be tuned count with those that are tried first."""
        chosen, choices, rows, every, unknown = self._chosen(), self._choices(), list[Row](), list[Cell](), 0
        for arm in self.arms.arms:
            size, tuning = self._sizes[arm.name], self._tunings.get(arm.name)
            trials = [cell for trial in tuning.trials for cell in trial.cells] if tuning else []
            cells = self.arms.cells(arm, choices[arm.name])
            known = tuning is None or arm.name in chosen
            like = {cell.folder: cell for cell in (*trials, *(cells if known else ())) if is_complete(cell)}
            if tuning is not None:
                runs = tuning.count * len(tuning.trials[0].cells)
                rows.append(_row(f"{arm.name}, tuning", trials, size, like, runs=runs))
                unknown += runs - len(trials)
            rows.append(_row(arm.name, cells, size, like))
            every += [*trials, *cells]
        different = len({cell.run.digest for cell in every})
        to_make = len(missing(every)) + unknown
        needed = NEEDED_PAIRS if any(arm.base != arm.name for arm in self.arms.arms) else None
        seeds = len(self.file.config.seeds)
        return Outline(self.file.name, str(self.folder), different + unknown, to_make, seeds, needed, tuple(rows))

    def run(
        self,
        *,
        jobs: int,
        options: Sequence[str] = (),
        told: Told = lambda *numbers: None,
        failed: Failed = lambda folder, error: None,
    ) -> Results:
        """Make the runs that are missing, and compare all.

        Args:
            jobs: processes at once.
            options: those of `tfkit train` that choose plugins.
            told: called with a word for the stage, and the runs and steps that are done and that there are.
            failed: called with the folder of a run that failed, and its error, while others are made.
        """
        errors = dict[str, str]()
        more = bool(self._tunings)
        while more:
            trials = [cell for one in self._tunings.values() for trial in one.waiting() for cell in trial.cells]
            errors |= _made("tuning", trials, jobs, options, told, failed)
            more = sum(one.go_on() for one in self._tunings.values()) > 0
        if self._choices() != self._sized:
            self._sized = self._choices()
            self._sizes = self._checked()
        errors |= _made("runs", list(self._cells(self._chosen())), jobs, options, told, failed)
        return self.so_far(errors)

    def so_far(self, errors: Mapping[str, str] | None = None) -> Results:
        """Compare the runs that are complete; `errors` are those of runs that failed, by their folders."""
        trials = [one for tuning in self._tunings.values() for one in tuning.tried()]
        compared = results(self.arms, self._chosen(), trials, self._sizes, dict(errors or {}), self._shown)
        notes = plan_remarks(self.folder, compared.arms, compared.on, self.file.config.seeds)
        return replace(compared, notes=(*compared.notes, *notes))

    def write(self, found: Results) -> Path:
        """Write the page of the results; return its path."""
        from tfkit.tools.sweep.page import page

        place = self.folder / PAGE
        with writing(place):
            place.parent.mkdir(parents=True, exist_ok=True)
        config = self.file.config
        counts = f"{len(config.seeds)} seeds, {len(found.arms)} arms, base {config.base}"
        lines, origin = [config.description, counts], {"sweep": self.file.file}
        text = page(found, self._first_runs(), of="sweep", lines=lines, origin=origin)
        write_file(place, text)
        return place

    def _chosen(self) -> dict[str, tuple[Choice, Tuned]]:
        """The choice of each arm whose trials are made."""
        found = ((name, tuning.best()) for name, tuning in self._tunings.items())
        return {name: choice for name, choice in found if choice is not None}

    def _choices(self) -> dict[str, Choice]:
        """The values of each arm: the best ones, or those that are tried first."""
        first = {name: tuning.trials[0].choice for name, tuning in self._tunings.items()}
        best = {name: choice for name, (choice, _) in self._chosen().items()}
        return {arm.name: {**first, **best}.get(arm.name, NOTHING) for arm in self.arms.arms}

    def _first_runs(self) -> dict[str, Run]:
        """The run of each arm on the first seed."""
        choices = self._choices()
        return {arm.name: self.arms.cells(arm, choices[arm.name])[0].run for arm in self.arms.arms}

    def _cells(self, chosen: dict[str, tuple[Choice, Tuned]]) -> Iterator[Cell]:
        """The runs of all seeds, arm by arm, so that pairs are complete early; none of an arm that is not tuned."""
        ready = [arm for arm in self.arms.arms if arm.name in chosen or not self._tunings]
        every = [self.arms.cells(arm, chosen[arm.name][0] if chosen else NOTHING) for arm in ready]
        for pair in zip(*every, strict=True):
            yield from pair


def _made(
    what: str, cells: Sequence[Cell], jobs: int, options: Sequence[str], told: Told, failed: Failed
) -> dict[str, str]:
    """Make the missing runs of a stage; return the errors by folder."""
    wanted = missing(cells)
    steps = sum(cell.run.steps for cell in wanted)
    wrong = work(
        wanted,
        jobs=jobs,
        options=options,
        told=lambda runs, done: told(what, (runs, len(wanted)), (done, steps)),
        failed=failed,
    )
    return {str(cell.folder): wrong[cell.run.digest] for cell in wanted if cell.run.digest in wrong}


def _row(name: str, cells: Sequence[Cell], size: Plan, like: Mapping[Path, Cell], *, runs: int | None = None) -> Row:
    """The runs of an arm, `runs` if there are more than `cells`; `like` are the complete ones, trials included."""
    runs = runs or len(cells)
    steps = cells[0].run.steps * runs
    return Row(
        name=name,
        parameters=size.parameters,
        runs=runs,
        there=sum(cell.folder in like for cell in cells),
        steps=steps,
        flops=round(size.flops / size.steps * steps),
        memory=size.memory,
        seconds=_seconds(like.values(), steps, size),
    )


def _seconds(like: Iterable[Cell], steps: int, size: Plan) -> float | None:
    """The time of this many steps, as quick as those of runs that are there, or else as a device could be."""
    measured = [(speed, cell.run.tokens_of_step) for cell in like if (speed := speed_of(cell)) is not None]
    if measured:
        return fmean(steps * tokens / speed for speed, tokens in measured)
    return None if size.seconds is None else size.seconds / size.steps * steps
