"""Training a run in this process, from its file to its result."""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeAlias

from tfkit.arguments import AnyPath, Positive, Sets, checked
from tfkit.commands import write_file
from tfkit.console.signals import asked_to_end
from tfkit.errors import Diagnostic, SpecError, SpecWarning, quoted
from tfkit.plugin.manager import Plugins, load_plugins
from tfkit.run.checked_run import Run, load_run
from tfkit.run.read_run import AnyRun
from tfkit.run.run_code import check_code, code_changes, code_of, session_code
from tfkit.run.run_facts import continued_run
from tfkit.run.training import memory
from tfkit.run.training.loop import DIVERGED, DivergedError, Trainer
from tfkit.run.training.processes import Processes
from tfkit.spec.folder import RUN
from tfkit.spec.merge import as_changes
from tfkit.tools.common.history import History, read_history
from tfkit.tools.cost.of_run import flops_of_step
from tfkit.tools.train.progress import TrainingProgress
from tfkit.tools.train.record import Follower, RunFolder, bits_of, current_environment, locked_folder
from tfkit.tools.train.report import run_report

REPORT = "report.html"
CHANGE_HELP = "--allow-change, or `allow_change=True`, continues with the current code; -o names a new folder"
RunArgument: TypeAlias = Annotated[AnyRun, "a run: its name, its path, its folder or a mapping"]


@dataclass(frozen=True)
class Trained:
    """A run that has ended or was interrupted.

    Attributes:
        folder: the run folder; `tfkit.build(folder)` is the model with its latest weights.
        step: the number of steps so far.
        ended: `finished`, `interrupted`, or a callback's reason to stop.
        history: all numbers and texts of the run.
        steps_made: the number of steps that this process trained; 0 if the run was already complete.
        tokens_per_second: the speed of this process; None if it trained no step.
    """

    folder: Path
    step: int
    ended: str
    history: History
    steps_made: int = 0
    tokens_per_second: float | None = None


@checked
def train(
    run: RunArgument,
    *,
    output: AnyPath | None = None,
    sets: Sets = (),
    stop_after: Positive | None = None,
    allow_change: bool = False,
    quiet: bool = False,
) -> Trained:
    """Train a model from a run, or resume an interrupted run, as `tfkit train` does.

    Args:
        run: the path of a run file, the name of a run that comes with tfkit, a run folder, or a mapping with the keys
            and values of the YAML.
        output: the run folder; by default `runs/NAME-HASH`.
        sets: changes, as `tfkit.load` takes them; changes of the model begin with `model.`.
        stop_after: the step after which to end; a later call resumes the run.
        allow_change: resume a run although the code of its kinds, or of the training loop, has changed.
        quiet: show no progress.

    Returns:
        The result, even if the run was already complete.

    Raises:
        SpecError: the run is invalid; the folder contains another run, or was trained by other code; or a loss, a
            gradient or a weight is not finite, in this call or in an earlier call.
    """
    plugins = load_plugins()
    loaded = load_run(run, plugins, sets=as_changes(sets), count=flops_of_step)
    for note in loaded.file.notes:
        warnings.warn(note.render("warning"), SpecWarning, stacklevel=3)
    folder = Path(output) if output is not None else folder_of(run, loaded)
    loaded = continued_run(loaded, folder)
    progress = TrainingProgress(loaded.tokens_before, quiet=quiet)
    return train_run(
        loaded, folder, plugins, until=stop_after, allow_change=allow_change, progress=progress, command="tfkit.train"
    )


def folder_of(name: AnyRun, run: Run) -> Path:
    """Return the default folder of a run: the folder that it was read from, else a folder named after its digest."""
    if isinstance(name, str | os.PathLike) and os.path.isfile(Path(name) / RUN):
        return Path(name)
    return Path("runs") / f"{run.config.name}-{run.digest[:8]}"


def train_run(
    run: Run,
    folder: Path,
    plugins: Plugins,
    *,
    command: str,
    until: int | None = None,
    allow_change: bool = False,
    progress: TrainingProgress | None = None,
    processes: Processes | None = None,
) -> Trained:
    """Train in this process, with any other processes of the launch, and write the run folder, including `command`."""
    progress = progress or TrainingProgress(run.tokens_before, quiet=True)
    processes = processes or Processes()
    with locked_folder(folder) as has_lock:
        if not has_lock:
            progress.warn(f"the file system of {folder} has no locks: start only one process that trains there")
        record = RunFolder(folder, run, bits_of(run, processes.count), current_environment(plugins))
        code = code_of(run)
        if not allow_change:
            check_code([(folder, record.facts, code)], help=CHANGE_HELP)
        if processes.agreed(record.facts.ended):
            return _report_result(record, run)
        _report_changes(record, run, progress)
        for note in code_changes(record.facts, folder, code):
            progress.warn(f"the run continues with other code: {note}")
        begin = time.perf_counter()
        with asked_to_end() as asked:
            trainer = Trainer(run, record, watchers=[progress], until=until, should_stop=asked, processes=processes)
            time_of_start = datetime.now(UTC).isoformat(timespec="seconds")
            record.begin(command, time_of_start, session_code(record.facts, folder, code))
            for name, text in trainer.notes.items():
                progress.note(f"{name}: {text}")
            _train_session(trainer, record, progress, begin)
        return _report_result(record, run, progress)


def _report_changes(record: RunFolder, run: Run, progress: TrainingProgress) -> None:
    for part in record.companions.omitted:
        progress.warn(f"not copied to checkpoints: {part}")
    if run.start_error is not None:
        progress.note(f"not needed any more: {run.start_error.diagnostics[0].message}")
    for note in record.notes:
        progress.warn(f"the last digits may differ from before: {note}")
    for note in record.changes:
        progress.note(f"changed: {note}")


def _train_session(trainer: Trainer, record: RunFolder, progress: TrainingProgress, begin: float) -> None:
    """Train, and record how the session ended, also if it failed."""
    how = "failed"
    try:
        how = trainer.train()
    except DivergedError:
        how = DIVERGED
        raise
    finally:
        progress.stop()
        finished = trainer.ended is not None and how != "failed"
        seconds, used = time.perf_counter() - begin, memory.peak_memory(trainer.device)
        record.end(how, seconds, used, trainer.step, finished=finished)
        if how == DIVERGED:
            _write_report(record, trainer.run)


def _report_result(record: RunFolder, run: Run, progress: TrainingProgress | None = None) -> Trained:
    """Write the report of a run and return its result; raise SpecError if the run diverged in an earlier process."""
    last, numbers = record.facts.sessions[-1], _write_report(record, run)
    if record.facts.ended == DIVERGED:
        causes = [text for _, name, text in numbers.texts if name == DIVERGED]
        message = f"the run in {quoted(str(record.folder))} diverged after step {last['step']:,}"
        help = "change the run, or name a new folder with -o to train it again"
        raise SpecError(Diagnostic(message, notes=tuple(causes[-1:]), help=help))
    steps, speed = (progress.last - progress.first, progress.tokens_per_second) if progress else (0, None)
    return Trained(record.folder, last["step"], last["ended"], numbers, steps, speed)


def _write_report(record: RunFolder, run: Run) -> History:
    """Write the report of a run, and return its numbers."""
    numbers = read_history(record.folder)
    write_file(record.folder / REPORT, run_report(run, record.facts, numbers), inside=record.folder)
    return numbers


def follow_run(run: Run, folder: Path, processes: Processes, *, until: int | None = None) -> None:
    """Train along with the process that writes the folder, unless that process reports the run as complete."""
    if processes.agreed(None) is None:
        with asked_to_end() as asked:
            Trainer(run, Follower(folder, run), until=until, should_stop=asked, processes=processes).train()
