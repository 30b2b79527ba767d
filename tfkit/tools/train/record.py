"""The folder of a run: its text, its numbers, and its checkpoints.

`run.yaml` is the resolved run, `run.json` what it means and how each process ended, `metrics.jsonl` the numbers of
every step, `step-N` a checkpoint, which is the folder of a model too, and `latest` the name of the newest one. A
checkpoint knows how long `metrics.jsonl` was: what a killed process wrote after it is cut off.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tfkit.component import Tracker
from tfkit.errors import Diagnostic, Invalid, SpecError, quoted
from tfkit.graph.run import CONTENT, Run
from tfkit.spec.folder import LATEST, RUN, WEIGHTS
from tfkit.spec.render import render_run
from tfkit.tools.common.atomic_files import write_file, writing, written_folder
from tfkit.tools.common.workshop import held, sweep
from tfkit.tools.save.save import write_model
from tfkit.training.checkpoint import Checkpoint, Restored

FACTS, METRICS, LOCK = "run.json", "metrics.jsonl", "lock"
STATE, OPTIMIZER = "state.json", "optimizer.safetensors"
STEP = re.compile(r"step-(\d+)")
MOST_DIFFERENCES = 12


@dataclass
class Facts:
    """The contents of `run.json`."""

    digest: str
    meaning: Mapping[str, Any]
    bits: Mapping[str, Any]
    environment: Mapping[str, Any]
    sessions: list[dict[str, Any]]
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

    def _facts(self, bits: Mapping[str, Any], environment: Mapping[str, Any]) -> Facts:
        """The contents of `run.json`, read or new; raises SpecError for another run."""
        found = facts_of(self.folder, self._run)
        if found is None:
            write_file(self.folder / RUN, render_run(self._run.config, self._run.graph.spec.model))
            return Facts(self._run.digest, self._run.meaning.values, bits, environment, [])
        changed = [name for name in bits if found.bits.get(name) != bits[name]]
        self.notes = [f"{name}: {found.bits.get(name)} -> {bits[name]}" for name in changed]
        return Facts(self._run.digest, self._run.meaning.values, bits, environment, found.sessions, found.ended)

    def begin(self, command: str, time: str) -> None:
        """Note a new process."""
        self.facts.sessions.append({"command": command, "began": time, "ended": None})
        self._write_facts()

    def end(self, how: str, seconds: float, memory: int, step: int, *, finished: bool) -> None:
        """Note the end of this process, and the largest number of bytes that it used."""
        self.facts.sessions[-1] |= {"ended": how, "seconds": round(seconds, 3), "memory": memory, "step": step}
        self.facts.ended = how if finished else None
        self._write_facts()

    def _write_facts(self) -> None:
        write_file(self.folder / FACTS, json.dumps(vars(self.facts), indent=2) + "\n")

    # ---- what the loop asks for ----

    def restored(self) -> Restored | None:
        """The latest checkpoint; numbers noted after it are removed."""
        found = latest(self.folder)
        state = {} if found is None else _state(found)
        self._remove_old(int(state.get("step", 0)))
        self._open(int(state.get("position", 0)), int(state.get("step", 0)))
        return None if found is None else _read(found)

    def _open(self, position: int, step: int) -> None:
        path = self.folder / METRICS
        with writing(path):
            path.touch()
            os.truncate(path, position)
            self._metrics = path.open("ab")
        for number, config in enumerate(self._run.config.track):
            try:
                self._trackers.append(config.build(self.folder, step))
            except Invalid as wrong:
                raise self._run.refused(wrong, "track", str(number)) from wrong

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
        with writing(self.folder / METRICS):
            self._metrics.write((json.dumps(values, ensure_ascii=False) + "\n").encode())

    def save(self, checkpoint: Checkpoint) -> None:
        assert self._metrics is not None
        with writing(self.folder / METRICS):
            self._metrics.flush()
            os.fsync(self._metrics.fileno())
        place = self.folder / f"step-{checkpoint.step}"
        state = {
            "step": checkpoint.step,
            "meaning": self.facts.digest,
            "position": self._metrics.tell(),
            "ended": checkpoint.ended,
            "skipped": checkpoint.skipped,
            "callbacks": checkpoint.callbacks,
        }
        with written_folder(place, SafetensorError) as target:
            write_model(checkpoint.model, target)
            save_file(dict(checkpoint.optimizer), target / OPTIMIZER)
            shutil.copymode(target / WEIGHTS, target / OPTIMIZER)
            (target / STATE).write_text(json.dumps(state) + "\n", encoding="utf-8")
            tokenizer = self._run.data.tokenizer
            if tokenizer is not None:
                tokenizer.save(target / tokenizer.file)
        write_file(self.folder / LATEST, f"{place.name}\n")
        self._remove_old(checkpoint.step)

    def _remove_old(self, newest: int) -> None:
        """Remove all checkpoints but the last ones; those of later steps belong to a past that was forgotten."""
        steps = sorted(int(found[1]) for one in self.folder.iterdir() if (found := STEP.fullmatch(one.name)))
        kept = [step for step in steps if step <= newest][-self._run.config.checkpoint.last :]
        for step in steps:
            if step not in kept:
                shutil.rmtree(self.folder / f"step-{step}", ignore_errors=True)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
        if self._metrics is not None:
            with writing(self.folder / METRICS):
                self._metrics.close()


class Follower:
    """The record in a process that only reads it: another one writes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def restored(self) -> Restored | None:
        """The latest checkpoint."""
        found = latest(self._folder)
        return None if found is None else _read(found)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Do nothing, as all other methods."""

    def text(self, step: int, name: str, text: str) -> None: ...

    def save(self, checkpoint: Checkpoint) -> None: ...

    def close(self) -> None: ...


def latest(folder: Path) -> Path | None:
    """The newest checkpoint of a run; None if it has none."""
    try:
        return folder / (folder / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None


def read_facts(folder: Path) -> Facts | None:
    """The contents of `run.json`; None if there is none. Raises SpecError if it cannot be read."""
    try:
        data = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        return Facts(**data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        message = f"cannot read {quoted(str(folder / FACTS))}: {error}"
        raise SpecError(Diagnostic(message)) from error


def facts_of(folder: Path, run: Run) -> Facts | None:
    """The contents of `run.json`; None if there is none. Raises SpecError if the folder is that of another run."""
    found = read_facts(folder)
    differences = run.meaning.differences(found.meaning) if found else []
    if found and differences:
        raise _another(folder, differences, found.meaning, run.meaning.values)
    return found


def named_by_meaning(run: Run, name: Callable[[str], Path]) -> Path:
    """The folder whose name a digest gives; that of the former digest if it is there."""
    former = name(run.meaning.former_digest)
    return former if os.path.exists(former) else name(run.digest)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder of a run, for this process alone, made if there is none; raises SpecError for any other folder."""
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
    if (folder / FACTS).exists():
        return
    others = [one for one in sorted(os.listdir(folder)) if one not in (RUN, LOCK) and not one.startswith(".")]
    if others:
        message = f"{quoted(str(folder))} holds other files than a run's: {', '.join(others[:4])}"
        raise SpecError(Diagnostic(message, help="name a new folder with -o"))


def _another(folder: Path, names: list[str], before: Mapping[str, Any], now: Mapping[str, Any]) -> SpecError:
    """The error of a folder with a run of another meaning, with the differences."""
    message = f"{quoted(str(folder))} has another run: it would not continue, but become something else"
    if CONTENT in names:
        names.remove(CONTENT)
        message = f"the data of the run in {quoted(str(folder))} has changed since it began"
    notes = [f"{name}: {_shown(before, name)} -> {_shown(now, name)}" for name in names[:MOST_DIFFERENCES]]
    notes += [f"... ({len(names)} in all)"] if len(names) > MOST_DIFFERENCES else []
    return SpecError(Diagnostic(message, notes=tuple(notes), help="name a new folder with -o"))


def _shown(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name]) if name in values else "not there"


def _read(folder: Path) -> Restored:
    state = _state(folder)
    weights, optimizer = (_tensors(folder / name) for name in (WEIGHTS, OPTIMIZER))
    return Restored(state["step"], weights, optimizer, tuple(state["callbacks"]), state["ended"], state["skipped"])


def _state(folder: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
        return state
    except (OSError, ValueError) as error:
        raise _damaged(folder, error) from error


def _tensors(path: Path) -> dict[str, Any]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path.parent, error) from error


def _damaged(folder: Path, error: Exception) -> SpecError:
    message = f"the checkpoint {quoted(str(folder))} cannot be read: {error}"
    help = f"`{folder.parent / LATEST}` may name an older one"
    return SpecError(Diagnostic(message, help=help))
