"""A run in this process, from its file to its result."""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeAlias

import click

from tfkit.arguments import AnyPath, Positive, Sets, checked
from tfkit.console.signals import asked_to_end
from tfkit.errors import SpecWarning
from tfkit.graph.run import Run, load_run
from tfkit.plugin.manager import Plugins, load_plugins
from tfkit.spec.changes import as_changes
from tfkit.spec.folder import RUN
from tfkit.spec.read_run import AnyRun
from tfkit.tools.common.atomic_files import write_file
from tfkit.tools.cost.of_run import flops_of_step
from tfkit.tools.train.environment import bits_of, environment
from tfkit.tools.train.history import History, history
from tfkit.tools.train.progress import Watch
from tfkit.tools.train.record import Follower, RunFolder, locked, named_by_meaning
from tfkit.tools.train.report import report
from tfkit.training import memory
from tfkit.training.loop import Trainer
from tfkit.training.processes import Processes

REPORT = "report.html"
RunArgument: TypeAlias = Annotated[AnyRun, "a run: its name, its path, its folder or a mapping"]


@dataclass(frozen=True)
class Trained:
    """A run, as it ended or was interrupted.

    Attributes:
        folder: its folder: `tfkit.build(folder)` is the model with its latest weights.
        step: updates so far.
        ended: `finished`, `interrupted`, or the reason of a callback to stop.
        history: its numbers and texts, from the first step on.
        made: updates that this process made; 0 if the run was complete before.
        tokens_per_second: the speed of this process; None if it made no step.
    """

    folder: Path
    step: int
    ended: str
    history: History
    made: int = 0
    tokens_per_second: float | None = None


@checked
def train(
    run: RunArgument,
    *,
    output: AnyPath | None = None,
    sets: Sets = (),
    stop_after: Positive | None = None,
    quiet: bool = False,
) -> Trained:
    """Train a model as a run says, as `tfkit train` does; the same folder continues.

    Args:
        run: the path of its file, the name of one that comes with tfkit, the folder of a run, or a mapping with the
            keys and values of its YAML.
        output: the run's folder; `runs/NAME-HASH` unless given.
        sets: changes, as `tfkit.load` takes them; those of the model begin with `model.`.
        stop_after: end after this step; another call continues.
        quiet: show no progress.

    Returns:
        The result, also of a run that was complete before.

    Raises:
        SpecError: the run is wrong; the folder holds another one; or a loss, gradient or weight is not finite.
    """
    plugins = load_plugins()
    loaded = load_run(run, plugins, sets=as_changes(sets), count=flops_of_step)
    for note in loaded.file.notes:
        warnings.warn(note.render("warning"), SpecWarning, stacklevel=3)
    folder = Path(output) if output is not None else folder_of(run, loaded)
    return train_run(loaded, folder, plugins, until=stop_after, quiet=quiet, command="tfkit.train")


def folder_of(name: AnyRun, run: Run) -> Path:
    """The folder of a run that is not given one: that which it was read from, or one by its meaning."""
    if isinstance(name, str | os.PathLike) and os.path.isfile(Path(name) / RUN):
        return Path(name)
    return named_by_meaning(run, lambda digest: Path("runs") / f"{run.config.name}-{digest[:8]}")


def train_run(
    run: Run,
    folder: Path,
    plugins: Plugins,
    *,
    command: str,
    until: int | None = None,
    quiet: bool = False,
    processes: Processes | None = None,
) -> Trained:
    """Train in this process, beside others if there are any, and write the folder; `command` is noted there."""
    processes = processes or Processes()
    with locked(folder):
        record = RunFolder(folder, run, bits_of(run, processes.count), environment(plugins))
        if processes.agreed(record.facts.ended):
            return _ended(record, run)
        for note in record.notes:
            click.echo(f"warning: the last digits may differ from before: {note}", err=True)
        watch = Watch(run.tokens_of_step, quiet=quiet)
        begin = time.perf_counter()
        with asked_to_end() as asked:
            trainer = Trainer(run, record, watchers=[watch], until=until, asked_to_end=asked, processes=processes)
            record.begin(command, datetime.now(UTC).isoformat(timespec="seconds"))
            for name, text in trainer.notes.items() if not quiet else ():
                click.echo(f"{name}: {text}", err=True)
            how = "failed"
            try:
                how = trainer.train()
            finally:
                watch.stop()
                finished = trainer.ended is not None and how != "failed"
                seconds, used = time.perf_counter() - begin, memory.peak(trainer.device)
                record.end(how, seconds, used, trainer.step, finished=finished)
        return _ended(record, run, watch)


def _ended(record: RunFolder, run: Run, watch: Watch | None = None) -> Trained:
    """The result of a run, whose report is written."""
    last, found = record.facts.sessions[-1], history(record.folder)
    write_file(record.folder / REPORT, report(run, record.facts, found))
    made, speed = (watch.last - watch.first, watch.tokens_per_second) if watch else (0, None)
    return Trained(record.folder, last["step"], last["ended"], found, made, speed)


def follow_run(run: Run, folder: Path, processes: Processes, *, until: int | None = None) -> None:
    """Train beside the process that writes the folder, unless it finds the run complete."""
    if processes.agreed(None) is None:
        with asked_to_end() as asked:
            Trainer(run, Follower(folder), until=until, asked_to_end=asked, processes=processes).train()
