"""Write a model to a folder, all of it or nothing."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_model
from torch import nn

from tfkit.errors import Diagnostic, SpecError, listing, quoted
from tfkit.graph.expand import Graph
from tfkit.spec.render import render

SPEC = "spec.yaml"
WEIGHTS = "model.safetensors"


def check_folder(folder: Path, *, force: bool) -> None:
    """Raise SpecError when `folder` must not be written: it exists, or it holds more than a model."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise SpecError(Diagnostic(f"{quoted(str(folder))} is a file"))
    names = sorted(path.name for path in folder.iterdir())
    others = [name for name in names if name not in (SPEC, WEIGHTS)]
    if others:
        message = f"{quoted(str(folder))} holds other files than a model's: {listing(others, 4)}"
        raise SpecError(Diagnostic(message, help="name a new folder"))
    if names and not force:
        raise SpecError(Diagnostic(f"{quoted(str(folder))} exists already", help="--force replaces it"))


def save(model: nn.Module, graph: Graph, folder: Path, *, force: bool = False) -> tuple[Path, ...]:
    """Write the resolved spec and the weights; returns the files.

    They are written to a folder beside it, which is renamed when all is on the disk: an interrupt or a full disk
    leaves `folder` as it was. Raises SpecError when it cannot be written, see `check_folder`.
    """

    def write(target: Path) -> None:
        (target / SPEC).write_text(render(graph.spec.model), encoding="utf-8")
        save_model(model, str(target / WEIGHTS), metadata={"format": "pt"})
        shutil.copymode(target / SPEC, target / WEIGHTS)  # safetensors keeps its files to their owner

    folder = folder.resolve()
    check_folder(folder, force=force)
    try:
        _replace(folder, write)
    except Exception as error:
        cause = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise SpecError(Diagnostic(f"cannot write {quoted(str(folder))}: {cause}")) from error
    return folder / SPEC, folder / WEIGHTS


def write_text(path: Path, text: str) -> None:
    """Write a text file, all of it or nothing; raises SpecError when it cannot be written."""
    path = path.resolve()
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        if path.exists() and not path.is_file():  # a pipe or a device takes the text and stays what it is
            path.write_text(text, encoding="utf-8")
        else:
            new.write_text(text, encoding="utf-8")
            new.replace(path)
    except OSError as error:
        raise SpecError(Diagnostic(f"cannot write {quoted(str(path))}: {error.strerror}")) from error
    finally:
        new.unlink(missing_ok=True)


def _replace(folder: Path, write: Callable[[Path], None]) -> None:
    """Make `folder` anew with what `write` writes into it, or leave it as it was."""
    mark = secrets.token_hex(4)
    new, old = (folder.parent / f".{folder.name}.{mark}.{end}" for end in ("new", "old"))
    missing = [parent for parent in folder.parents if not parent.exists()]
    done = False
    try:
        new.mkdir(parents=True)
        write(new)
        _flush(new)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        done = True
    finally:
        if not done and old.exists():
            old.rename(folder)
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        for parent in [] if done else missing:
            if parent.exists():
                parent.rmdir()


def _flush(folder: Path) -> None:
    """Wait until the files are on the disk: a rename must not come before what it renames."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
