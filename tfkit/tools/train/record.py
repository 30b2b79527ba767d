"""The run folder: the resolved run, its numbers, and its checkpoints.

`run.yaml` is the resolved run. `run.json` contains the meaning of the run and how each process ended. `metrics.jsonl`
has the numbers of every step. `step-N` is a checkpoint, which is also a model folder, and `latest` contains the name of
the newest checkpoint. A checkpoint records the length of `metrics.jsonl`: once a checkpoint has been read and checked,
lines that a killed process wrote after it are removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy
import torch
from safetensors import SafetensorError
from torch import fx

from tfkit.commands import check_inside, write_file, writing, written_folder
from tfkit.errors import Diagnostic, Invalid, SpecError, SpecWarning, quoted
from tfkit.plugin.discover import BUILT_IN, tfkit_version
from tfkit.plugin.manager import Plugins
from tfkit.run.checked_run import Run
from tfkit.run.contract import TrackedRun, Tracker, TrackerConfig
from tfkit.run.run_facts import Facts, callbacks_in, facts_of, read_facts
from tfkit.run.run_spec import render_run
from tfkit.run.training.adapters import weights_file, write_weights
from tfkit.run.training.checkpoint import Checkpoint, Restored
from tfkit.spec.folder import FACTS, LATEST, RUN, SPEC, STATE, checkpoints_in, latest_checkpoint, step_of
from tfkit.spec.header import open_regular, quoted_path
from tfkit.spec.weight_files import content_of
from tfkit.tools.common.atomic_files import NEW_NAME, check_entries, remove_leftover_folders, staging_folder, try_lock
from tfkit.tools.common.history import METRICS
from tfkit.tools.train.checkpoints import read_branch, read_checkpoint, resume_error, run_companions, write_checkpoint

LOCK, SHARDS = "lock", "shards"
CHUNK = 2**20


class RunFolder:
    """A run on disk, the `Record` of the training loop. Raises SpecError if the folder contains a different run."""

    def __init__(self, folder: Path, run: Run, bits: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        self.folder = folder
        self.notes: list[str] = []
        """Differences from the previous process that may change the last digits of results."""
        self.changes: list[str] = []
        """Settings that this process changes in place."""
        self._run = run
        self.facts = self._facts(bits, environment)
        for leftover in folder.glob(".*.new"):  # of a killed process
            remove_leftover_folders(folder / leftover.name[1:].rsplit(".", 2)[0])
        self._trackers: dict[int, Tracker] = {}
        """Trackers that have not failed, by their index in the run."""
        self._metrics: IO[bytes] | None = None
        self._size = 0
        """Bytes of `metrics.jsonl` that this process kept or wrote. Its file position would include other writes."""
        self._latest: _Latest | None = None
        self._later: list[Path] = []
        """Checkpoints later than the restored checkpoint. They stay until this process writes its first checkpoint."""
        self._digest = hashlib.sha256()
        """Digest of the lines of `metrics.jsonl`."""
        # Read now, because the folders that the run starts from may be removed while it trains.
        self.companions = run_companions(run, latest_checkpoint(folder))

    def _facts(self, bits: Mapping[str, Any], environment: Mapping[str, Any]) -> Facts:
        """Read the contents of `run.json`, or create them; raise SpecError for a different run."""
        facts, semantics = facts_of(self.folder, self._run, in_place=True), self._run.semantics.values
        if facts is None:
            self._write(RUN, render_run(self._run.config, self._run.written))
            return Facts(self._run.digest, semantics, bits, environment, [])
        changed = [name for name in bits if facts.bits.get(name) != bits[name]]
        self.notes = [f"{name}: {facts.bits.get(name)} -> {bits[name]}" for name in changed]
        ended, earlier = facts.ended, facts.earlier
        self.changes = [
            f"{path}: {facts.meaning.get(path)} -> {semantics.get(path)}"
            for path in self._run.semantics.differences(facts.meaning)
        ]
        if self.changes:
            # The run may have ended for a reason that no longer applies: a callback, or a step that was not finite.
            ended, earlier = None, {**earlier, facts.digest: callbacks_in(facts.meaning)}
        return Facts(self._run.digest, semantics, bits, environment, facts.sessions, earlier, ended)

    def begin(self, command: str, time: str, code: Mapping[str, Any]) -> None:
        """Record the start of a process; `code` is the result of `tfkit.run.run_code.session_code`."""
        session = {"command": command, "began": time, "ended": None, "environment": self.facts.environment, **code}
        self.facts.sessions.append(session)
        if self.changes:
            session["changed"] = self.changes
            self._write(RUN, render_run(self._run.config, self._run.written))
        self._write_facts()

    def end(self, how: str, seconds: float, memory: int, step: int, *, finished: bool) -> None:
        """Record how this process ended, its seconds, its peak memory in bytes, and its last step."""
        self.facts.sessions[-1] |= {"ended": how, "seconds": round(seconds, 3), "memory": memory, "step": step}
        self.facts.ended = how if finished else None
        self._write_facts()

    def _write_facts(self) -> None:
        self._write(FACTS, json.dumps(vars(self.facts), indent=2) + "\n")

    def _write(self, name: str, text: str) -> None:
        write_file(self.folder / name, text, inside=self.folder)

    # ---- what the loop asks for ----

    def restored(self, model: fx.GraphModule) -> Restored | None:
        """Read and check the latest checkpoint, or the checkpoint that the run branches from."""
        self._latest = _read_latest(self.folder, self._run, model)
        return self._latest and self._latest.restored

    def resume(self) -> None:
        """Remove the lines that were recorded after the checkpoint of `restored`, and open the files for writing.

        Later checkpoints stay until the next checkpoint has been written.
        """
        step, position = 0, 0
        if self._latest is not None:
            step, position, self._digest = self._latest.restored.step, self._latest.position, self._latest.digest
            self._latest = None  # its tensors are views of files, which take space on the disk as long as they are open
        self._later = [path for path in checkpoints_in(self.folder) if step_of(path) > step]
        for path in self._later:
            _check_replaceable(path)
        self._remove_old()
        path = self.folder / METRICS
        check_inside(path, self.folder)
        with writing(path):
            path.touch()
            if os.stat(path).st_nlink > 1:  # a backup of hard links keeps its contents
                write_file(path, path.read_bytes(), inside=self.folder)
            os.truncate(path, position)
            self._metrics, self._size = path.open("ab"), position
        run = self._run
        tracked = TrackedRun(run.config.name, self.folder, step, run.semantics.values, run.graph)
        for number, config in enumerate(run.config.track):
            with self._run.guarded(config, "`build`", "track", str(number)):
                self._trackers[number] = _build_tracker(config, tracked)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._line({"step": step, **numbers})
        self._tell("log", step, numbers)

    def text(self, step: int, name: str, text: str) -> None:
        self._line({"step": step, name: text})
        self._tell("text", step, name, text)

    def _tell(self, method: str, *values: Any) -> None:
        """Call a method of all trackers. A tracker that fails is dropped with a warning: the run does not need it."""
        for number, tracker in list(self._trackers.items()):
            try:
                with self._run.guarded(self._run.config.track[number], f"`{method}`", "track", str(number)):
                    getattr(tracker, method)(*values)
            except SpecError as error:
                del self._trackers[number]
                help = f"the run continues without it: {METRICS} has all numbers"
                for diagnostic in error.diagnostics:
                    warnings.warn(replace(diagnostic, help=help).render("warning"), SpecWarning, stacklevel=2)

    def _line(self, values: Mapping[str, Any]) -> None:
        assert self._metrics is not None
        line = (json.dumps(values, ensure_ascii=False) + "\n").encode()
        with writing(self.folder / METRICS):
            self._metrics.write(line)
        self._size += len(line)
        self._digest.update(line)

    def save(self, checkpoint: Checkpoint) -> None:
        self.saving()(checkpoint)

    def saving(self) -> Callable[[Checkpoint], None]:
        assert self._metrics is not None
        path = self.folder / METRICS
        with writing(path):
            self._metrics.flush()
            os.fsync(self._metrics.fileno())
            on_disk, opened = os.stat(path), os.fstat(self._metrics.fileno())
        if not os.path.samestat(on_disk, opened) or opened.st_size != self._size:
            # The lock excludes a second process only where the file system has locks.
            message = f"another process writes to {quoted_path(path)}: no checkpoint is written"
            raise SpecError(
                Diagnostic(message, help="end one of the processes, and train in a different folder with -o")
            )
        return partial(self._save, self._size, self._digest.hexdigest())

    @contextmanager
    def shards(self) -> Iterator[Path]:
        with writing(self.folder), staging_folder(self.folder / SHARDS) as folder:
            yield folder / NEW_NAME

    def _save(self, position: int, digest: str, checkpoint: Checkpoint) -> None:
        location = self.folder / f"step-{checkpoint.step}"
        _check_replaceable(location)
        with written_folder(location, SafetensorError, inside=self.folder) as target:
            write_checkpoint(
                target, checkpoint, self._run, companions=self.companions, position=position, metrics=digest
            )
        self._write(LATEST, f"{location.name}\n")
        for path in self._later:
            if path != location:  # `location` was replaced
                _remove_checkpoint(path)
        self._later = []
        self._remove_old()

    def _remove_old(self) -> None:
        """Remove old checkpoints. The later checkpoints of a previous process do not count as checkpoints to keep."""
        checkpoints = [path for path in checkpoints_in(self.folder) if _is_checkpoint(path) and path not in self._later]
        for path in checkpoints[: -self._run.config.checkpoint.last]:
            _remove_checkpoint(path)

    def save_model(self, name: str, model: fx.GraphModule) -> None:
        folder = self.folder / name
        if os.path.lexists(folder) and not os.path.isfile(folder / SPEC):
            raise Invalid("", f"the folder {quoted(name)} of the run must hold a model, or not exist")
        with written_folder(folder, SafetensorError, inside=self.folder) as target:
            self.companions.write(target)
            write_weights(model, target)
            # Read back from the disk, before an older folder is removed.
            digest = content_of(target / weights_file(model))
            (target / STATE).write_text(f"{json.dumps({'model': digest})}\n", encoding="utf-8")

    def close(self) -> None:
        if self._metrics is not None:
            with writing(self.folder / METRICS):
                self._metrics.close()
        self._tell("close")


class Follower:
    """The record in a process that only reads it, because a different process writes it."""

    def __init__(self, folder: Path, run: Run) -> None:
        self._folder, self._run = folder, run

    def restored(self, model: fx.GraphModule) -> Restored | None:
        """Read and check the latest checkpoint."""
        latest = _read_latest(self._folder, self._run, model)
        return latest and latest.restored

    def resume(self) -> None:
        """Do nothing, like all methods below."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def save(self, checkpoint: Checkpoint) -> None: ...

    def saving(self) -> Callable[[Checkpoint], None]:
        return self.save

    def shards(self) -> AbstractContextManager[Path]:
        return nullcontext(self._folder)

    def save_model(self, name: str, model: fx.GraphModule) -> None: ...

    def close(self) -> None: ...


def _is_checkpoint(folder: Path) -> bool:
    """Return True if a folder has the file `state.json`, or is what a killed `_remove_checkpoint` leaves."""
    return os.path.isfile(folder / STATE) or (os.path.isdir(folder) and not os.listdir(folder))


def _remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint, and last its `state.json`, by which a later process knows the remains of a checkpoint."""
    with suppress(OSError):
        for path in sorted(checkpoint.iterdir(), key=lambda path: path.name == STATE):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        checkpoint.rmdir()


def _check_replaceable(folder: Path) -> None:
    """Raise SpecError if a folder has the name of a checkpoint, but does not contain a checkpoint."""
    check_inside(folder, folder.parent)
    if os.path.lexists(folder) and not _is_checkpoint(folder):
        message = f"{quoted_path(folder)} must be a checkpoint, which the run can replace; got no file `{STATE}` in it"
        raise SpecError(Diagnostic(message, help="move it out of the folder of the run"))


class _Latest(NamedTuple):
    """The latest checkpoint of a run, with the length of `metrics.jsonl` at its step, and the digest of these bytes."""

    restored: Restored
    position: int
    digest: Any
    """A digest of hashlib, whose class has no public name."""


def _read_latest(folder: Path, run: Run, model: fx.GraphModule) -> _Latest | None:
    """Read the latest checkpoint and check it completely; return None without a checkpoint. The disk does not change.

    Without a checkpoint, a branch begins with the checkpoint of the run that it branches from, and without metrics.
    """
    checkpoint = latest_checkpoint(folder)
    if checkpoint is None:
        branch = run.config.branch
        return None if branch is None else _Latest(read_branch(run, model), 0, hashlib.sha256())
    try:
        state, restored = read_checkpoint(checkpoint, run, model, earlier=_callbacks_by_digest(folder))
        digest = _digest_of_beginning(folder / METRICS, state.position)
        if digest.hexdigest() != state.metrics:
            message = f"{quoted_path(folder / METRICS)} was changed in its first {state.position:,} bytes"
            raise SpecError(Diagnostic(message))
    except SpecError as error:
        raise resume_error(checkpoint, error) from error
    return _Latest(restored, state.position, digest)


def _callbacks_by_digest(folder: Path) -> dict[str, list[str]]:
    """Return the digests that checkpoints in a folder may have, and the names of their callbacks."""
    facts = read_facts(folder)
    return {} if facts is None else {**facts.earlier, facts.digest: callbacks_in(facts.meaning)}


def _digest_of_beginning(path: Path, size: int) -> Any:
    """Return the digest of the first `size` bytes of a file; raise SpecError if the file is shorter."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        length = os.fstat(file.fileno()).st_size
        if length < size:
            message = f"{quoted_path(path)} must have the {size:,} bytes of its checkpoint; got {length:,}"
            raise SpecError(Diagnostic(message))
        for start in range(0, size, CHUNK):
            digest.update(file.read(min(CHUNK, size - start)))
    return digest


@contextmanager
def locked_folder(folder: Path) -> Iterator[bool]:
    """Create and lock a run folder for this process; yield False if its file system has no locks.

    Raise SpecError if the folder is locked, or is not a run folder.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _check_folder(folder)
        check_entries(folder)
        check_inside(folder / LOCK, folder)
        number = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR)
    try:
        yield _lock_folder(number, folder)
    finally:
        os.close(number)


def _lock_folder(number: int, folder: Path) -> bool:
    """Lock a run folder; return False if its file system has no locks."""
    try:
        locked = try_lock(number)
    except OSError:
        return False
    if not locked:
        message = f"another process trains in {quoted(str(folder))}"
        raise SpecError(Diagnostic(message, help="wait for it, or name a different folder with -o"))
    return True


def _check_folder(folder: Path) -> None:
    """Raise SpecError if a folder contains anything except a run."""
    if os.path.lexists(folder / FACTS):
        return
    names = [name for name in sorted(os.listdir(folder)) if name not in (RUN, LOCK) and not name.startswith(".")]
    if names:
        message = f"{quoted(str(folder))} must hold only the files of a run; got {', '.join(names[:4])}"
        raise SpecError(Diagnostic(message, help="name a new folder with -o"))


def bits_of(run: Run, processes: int) -> dict[str, str | int | bool | None]:
    """Return the values, in addition to the meaning, on which the last digits of a run's results depend.

    Runs with equal meanings and equal values have bit-identical results.
    """
    machine = run.config.machine
    bits: dict[str, str | int | bool | None] = {
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "device": _device_name(machine.device),
        "threads": machine.threads,
        "micro_batch": machine.micro_batch,
        "compile": machine.compile,
        "attention": machine.attention,
        "gather": machine.gather,
        "processes": processes,
        "shard": machine.shard,
    }
    if machine.float8 is not None:
        with suppress(PackageNotFoundError):  # the trainer raises an error
            bits["torchao"] = version("torchao")
    return bits


def current_environment(plugins: Plugins) -> dict[str, Any]:
    """Return the versions in use, and the commit of the current folder."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "tfkit": tfkit_version(),
        "plugins": {plugin.name: plugin.version for plugin in plugins.loaded if plugin.origin != BUILT_IN},
        "git": _git_commit(Path()),
    }


def _device_name(name: str) -> str:
    if name.startswith("cuda"):
        try:
            return torch.cuda.get_device_name(name)
        except (AssertionError, RuntimeError):  # there is none: the trainer says so
            return name
    return f"{name}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def _git_commit(folder: Path) -> str | None:
    """Return the commit of a folder; None outside of git. Changes of files since the commit are not recorded."""
    # `rev-parse` reads no file of the working tree. Commands that do, such as `status`, start the programs that the
    # configuration of the repository names: its monitor of files, and filters that files pass through.
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _build_tracker(config: TrackerConfig, run: TrackedRun) -> Tracker:
    """Build the tracker of a run. If its package is missing, raise `Invalid` with the extra that installs it."""
    try:
        return config.build(run)
    except ModuleNotFoundError as error:
        package = error.name if config.extra is None else f'"tfkit[{config.extra}]"'
        help = f"pip install {package}, or remove it from `track`"
        raise Invalid("", f"`{config.kind_name()}` needs the package {error.name}", help=help) from error
