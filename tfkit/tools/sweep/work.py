"""Trains the missing runs of a sweep, each in its own process.

Only the run folder records whether a run is complete. The training process inherits the lock on the folder, and the
system releases the lock when that process exits, for any reason. Two sweeps can therefore share a folder, and a sweep
waits for training processes that a killed sweep left behind.
"""

from __future__ import annotations

import os
import re
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

from tfkit.graph.run import Run
from tfkit.spec.folder import RUN
from tfkit.spec.render import render_run
from tfkit.tools.common.atomic_files import write_file, writing
from tfkit.tools.common.workshop import held
from tfkit.tools.sweep.arms import Cell
from tfkit.tools.train.code import check_code
from tfkit.tools.train.record import METRICS, facts_of

LOCK = ".sweep"
PAUSE = 0.2
CHANGED = "--allow-change accepts these runs; -o names a new folder"
TAIL = 4096
"""Bytes at the end of `metrics.jsonl` that have its last line."""
Told = Callable[[int, int], None]
Failed = Callable[[Path, str], None]


@dataclass
class _Process:
    cell: Cell
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    gpu: str | None


def check_runs(cells: Iterable[Cell]) -> None:
    """Raise SpecError for all runs that were trained by other code than their kinds have now."""
    runs = {cell.folder: cell for cell in cells if not cell.allow_change}
    records = [(cell, facts) for cell in runs.values() if (facts := facts_of(cell.folder, cell.run)) is not None]
    check_code(((cell.folder, facts, cell.code) for cell, facts in records), help=CHANGED)


def is_complete(cell: Cell) -> bool:
    """Return True if the run is complete; raise SpecError if its folder cannot be read, or contains another run."""
    check_runs([cell])
    facts = facts_of(cell.folder, cell.run)
    return facts is not None and facts.ended is not None


def missing(cells: Sequence[Cell]) -> list[Cell]:
    """The runs that are not complete, each once."""
    return [cell for cell in {cell.run.digest: cell for cell in cells}.values() if not is_complete(cell)]


def work(cells: Sequence[Cell], *, jobs: int, options: Sequence[str], told: Told, failed: Failed) -> dict[str, str]:
    """Make the runs that are missing; return the errors of those that failed, by their digest.

    Args:
        cells: the runs.
        jobs: processes at once.
        options: those of `tfkit train` that choose plugins.
        told: called with the number of complete runs, and that of all steps made.
        failed: called with the folder of a run that failed, and its error, as soon as it has.
    """
    every, errors = missing(cells), dict[str, str]()
    waiting, running = list(every), list[_Process]()
    try:
        while waiting or running:
            for cell in list(waiting):
                if len(running) < jobs and (lock := _lock(cell)) is not None:
                    waiting.remove(cell)
                    running += _start(cell, lock, options, _gpu(cell, running))
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                cause = _cause(one)
                if not is_complete(one.cell):
                    errors[one.cell.run.digest] = cause
                    failed(one.cell.folder, cause)
            told(len(every) - len(waiting) - len(running), sum(map(_steps, every)))
            time.sleep(PAUSE)
    finally:
        _end(running)
    return errors


def _gpu(cell: Cell, running: Sequence[_Process]) -> str | None:
    """The GPU, as `CUDA_VISIBLE_DEVICES` names it, that the fewest processes have; None if the run names its device."""
    if cell.run.config.machine.device != "cuda":
        return None
    count, given = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = given.split(",")[:count] if given else [str(index) for index in range(count)]
    return min(gpus, key=[one.gpu for one in running].count, default=None)


def _start(cell: Cell, lock: int, options: Sequence[str], gpu: str | None) -> list[_Process]:
    """The process of a run; none if another one has completed it."""
    try:
        if is_complete(cell):
            return []
        write_file(cell.folder / RUN, _text(cell.run))
        command = [sys.executable, "-m", "tfkit", "train", str(cell.folder), *options]
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "OMP_NUM_THREADS": "1", **visible},
            pass_fds=(lock,),
            start_new_session=True,  # Ctrl-C is for the sweep, which asks its processes to end
        )
        return [_Process(cell, process, errors, gpu)]
    finally:
        os.close(lock)


def _text(run: Run) -> str:
    return render_run(run.config, run.graph.spec.model)


def _lock(cell: Cell) -> int | None:
    """The lock of a run; None if another process has it."""
    with writing(cell.folder):
        cell.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(cell.folder / LOCK, os.O_CREAT | os.O_RDWR)
    with suppress(OSError):  # the system has no locks
        if not held(lock):
            os.close(lock)
            return None
    return lock


def _end(running: Sequence[_Process]) -> None:
    """Ask processes to end, which writes their checkpoints, and wait for them."""
    for one in running:
        one.process.terminate()
    for one in running:
        one.process.wait()
        one.errors.close()


def _cause(one: _Process) -> str:
    """The error that a process printed after its progress; the end of all it printed if there is none."""
    with one.errors as file:
        file.seek(0)
        text = file.read().decode(errors="replace").strip()
    found = re.search(r"^error: .*", text, re.DOTALL | re.MULTILINE)
    return found[0] if found else text[-TAIL:] or f"the process ended with status {one.process.returncode}"


def _steps(cell: Cell) -> int:
    """The steps of a run so far, as its numbers on the disk say."""
    try:
        with (cell.folder / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().split(b"\n")[:-1]
        return int(lines[-1].removeprefix(b'{"step": ').partition(b",")[0])
    except (OSError, ValueError, IndexError):
        return 0
