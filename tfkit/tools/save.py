"""Write a model to a folder, all of it or nothing."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from safetensors.torch import save_model
from torch import fx, nn

from tfkit.builder import graph_of
from tfkit.checkpoint.files import INDEX, WEIGHTS
from tfkit.checkpoint.published import published
from tfkit.checkpoint.shards import SHARD, write_shards
from tfkit.errors import Diagnostic, SpecError, listing, quoted
from tfkit.graph.expand import Graph
from tfkit.spec.render import render
from tfkit.tools.importing import CONFIG, export_config

SPEC = "spec.yaml"
Layout = Literal["tfkit", "huggingface"]


def check_folder(folder: Path, *, force: bool) -> None:
    """Raise SpecError when `folder` must not be written: it exists, or it holds more than a model."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise SpecError(Diagnostic(f"{quoted(str(folder))} is a file"))
    names = sorted(path.name for path in folder.iterdir())
    others = [name for name in names if name not in (SPEC, WEIGHTS, INDEX, CONFIG) and not SHARD.fullmatch(name)]
    if others:
        message = f"{quoted(str(folder))} holds other files than a model's: {listing(others, 4)}"
        raise SpecError(Diagnostic(message, help="name a new folder"))
    if names and not force:
        raise SpecError(Diagnostic(f"{quoted(str(folder))} exists already", help="--force replaces it"))


def save(
    model: nn.Module, graph: Graph, folder: Path, *, layout: Layout = "tfkit", force: bool = False
) -> tuple[Path, ...]:
    """Write a model; returns the files.

    They are written to a folder beside it, which is renamed when all is on the disk: an interrupt or a full disk
    leaves `folder` as it was.

    Args:
        model: what `tfkit.build` returned.
        graph: its graph.
        folder: where to; made if it is not there.
        layout: `tfkit` writes the resolved spec and the weights by the model's own names; `huggingface` a config.json
            and the weights by the names that the spec's `checkpoint` says, as `from_pretrained` reads them.
        force: replace the model that is there.

    Raises:
        SpecError: it cannot be written, see `check_folder`; or the spec has no `checkpoint`, or says what its family
            has no words for.
    """
    write = _own(model, graph) if layout == "tfkit" else _published(model)
    check_folder(folder, force=force)
    try:
        _replace(folder.resolve(), write)
    except Exception as error:
        cause = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise SpecError(Diagnostic(f"cannot write {quoted(str(folder))}: {cause}")) from error
    return tuple(sorted(folder.iterdir(), reverse=True))


def _own(model: nn.Module, graph: Graph) -> Callable[[Path], None]:
    def write(target: Path) -> None:
        (target / SPEC).write_text(render(graph.spec.model), encoding="utf-8")
        save_model(model, str(target / WEIGHTS), metadata={"format": "pt"})
        shutil.copymode(target / SPEC, target / WEIGHTS)  # safetensors keeps its files to their owner

    return write


def _published(model: nn.Module) -> Callable[[Path], None]:
    graph = graph_of(model)
    fields = export_config(graph)
    assert isinstance(model, fx.GraphModule)
    assert graph.spec.model.checkpoint is not None
    weights, state = published(model, graph.spec.model.checkpoint), model.state_dict()
    types = {str(tensor.dtype).removeprefix("torch.") for tensor in state.values()}

    def write(target: Path) -> None:
        text = json.dumps({**fields, "dtype": types.pop() if len(types) == 1 else "float32"}, indent=2)
        (target / CONFIG).write_text(f"{text}\n", encoding="utf-8")
        for file in write_shards(weights, state, target):
            shutil.copymode(target / CONFIG, file)

    return write


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
