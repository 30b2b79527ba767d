"""The folder of a run: its text, its numbers, and its checkpoints.

`run.yaml` is the resolved run, `run.json` what it means and how each process ended, `metrics.jsonl` the numbers of
every step, `step-N` a checkpoint, which is the folder of a model too, and `latest` the name of the newest one. A
checkpoint records how long `metrics.jsonl` was: lines that a killed process wrote after it are removed, once the
checkpoint has been read and checked.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter
from safetensors import SafetensorError
from torch import fx

from tfkit.component import Tracker
from tfkit.errors import Diagnostic, Invalid, SpecError, quoted
from tfkit.graph.run import CONTENT, Run
from tfkit.spec.folder import LATEST, RUN, checkpoints_in, latest_checkpoint
from tfkit.spec.header import open_regular, shown
from tfkit.spec.render import render_run
from tfkit.tools.common.atomic_files import write_file, writing, written_folder
from tfkit.tools.common.workshop import held, sweep
from tfkit.tools.train.checkpoints import read_checkpoint, read_json, unusable, write_checkpoint
from tfkit.training.checkpoint import Checkpoint, Restored

FACTS, METRICS, LOCK = "run.json", "metrics.jsonl", "lock"
CHUNK = 2**20
MOST_DIFFERENCES = 12


class Session(BaseModel):
    """The entry of a process that trained. A killed process has no time, memory and step.

    Attributes:
        environment: versions and commit of the process.
        code: digests of the code by kind and module, if they differ from the process before.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    command: str
    began: str
    ended: str | None
    seconds: float | None = None
    memory: int | None = None
    step: int | None = None
    environment: dict[str, Any] = {}
    code: dict[str, dict[str, str]] = {}


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    Session.model_validate(values)
    return values


@dataclass
class Facts:
    """The contents of `run.json`."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    digest: str
    meaning: Mapping[str, Any]
    bits: Mapping[str, Any]
    environment: Mapping[str, Any]
    """The environment of the newest process; each session has its own."""
    sessions: list[Annotated[dict[str, Any], AfterValidator(_checked)]]
    ended: str | None = None
    """The reason why no step follows."""


class RunFolder:
    """A run on the disk; see `tfkit.training.checkpoint.Record`. Raises SpecError if the folder holds another run."""

    def __init__(self, folder: Path, run: Run, bits: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        self.folder = folder
        self.notes: list[str] = []
        """The differences from the process before, which may change the last digits."""
        self._run = run
        self.facts = self._facts(bits, environment)
        for leftover in folder.glob(".*.new"):  # of a killed process
            sweep(folder / leftover.name[1:].rsplit(".", 2)[0])
        self._trackers: list[Tracker] = []
        self._metrics: IO[bytes] | None = None
        self._latest: _Latest | None = None
        self._later: list[Path] = []
        """The checkpoints after the one that this process continued from, until it has written the next one."""
        self._digest = hashlib.sha256()
        """Digest of the lines of `metrics.jsonl`."""

    def _facts(self, bits: Mapping[str, Any], environment: Mapping[str, Any]) -> Facts:
        """Read the contents of `run.json`, or create them; raise SpecError for another run."""
        facts = facts_of(self.folder, self._run)
        if facts is None:
            write_file(self.folder / RUN, render_run(self._run.config, self._run.graph.spec.model))
            return Facts(self._run.digest, self._run.meaning.values, bits, environment, [])
        changed = [name for name in bits if facts.bits.get(name) != bits[name]]
        self.notes = [f"{name}: {facts.bits.get(name)} -> {bits[name]}" for name in changed]
        return Facts(self._run.digest, self._run.meaning.values, bits, environment, facts.sessions, facts.ended)

    def begin(self, command: str, time: str, code: Mapping[str, Any]) -> None:
        """Note a new process; `code` is the result of `tfkit.tools.train.code.session_code`."""
        session = {"command": command, "began": time, "ended": None, "environment": self.facts.environment, **code}
        self.facts.sessions.append(session)
        self._write_facts()

    def end(self, how: str, seconds: float, memory: int, step: int, *, finished: bool) -> None:
        """Note the end of this process, and the largest number of bytes that it used."""
        self.facts.sessions[-1] |= {"ended": how, "seconds": round(seconds, 3), "memory": memory, "step": step}
        self.facts.ended = how if finished else None
        self._write_facts()

    def _write_facts(self) -> None:
        write_file(self.folder / FACTS, json.dumps(vars(self.facts), indent=2) + "\n")

    # ---- what the loop asks for ----

    def restored(self, model: fx.GraphModule) -> Restored | None:
        """Read and check the latest checkpoint."""
        self._latest = _read_latest(self.folder, self._run, model)
        return self._latest and self._latest.restored

    def resume(self) -> None:
        """Remove the lines that were recorded after the checkpoint of `restored`, and open the files to write.

        Later checkpoints stay until the next checkpoint has been written.
        """
        step, position = 0, 0
        if self._latest is not None:
            step, position, self._digest = self._latest.restored.step, self._latest.position, self._latest.digest
            self._latest = None  # its tensors are views of files, which take space on the disk as long as they are open
        self._later = [path for path in checkpoints_in(self.folder) if int(path.name.removeprefix("step-")) > step]
        self._remove_old()
        path = self.folder / METRICS
        with writing(path):
            path.touch()
            os.truncate(path, position)
            self._metrics = path.open("ab")
        for number, config in enumerate(self._run.config.track):
            try:
                self._trackers.append(config.build(self.folder, step))
            except Invalid as error:
                raise self._run.refused(error, "track", str(number)) from error

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._line({"step": step, **numbers})
        for tracker in self._trackers:
            tracker.log(step, numbers)

    def text(self, step: int, name: str, text: str) -> None:
        self._line({"step": step, name: text})
        for tracker in self._trackers:
            tracker.text(step, name, text)

    def _line(self, values: Mapping[str, Any]) -> None:
        assert self._metrics is not None
        line = (json.dumps(values, ensure_ascii=False) + "\n").encode()
        with writing(self.folder / METRICS):
            self._metrics.write(line)
        self._digest.update(line)

    def save(self, checkpoint: Checkpoint) -> None:
        assert self._metrics is not None
        with writing(self.folder / METRICS):
            self._metrics.flush()
            os.fsync(self._metrics.fileno())
        position, digest = self._metrics.tell(), self._digest.hexdigest()
        place = self.folder / f"step-{checkpoint.step}"
        with written_folder(place, SafetensorError) as target:
            write_checkpoint(target, checkpoint, self._run, position=position, metrics=digest)
        write_file(self.folder / LATEST, f"{place.name}\n")
        for path in self._later:
            if path != place:  # `place` was replaced
                shutil.rmtree(path, ignore_errors=True)
        self._later = []
        self._remove_old()

    def _remove_old(self) -> None:
        """Remove all checkpoints but the last ones; later ones of an earlier process do not count."""
        checkpoints = [path for path in checkpoints_in(self.folder) if path not in self._later]
        for path in checkpoints[: -self._run.config.checkpoint.last]:
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
        if self._metrics is not None:
            with writing(self.folder / METRICS):
                self._metrics.close()


class Follower:
    """The record in a process that only reads it: another one writes."""

    def __init__(self, folder: Path, run: Run) -> None:
        self._folder, self._run = folder, run

    def restored(self, model: fx.GraphModule) -> Restored | None:
        """Read and check the latest checkpoint."""
        latest = _read_latest(self._folder, self._run, model)
        return latest and latest.restored

    def resume(self) -> None:
        """Do nothing, as all methods below."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def save(self, checkpoint: Checkpoint) -> None: ...

    def close(self) -> None: ...


class _Latest(NamedTuple):
    """The latest checkpoint of a run; the length of `metrics.jsonl` at its step, and the digest of that beginning."""

    restored: Restored
    position: int
    digest: Any
    """A digest of hashlib, whose class has no public name."""


def _read_latest(folder: Path, run: Run, model: fx.GraphModule) -> _Latest | None:
    """Read the latest checkpoint and check it completely; None if there is none. Nothing is changed on the disk."""
    checkpoint = latest_checkpoint(folder)
    if checkpoint is None:
        return None
    try:
        state, restored = read_checkpoint(checkpoint, run, model)
        digest = _digest_of_beginning(folder / METRICS, state.position)
        if digest.hexdigest() != state.metrics:
            message = f"{shown(folder / METRICS)} was changed in its first {state.position:,} bytes"
            raise SpecError(Diagnostic(message))
    except SpecError as error:
        raise unusable(checkpoint, error) from error
    return _Latest(restored, state.position, digest)


def _digest_of_beginning(path: Path, size: int) -> Any:
    """Return the digest of the first bytes of a file; raise SpecError if it has fewer."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        length = os.fstat(file.fileno()).st_size
        if length < size:
            message = f"{shown(path)} has {length:,} bytes; it had {size:,} when the checkpoint was written"
            raise SpecError(Diagnostic(message))
        for start in range(0, size, CHUNK):
            digest.update(file.read(min(CHUNK, size - start)))
    return digest


_FACTS = TypeAdapter(Facts)


def read_facts(folder: Path) -> Facts | None:
    """Read `run.json`; None if there is none. Raises SpecError if it cannot be read."""
    path = folder / FACTS
    if not os.path.lexists(path):
        return None
    facts = read_json(path, _FACTS)
    if facts.ended is not None and (not facts.sessions or facts.sessions[-1].get("step") is None):
        message = f"cannot read {shown(path)}: `ended` is {quoted(facts.ended)}, and the last session has no `step`"
        raise SpecError(Diagnostic(message))
    return facts


def facts_of(folder: Path, run: Run) -> Facts | None:
    """Read `run.json`; return None if there is none. Raise SpecError if the folder belongs to another run."""
    facts = read_facts(folder)
    differences = run.meaning.differences(facts.meaning) if facts else []
    if facts and differences:
        raise _another(folder, differences, facts.meaning, run.meaning.values)
    return facts


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create and lock the folder of a run for this process; raise SpecError for any other folder."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _check_folder(folder)
        number = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR)
    try:
        _lock(number, folder)
        yield
    finally:
        os.close(number)


def _lock(number: int, folder: Path) -> None:
    with suppress(OSError):  # the system has no locks
        if not held(number):
            message = f"another process trains in {quoted(str(folder))}"
            raise SpecError(Diagnostic(message, help="wait for it, or name another folder with -o"))


def _check_folder(folder: Path) -> None:
    """Raise SpecError if a folder holds other things than a run, begun or not."""
    if os.path.lexists(folder / FACTS):
        return
    names = [name for name in sorted(os.listdir(folder)) if name not in (RUN, LOCK) and not name.startswith(".")]
    if names:
        message = f"{quoted(str(folder))} holds other files than a run's: {', '.join(names[:4])}"
        raise SpecError(Diagnostic(message, help="name a new folder with -o"))


def _another(folder: Path, names: list[str], before: Mapping[str, Any], now: Mapping[str, Any]) -> SpecError:
    """Return the error of a folder with a run of another meaning, with the differences."""
    message = f"{quoted(str(folder))} has another run: it would not continue, but become something else"
    if CONTENT in names:
        names.remove(CONTENT)
        message = f"the data of the run in {quoted(str(folder))} has changed since it began"
    notes = [f"{name}: {_shown(before, name)} -> {_shown(now, name)}" for name in names[:MOST_DIFFERENCES]]
    notes += [f"... ({len(names)} in all)"] if len(names) > MOST_DIFFERENCES else []
    return SpecError(Diagnostic(message, notes=tuple(notes), help="name a new folder with -o"))


def _shown(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name]) if name in values else "not there"
