"""The folder of a model, as `tfkit build -o` and `tfkit save` write it: its spec, its weights, and its tokenizer.

The folder of a run holds several of them, its checkpoints, and stands for the latest.
"""

from __future__ import annotations

import os
from pathlib import Path

from tfkit.errors import Diagnostic, Span, SpecError, listing, quoted

SPEC = "spec.yaml"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
RUN = "run.yaml"
LATEST = "latest"
"""In the folder of a run: the text is the name of the checkpoint to continue from."""


def model_folder(folder: Path) -> Path:
    """The folder itself, or the latest checkpoint in the folder of a run."""
    try:
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return folder
    return folder / name if name and os.path.isfile(folder / RUN) and Path(name).name == name else folder


def spec_of(folder: Path, span: Span | None = None) -> Path:
    """The spec in a folder; raises SpecError where there is none."""
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
    """True if there are weights beside the spec."""
    return any(os.path.exists(model_folder(folder) / name) for name in (WEIGHTS, INDEX))
