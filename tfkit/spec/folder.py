"""A model folder, as `tfkit build -o` and `tfkit save` write it: a spec, weights, and a tokenizer.

A run folder contains several model folders, its checkpoints. As a model, it stands for the latest checkpoint.
"""

from __future__ import annotations

import os
import re
import shlex
from contextlib import suppress
from pathlib import Path

from tfkit.errors import Diagnostic, Span, SpecError, listing, quoted
from tfkit.spec.header import open_regular, quoted_path, read_error, read_object

SPEC = "spec.yaml"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of a folder with an adapter: its settings, and its matrices. The base is in a different folder."""
EXPORT_CONFIG = "export_config.json"
"""Fields for the config.json of an exported folder that no spec contains, in the layout of tfkit."""
GENERATION = "generation_config.json"
TOKENIZERS = ("tokenizer.json", "chars.json")
"""Names of tokenizer files, in order of preference."""
SPEC_KEY = "tfkit_spec"
"""The key of config.json that holds the text of the spec, in a folder with the model's code."""
OPTIMIZER = "optimizer.safetensors"
TENSORS = "state.safetensors"
STATE = "state.json"
"""The file next to the weights of a run; its `model` is the digest of their tensors."""
RUN = "run.yaml"
FACTS = "run.json"
"""The file in a run folder with the meaning of the run, and how each process ended."""
LATEST = "latest"
"""The file in a run folder that contains the name of the checkpoint to continue from."""
STEP = re.compile(r"step-(0|[1-9][0-9]*)")
"""Pattern of the names of checkpoints in a run folder."""
MAX_NAME = 256
"""Number of bytes of `latest` that are read."""
MAX_CONFIG = 2**24
"""Maximum number of bytes of a JSON file next to the weights of a published model, such as config.json."""


def model_folder(folder: Path) -> Path:
    """Return the latest checkpoint if `folder` is a run folder, else `folder`."""
    return (latest_checkpoint(folder) or folder) if os.path.isfile(folder / RUN) else folder


def holds_code(folder: Path) -> bool:
    """Return True if tfkit wrote the folder with the model's code, which only transformers runs."""
    with suppress(SpecError):
        return SPEC_KEY in read_object(folder / CONFIG, max_bytes=MAX_CONFIG)
    return False


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that the file `latest` of a run names; None if the run has no checkpoint yet.

    Without that file, return the newest checkpoint: a process can be killed after it wrote its first checkpoint and
    before it wrote `latest`.
    Raises SpecError if the file cannot be read, or does not name a checkpoint of the folder.
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
    raise SpecError(Diagnostic(f"{quoted_path(path)} must name a checkpoint; got {quoted(name)}", help=help))


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a run folder, oldest first; raise SpecError if the folder cannot be read."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise read_error(folder, error) from error
    steps = {int(match[1]): folder / name for name in names if (match := STEP.fullmatch(name))}
    return [path for _, path in sorted(steps.items()) if os.path.isdir(path)]


def step_of(checkpoint: Path) -> int:
    """Return the training step of a checkpoint."""
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
    if CONFIG in names or ADAPTER in names:
        command = shlex.join(["tfkit", "import", str(folder), "-o", str(folder / SPEC)])
        source = CONFIG if CONFIG in names else f"base, which {ADAPTER} names"
        help = f"derive a spec from its {source}: `{command}`"
    help = help or "name a folder that `tfkit build`, `tfkit save` or `tfkit train` wrote"
    note = f"it has {listing(map(quoted, names))}" if names else "it is empty"
    message = f"the folder {quoted(str(folder))} has no {SPEC}"
    raise SpecError(Diagnostic(message, span, "extends" if span else "", (note,), help))


def has_weights(folder: Path) -> bool:
    """Return True if a model folder contains weights, or an adapter of the weights in a different folder."""
    return any(os.path.exists(model_folder(folder) / name) for name in (WEIGHTS, INDEX, ADAPTER_WEIGHTS))


def tokenizer_in(folder: Path) -> Path | None:
    """Return the tokenizer file in a folder; None if there is none that tfkit can read."""
    return next((folder / name for name in TOKENIZERS if os.path.isfile(folder / name)), None)
