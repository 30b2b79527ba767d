"""The folder of a model, as `tfkit build -o` and `tfkit save` write it: its spec, its weights, and its tokenizer.

The folder of a run holds several of them, its checkpoints, and stands for the latest.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from tfkit.errors import Diagnostic, Span, SpecError, listing, quoted
from tfkit.spec.header import Malformed, open_regular, parse_object, shown, unreadable

SPEC = "spec.yaml"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
TOKENIZERS = ("tokenizer.json", "chars.json")
"""The files of a tokenizer that tfkit reads, in this order."""
SPEC_KEY = "tfkit_spec"
"""The key of a config.json that has the text of the spec, in a folder with the code of the model."""
OPTIMIZER = "optimizer.safetensors"
RUN = "run.yaml"
LATEST = "latest"
"""In the folder of a run: the text is the name of the checkpoint to continue from."""
STEP = re.compile(r"step-(0|[1-9][0-9]*)")
"""The name of a checkpoint in the folder of a run."""
MAX_NAME = 256
"""Bytes of `latest` that are read."""
MAX_CONFIG = 2**24
"""Bytes of a config.json that are read."""


def model_folder(folder: Path) -> Path:
    """Return the latest checkpoint in the folder of a run; any other folder unchanged."""
    return (latest_checkpoint(folder) or folder) if os.path.isfile(folder / RUN) else folder


def holds_code(folder: Path) -> bool:
    """Return True for a folder that tfkit wrote with the code of the model, which only transformers runs."""
    with suppress(OSError, Malformed, SpecError), open_regular(folder / CONFIG) as file:
        return SPEC_KEY in parse_object(file.read(MAX_CONFIG))
    return False


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that the file `latest` of a run names; None if the run has no checkpoint yet.

    Without the file, it is the newest checkpoint: a process can be killed between its first checkpoint and `latest`.
    Raises SpecError if the file cannot be read, or does not name a checkpoint in its folder.
    """
    path, checkpoints = folder / LATEST, checkpoints_in(folder)
    if not os.path.lexists(path):
        return checkpoints[-1] if checkpoints else None
    with open_regular(path) as file:
        name = file.read(MAX_NAME).decode(errors="replace").strip()
    if folder / name in checkpoints:
        return folder / name
    names = ", ".join(checkpoint.name for checkpoint in reversed(checkpoints))
    help = (
        f"write the name of a checkpoint to it: {names}"
        if names
        else "use a different folder: the run has no checkpoint"
    )
    raise SpecError(Diagnostic(f"{shown(path)} must name a checkpoint; got {quoted(name)}", help=help))


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in the folder of a run, the newest last; raise SpecError if it cannot be read."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise unreadable(folder, error) from error
    steps = {int(match[1]): folder / name for name in names if (match := STEP.fullmatch(name))}
    return [path for _, path in sorted(steps.items()) if os.path.isdir(path)]


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint in the folder of a run."""
    return int(checkpoint.name.removeprefix("step-"))


def spec_of(folder: Path, span: Span | None = None) -> Path:
    """Return the spec in a folder; raise SpecError if there is none."""
    folder = model_folder(folder)
    if os.path.isfile(folder / SPEC):
        return folder / SPEC
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        message = f"cannot read {quoted(str(folder))}: {error.strerror}"
        raise SpecError(Diagnostic(message, span, "extends" if span else "")) from error
    specs = [name for name in names if name.endswith((".yaml", ".yml"))]
    if RUN in names:
        message = f"the run in {quoted(str(folder))} has no checkpoint yet"
        raise SpecError(Diagnostic(message, span, "extends" if span else ""))
    help = f"name the file: {listing(str(folder / name) for name in specs)}" if specs else None
    if CONFIG in names:
        help = f"make one of its {CONFIG}: tfkit import {folder} -o {folder / SPEC}"
    note = f"it has {listing(map(quoted, names))}" if names else "it is empty"
    message = f"the folder {quoted(str(folder))} has no {SPEC}"
    raise SpecError(Diagnostic(message, span, "extends" if span else "", (note,), help))


def has_weights(folder: Path) -> bool:
    """Return True if the folder of the spec has weights."""
    return any(os.path.exists(model_folder(folder) / name) for name in (WEIGHTS, INDEX))


def tokenizer_in(folder: Path) -> Path | None:
    """Return the file of the tokenizer in a folder; None if there is none that tfkit reads."""
    return next((folder / name for name in TOKENIZERS if os.path.isfile(folder / name)), None)
