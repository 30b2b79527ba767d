"""Write a model to a folder, all of it or nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from safetensors.torch import save_model
from torch import fx, nn

from tfkit.arguments import AnyPath, checked
from tfkit.builder import graph_of
from tfkit.checkpoint.files import INDEX, WEIGHTS
from tfkit.checkpoint.published import published
from tfkit.checkpoint.shards import SHARD, write_shards
from tfkit.errors import Diagnostic, SpecError, listing, quoted
from tfkit.graph.expand import Graph
from tfkit.model import BuiltModel
from tfkit.spec.render import render
from tfkit.tools.importing import CONFIG, export_config
from tfkit.tools.writing import fresh_folder

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


@checked
def save(model: BuiltModel, folder: AnyPath, *, layout: Layout = "tfkit", force: bool = False) -> tuple[Path, ...]:
    """Write a model; returns the files.

    They are written to a folder beside it, which is renamed when all is on the disk: an interrupt or a full disk
    leaves `folder` as it was.

    Args:
        model: what `tfkit.build` returned.
        folder: where to; made if it is not there.
        layout: `tfkit` writes the resolved spec and the weights by the model's own names; `huggingface` a config.json
            and the weights by the names that the spec's `checkpoint` says, as `from_pretrained` reads them.
        force: replace the model that is there.

    Raises:
        SpecError: it cannot be written, see `check_folder`; or the spec has no `checkpoint`, or says what its family
            has no words for.
    """
    graph, folder = graph_of(model), Path(folder)
    write = _own(model, graph) if layout == "tfkit" else _published(model)
    check_folder(folder, force=force)
    try:
        with fresh_folder(folder) as target:
            write(target)
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
