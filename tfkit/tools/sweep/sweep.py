"""A sweep from its file to its results: first the trials of tuning, then the runs of all seeds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from tfkit.commands import write_file, writing
from tfkit.plugin.manager import Plugins
from tfkit.run.checked_run import Run
from tfkit.run.read_sweep import read_sweep
from tfkit.run.sweep_spec import CompareConfig
from tfkit.tools.common.scipy_library import import_scipy
from tfkit.tools.sweep.arms import (
    EMPTY_CHOICE,
    Arms,
    Choice,
    SweepRun,
    call_all,
    check_margin,
    check_number,
    check_objectives,
)
from tfkit.tools.sweep.comparison import plan_remarks, sweep_results
from tfkit.tools.sweep.equal import arm_sizes, check_equal, check_transfer
from tfkit.tools.sweep.result import Results, Tuned, speed_of
from tfkit.tools.sweep.scaling import check_laws
from tfkit.tools.sweep.statistics import NEEDED_PAIRS
from tfkit.tools.sweep.tuning import OptunaSearch, Tuning
from tfkit.tools.sweep.work import (
    OnFailure,
    check_runs,
    is_complete,
    missing_runs,
    train_missing_runs,
    training_commands,
)
from tfkit.tools.train.plan import Plan

PAGE = "report.html"
OnProgress = Callable[[str, tuple[int, int], tuple[int, int]], None]


@dataclass(frozen=True)
class OutlineRow:
    """The runs of an arm, or its trials.

    Attributes:
        name: the arm.
        parameters: the parameters of its model.
        runs: the number of runs.
        done: the number of complete runs.
        steps: the total steps of the runs.
        flops: the total FLOPs of the runs.
        memory: the predicted peak memory of a run, in bytes.
        seconds: the total time of the runs, predicted from the speed of the arm's complete runs and trials, or else
            from the limits of the device; None without either.
    """

    name: str
    parameters: int
    runs: int
    done: int
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
    rows: tuple[OutlineRow, ...]


class Sweep:
    """A sweep that has been read and checked. Raises SpecError if the sweep is invalid.

    Args:
        name: the path of a file, or the name of a sweep that comes with tfkit.
        plugins: the plugins.
        folder: the folder of its runs.
        sets: changes of the base run, which all variants inherit.
        comparison: the metric to compare the runs on; by default the metric in the file. Tuning always uses the metric
            in the file.
        allow_change: accept runs that were trained by code other than the current code of their kinds.
    """

    def __init__(
        self,
        name: str | os.PathLike[str],
        plugins: Plugins,
        folder: Path | None,
        *,
        sets: Iterable[str] = (),
        comparison: CompareConfig | None = None,
        allow_change: bool = False,
    ) -> None:
        self.file = read_sweep(name, plugins, sets=list(sets))
        self.folder = folder or Path("sweeps") / self.file.name
        self.arms = Arms(self.file, plugins, self.folder, allow_change=allow_change)
        self._plugins = plugins
        self._tunings = self._tuned()
        check_runs(
            sweep_run for tuning in self._tunings.values() for trial in tuning.trials for sweep_run in trial.runs
        )
        self._sized = self._choices()
        check_runs(sweep_run for arm in self.arms.arms for sweep_run in self.arms.runs(arm, self._sized[arm.name]))
        self._sizes = self._checked()
        self._comparison = comparison or self.file.config.compare
        check_margin(self._comparison, len(self.file.variants))
        for arm, run in self._first_runs().items():
            check_number(arm, run, self._comparison.on)
        trials = (trial for tuning in self._tunings.values() for trial in tuning.trials)
        tuned = [sweep_run.run for trial in trials for sweep_run in trial.runs]
        for number in (self._comparison.on, self.file.config.fitted):
            check_objectives([*self._first_runs().values(), *tuned], number)

    def _tuned(self) -> dict[str, Tuning]:
        """Return the trials of each arm by name; empty without tuning."""
        tune = self.file.config.tune
        if tune is None:
            return {}
        kind = Tuning if tune.search is None else OptunaSearch
        tuned = [arm for arm in self.arms.arms if arm.tuned_as == arm.name]
        return {tuning.arm.name: tuning for tuning in call_all(partial(kind.of, self.arms, arm) for arm in tuned)}

    def _checked(self) -> dict[str, Plan]:
        plans = arm_sizes(self.arms, self._sized, self._plugins)
        check_equal(self.arms, plans, self.folder)
        check_transfer(self.arms, plans)
        check_laws(self.arms, plans)
        return plans

    def outline(self) -> Outline:
        """Return the runs and their costs.

        Runs whose values are not tuned yet count with the values of the first trial.
        """
        chosen, choices, unknown = self._chosen(), self._choices(), 0
        rows, all_runs = list[OutlineRow](), list[SweepRun]()
        for arm in self.arms.arms:
            size, tuning = self._sizes[arm.name], self._tunings.get(arm.name)
            trials = [sweep_run for trial in tuning.trials for sweep_run in trial.runs] if tuning else []
            runs = self.arms.runs(arm, choices[arm.name])
            is_tuned = not self._tunings or arm.name in chosen
            complete = {
                sweep_run.folder: sweep_run
                for sweep_run in (*trials, *(runs if is_tuned else ()))
                if is_complete(sweep_run)
            }
            if tuning is not None:
                n_runs = tuning.count * len(tuning.trials[0].runs)
                rows.append(_outline_row(f"{arm.name}, tuning", trials, size, complete, n_runs=n_runs))
                unknown += n_runs - len(trials)
            rows.append(_outline_row(arm.name, runs, size, complete))
            all_runs += [*trials, *runs]
        different = len({sweep_run.run.digest for sweep_run in all_runs})
        to_make = len(missing_runs(all_runs)) + unknown
        needed = NEEDED_PAIRS if any(arm.base != arm.name for arm in self.arms.arms) else None
        seeds = len(self.file.config.seeds)
        return Outline(self.file.name, str(self.folder), different + unknown, to_make, seeds, needed, tuple(rows))

    def run(
        self,
        *,
        jobs: int,
        options: Sequence[str] = (),
        on_progress: OnProgress = lambda *numbers: None,
        on_failure: OnFailure = lambda folder, error: None,
    ) -> Results:
        """Train the missing runs, and compare all runs. Raises SpecError if scipy is needed and missing.

        Args:
            jobs: the number of parallel processes.
            options: options of `tfkit train` that choose plugins.
            on_progress: called with the name of the stage, and the done and total numbers of its runs and steps.
            on_failure: called with the folder of a failed run, and its error, while other runs continue.
        """
        if len(self.file.config.seeds) > 1 and any(arm.base != arm.name for arm in self.arms.arms):
            import_scipy()  # before hours of training, not after them
        errors = dict[str, str]()
        more = bool(self._tunings)
        while more:
            errors |= _train_stage("tuning", self._waiting(), jobs, options, on_progress, on_failure)
            more = sum(tuning.go_on() for tuning in self._tunings.values()) > 0
        if self._choices() != self._sized:
            self._sized = self._choices()
            self._sizes = self._checked()
        errors |= _train_stage("runs", list(self._runs(self._chosen())), jobs, options, on_progress, on_failure)
        return self.so_far(errors)

    def commands(self, options: Sequence[str]) -> tuple[list[str], bool]:
        """Return the commands that train the missing runs, and whether more runs follow them.

        The runs of an arm follow its trials, and the trials of a search follow each other. The commands can run in any
        order, in parallel, and on several machines that share the folder.
        """
        trials = self._waiting()
        return training_commands(trials or list(self._runs(self._chosen())), options), bool(trials)

    def _waiting(self) -> list[SweepRun]:
        """Return the runs of the trials that are not complete."""
        return [run for tuning in self._tunings.values() for trial in tuning.waiting() for run in trial.runs]

    def so_far(self, errors: Mapping[str, str] | None = None) -> Results:
        """Compare the runs that are complete; `errors` are the errors of failed runs by folder."""
        trials = [trial for tuning in self._tunings.values() for trial in tuning.results()]
        compared = sweep_results(self.arms, self._chosen(), trials, self._sizes, dict(errors or {}), self._comparison)
        notes = plan_remarks(self.folder, compared.arms, compared.on, self.file.config.seeds)
        return replace(compared, notes=(*compared.notes, *notes))

    def write(self, results: Results) -> Path:
        """Write the page of the results; return its path."""
        from tfkit.tools.sweep.page import results_page

        path = self.folder / PAGE
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        config = self.file.config
        counts = f"{len(config.seeds)} seeds, {len(results.arms)} arms, base {config.base}"
        lines, origin = [config.description, counts], {"sweep": self.file.file}
        text = results_page(results, self._first_runs(), of="sweep", lines=lines, origin=origin)
        write_file(path, text, inside=self.folder)
        return path

    def _chosen(self) -> dict[str, tuple[Choice, Tuned]]:
        """Return the choice of each arm whose trials, or the trials of its first size, are complete."""
        best = {name: tuning.best() for name, tuning in self._tunings.items()}
        chosen = {}
        for arm in self.arms.arms:
            if (choice := best.get(arm.tuned_as)) is not None:
                values, tuned = choice
                chosen[arm.name] = values, tuned if arm.name == arm.tuned_as else replace(tuned, edge=())
        return chosen

    def _choices(self) -> dict[str, Choice]:
        """Return the values of each arm: the best values, or else the values of its first trial."""
        first = {name: tuning.trials[0].choice for name, tuning in self._tunings.items()}
        best = {name: choice for name, (choice, _) in self._chosen().items()}
        return {arm.name: best.get(arm.name, first.get(arm.tuned_as, EMPTY_CHOICE)) for arm in self.arms.arms}

    def _first_runs(self) -> dict[str, Run]:
        """Return the run of each arm on the first seed."""
        choices = self._choices()
        return {arm.name: self.arms.runs(arm, choices[arm.name])[0].run for arm in self.arms.arms}

    def _runs(self, chosen: dict[str, tuple[Choice, Tuned]]) -> Iterator[SweepRun]:
        """Yield the runs seed by seed, so that pairs are complete early; arms that are not tuned yet have none."""
        ready = [arm for arm in self.arms.arms if arm.name in chosen or not self._tunings]
        columns = [self.arms.runs(arm, chosen[arm.name][0] if chosen else EMPTY_CHOICE) for arm in ready]
        for pair in zip(*columns, strict=True):
            yield from pair


def _train_stage(
    stage: str,
    runs: Sequence[SweepRun],
    jobs: int,
    options: Sequence[str],
    on_progress: OnProgress,
    on_failure: OnFailure,
) -> dict[str, str]:
    """Train the missing runs of a stage; return the errors by folder."""
    to_train = missing_runs(runs)
    steps = sum(sweep_run.run.steps for sweep_run in to_train)
    failures = train_missing_runs(
        to_train,
        jobs=jobs,
        options=options,
        on_progress=lambda n_complete, n_steps: on_progress(stage, (n_complete, len(to_train)), (n_steps, steps)),
        on_failure=on_failure,
    )
    return {
        str(sweep_run.folder): failures[sweep_run.run.digest]
        for sweep_run in to_train
        if sweep_run.run.digest in failures
    }


def _outline_row(
    name: str, runs: Sequence[SweepRun], size: Plan, complete: Mapping[Path, SweepRun], *, n_runs: int | None = None
) -> OutlineRow:
    """Return the row of an arm with `runs`, or with `n_runs` if more will follow; `complete` includes trials."""
    n_runs = n_runs or len(runs)
    steps = runs[0].run.steps * n_runs
    return OutlineRow(
        name=name,
        parameters=size.parameters,
        runs=n_runs,
        done=sum(sweep_run.folder in complete for sweep_run in runs),
        steps=steps,
        flops=round(size.flops / size.steps * steps),
        memory=size.memory,
        seconds=_predicted_seconds(complete.values(), steps, size),
    )


def _predicted_seconds(complete: Iterable[SweepRun], steps: int, size: Plan) -> float | None:
    """Predict the time of `steps` from the speed of complete runs, or else from the limits of the device."""
    measured = [
        (speed, sweep_run.run.tokens_of_step) for sweep_run in complete if (speed := speed_of(sweep_run)) is not None
    ]
    if measured:
        return fmean(steps * tokens / speed for speed, tokens in measured)
    return None if size.seconds is None else size.seconds / size.steps * steps
