"""Training of the missing runs of a sweep, each in a separate process.

Only the run folder records whether a run is complete. The training process inherits the lock on the folder, and the
system releases the lock when that process exits, for any reason. Two sweeps can therefore share a folder, and a sweep
waits for training processes that a killed sweep left behind.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from tfkit.commands import check_inside, create_folder, write_file, writing
from tfkit.errors import SpecError
from tfkit.run.checked_run import Run
from tfkit.run.run_code import check_code
from tfkit.run.run_facts import Facts, facts_of
from tfkit.run.run_spec import render_run
from tfkit.spec.folder import RUN
from tfkit.spec.header import open_regular
from tfkit.tools.common.atomic_files import try_lock
from tfkit.tools.common.history import METRICS
from tfkit.tools.sweep.arms import SweepRun

LOCK = ".sweep"
PAUSE = 0.2
CHANGE_HELP = "--allow-change accepts these runs; -o names a new folder"
TAIL = 4096
"""Number of bytes at the end of `metrics.jsonl` that contain its last line."""
OnProgress = Callable[[int, int], None]
OnFailure = Callable[[Path, str], None]


@dataclass
class _Process:
    sweep_run: SweepRun
    popen: subprocess.Popen[bytes]
    errors: IO[bytes]
    gpu: str | None


def check_runs(runs: Iterable[SweepRun]) -> None:
    """Raise SpecError for all runs that were trained by code other than the current code of their kinds."""
    checked = {sweep_run.folder: sweep_run for sweep_run in runs if not sweep_run.allow_change}
    _check_code([(sweep_run, facts_of(sweep_run.folder, sweep_run.run)) for sweep_run in checked.values()])


def is_complete(sweep_run: SweepRun) -> bool:
    """Return True if the run is complete; raise SpecError if its folder is unreadable or contains a different run."""
    facts = facts_of(sweep_run.folder, sweep_run.run)
    _check_code([] if sweep_run.allow_change else [(sweep_run, facts)])
    return facts is not None and facts.ended is not None


def _check_code(records: Sequence[tuple[SweepRun, Facts | None]]) -> None:
    runs = ((sweep_run.folder, facts, sweep_run.code) for sweep_run, facts in records if facts is not None)
    check_code(runs, help=CHANGE_HELP)


def missing_runs(runs: Sequence[SweepRun]) -> list[SweepRun]:
    """Return the runs that are not complete, without duplicates."""
    return [
        sweep_run
        for sweep_run in {sweep_run.run.digest: sweep_run for sweep_run in runs}.values()
        if not is_complete(sweep_run)
    ]


def train_missing_runs(
    runs: Sequence[SweepRun], *, jobs: int, options: Sequence[str], on_progress: OnProgress, on_failure: OnFailure
) -> dict[str, str]:
    """Train the missing runs; return the errors of failed runs by digest.

    Args:
        runs: the runs.
        jobs: the number of parallel processes.
        options: options of `tfkit train` that choose plugins.
        on_progress: called with the number of complete runs, and the total number of completed steps.
        on_failure: called with the folder of a failed run, and its error, as soon as the run fails.
    """
    to_train, errors = missing_runs(runs), dict[str, str]()
    waiting, running = list(to_train), list[_Process]()
    try:
        while waiting or running:
            for sweep_run in list(waiting):
                if len(running) < jobs and (lock := _lock_run(sweep_run)) is not None:
                    waiting.remove(sweep_run)
                    running += _start_process(sweep_run, lock, options, _least_used_gpu(sweep_run, running))
            for process in [process for process in running if process.popen.poll() is not None]:
                running.remove(process)
                cause = _cause_of_failure(process)
                if not is_complete(process.sweep_run):
                    errors[process.sweep_run.run.digest] = cause
                    on_failure(process.sweep_run.folder, cause)
            on_progress(len(to_train) - len(waiting) - len(running), sum(map(_completed_steps, to_train)))
            time.sleep(PAUSE)
    finally:
        _terminate_processes(running)
    return errors


def _least_used_gpu(sweep_run: SweepRun, running: Sequence[_Process]) -> str | None:
    """Return the GPU with the fewest processes, a name in `CUDA_VISIBLE_DEVICES`; None if the run names its device."""
    if sweep_run.run.config.machine.device != "cuda":
        return None
    count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",")[:count] if visible else [str(index) for index in range(count)]
    return min(gpus, key=[process.gpu for process in running].count, default=None)


def _start_process(sweep_run: SweepRun, lock: int, options: Sequence[str], gpu: str | None) -> list[_Process]:
    """Start the process of a run; return an empty list if another process has completed it."""
    try:
        if is_complete(sweep_run):
            return []
        write_file(sweep_run.folder / RUN, _run_text(sweep_run.run), inside=sweep_run.sweep_folder)
        command = [sys.executable, "-m", "tfkit", *arguments_of(sweep_run, options)]
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "OMP_NUM_THREADS": "1", **visible},
            pass_fds=(lock,),
            start_new_session=True,  # Ctrl-C must reach only the sweep, which then ends its processes
        )
        return [_Process(sweep_run, popen, errors, gpu)]
    finally:
        os.close(lock)


def training_commands(runs: Sequence[SweepRun], options: Sequence[str]) -> list[str]:
    """Write the files of the missing runs, and return for each the command that trains it."""
    to_train = missing_runs(runs)
    for sweep_run in to_train:
        create_folder(sweep_run.folder, inside=sweep_run.sweep_folder)
        write_file(sweep_run.folder / RUN, _run_text(sweep_run.run), inside=sweep_run.sweep_folder)
    return [shlex.join(["tfkit", *arguments_of(sweep_run, options)]) for sweep_run in to_train]


def arguments_of(sweep_run: SweepRun, options: Sequence[str]) -> list[str]:
    """Return the arguments of `tfkit` that train a run whose file is in its folder."""
    return ["train", str(sweep_run.folder), *options]


def _run_text(run: Run) -> str:
    return render_run(run.config, run.written)


def _lock_run(sweep_run: SweepRun) -> int | None:
    """Lock a run and return the file descriptor; None if another process holds the lock."""
    create_folder(sweep_run.folder, inside=sweep_run.sweep_folder)
    check_inside(sweep_run.folder / LOCK, sweep_run.folder)
    with writing(sweep_run.folder):
        lock = os.open(sweep_run.folder / LOCK, os.O_CREAT | os.O_RDWR)
    with suppress(OSError):  # the system has no locks
        if not try_lock(lock):
            os.close(lock)
            return None
    return lock


def _terminate_processes(running: Sequence[_Process]) -> None:
    """Terminate processes, which then write their checkpoints, and wait for them."""
    for process in running:
        process.popen.terminate()
    for process in running:
        process.popen.wait()
        process.errors.close()


def _cause_of_failure(process: _Process) -> str:
    """Return the error that a process printed after its progress, or else the end of its output."""
    with process.errors as file:
        file.seek(0)
        text = file.read().decode(errors="replace").strip()
    match = re.search(r"^error: .*", text, re.DOTALL | re.MULTILINE)
    return match[0] if match else text[-TAIL:] or f"the process ended with status {process.popen.returncode}"


def _completed_steps(sweep_run: SweepRun) -> int:
    """Return the steps of a run so far, from the last line of its metrics."""
    try:
        with open_regular(sweep_run.folder / METRICS) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().split(b"\n")[:-1]
        return int(lines[-1].removeprefix(b'{"step": ').partition(b",")[0])
    except (OSError, SpecError, ValueError, IndexError):
        return 0
