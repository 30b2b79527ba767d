"""Write a model to a folder, completely or not at all."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from torch import fx

from tfkit.arguments import AnyPath, checked, name_of
from tfkit.building.builder import graph_of
from tfkit.building.edits import check_unedited
from tfkit.building.model import BuiltModel, whole
from tfkit.checkpoint.config_json import with_further_fields
from tfkit.checkpoint.files import BROKEN, not_finite
from tfkit.checkpoint.fitting import left_out_lines, safetensors_metadata
from tfkit.checkpoint.folder_format import spec_text, write_model
from tfkit.checkpoint.links import published
from tfkit.checkpoint.weight_map import SHARD, write_shards
from tfkit.errors import Diagnostic, NotFiniteWarning, SpecError, listing, quoted
from tfkit.plugin.manager import AnyPlugins, Plugins
from tfkit.spec.folder import CONFIG, EXPORT_CONFIG, GENERATION, INDEX, SPEC, WEIGHTS
from tfkit.tools.common.atomic_files import fresh_folder, names_in
from tfkit.tools.common.companions import NO_COMPANIONS, Companions, companions_of, is_companion
from tfkit.tools.import_.importing import export_config

UNREAD = "it was written unchanged, but tfkit does not load it; `safetensors.torch.load_file` reads its weights"
WITH_CODE = ("README.md", "model.svg")
"""Additional files of the layout transformers."""
FORMS = (SHARD, re.compile(r"(modeling|configuration)_\w+\.py"))
"""Patterns of the names of shards, and of files with code."""
Layout = Literal["tfkit", "huggingface", "transformers"]


def check_folder(folder: Path, *, force: bool, companions: Companions = NO_COMPANIONS) -> None:
    """Raise SpecError if `folder` exists and `force` is false, or if it contains files that do not belong to a model.

    A tokenizer, or a file next to it, counts as an additional file, unless the new model has `companions` as well.
    """
    names = names_in(folder) or []
    replaced = {name for name in names if is_companion(name)} if companions.files else set()
    replaceable = {SPEC, WEIGHTS, INDEX, CONFIG, EXPORT_CONFIG, GENERATION, *WITH_CODE, *replaced}
    extras = [name for name in names if name not in replaceable and not any(form.fullmatch(name) for form in FORMS)]
    if extras:
        message = f"{quoted(str(folder))} must hold only the files of a model; got {listing(extras, 4)}"
        raise SpecError(Diagnostic(message, help="name a new folder"))
    if names and not force:
        raise SpecError(Diagnostic(f"{quoted(str(folder))} already exists", help="replace it with --force"))


@checked
def save(
    model: BuiltModel,
    folder: AnyPath,
    *,
    layout: Layout = "tfkit",
    force: bool = False,
    files_from: AnyPath | None = None,
    allow_drop: bool = False,
    allow_change: bool = False,
    plugins: AnyPlugins | None = None,
) -> tuple[Path, ...]:
    """Write a model, and return the files.

    They are written to a folder next to it, which replaces it in one step once everything is on the disk: an interrupt,
    a full disk or the end of the process leaves `folder` as it was. Weights that are not finite are written too, with a
    `tfkit.NotFiniteWarning`: they do not load, and replace no other model.

    Args:
        model: a model that `tfkit.build` returned.
        folder: the folder to write; created if it does not exist.
        layout: `tfkit` writes the resolved spec and the weights by the model's names; `huggingface` the spec, a
            config.json, and the weights by the names in the spec's `checkpoint`, as `from_pretrained`
            reads them; `transformers` the code of the model, which `from_pretrained` opens with
            `trust_remote_code=True`, and which is proved to compute the same before the folder is moved to its place.
        force: replace an existing model.
        files_from: the folder of a published model, or a file in it, by default the source of the model's weights. Its
            tokenizer, chat template, generation config and processors are copied unchanged, and so are the fields of
            its config.json that do not determine the model, such as the ids that end a text.
        allow_drop: write `huggingface` without the tensors of the published file that the family omits, such as
            the tensors of another head.
        allow_change: write the spec of a model whose modules were changed after it was built, such as an activation or
            a hook. The written model computes what the spec describes.
        plugins: the plugins that the spec was read with; only `huggingface` reads it again.

    Raises:
        SpecError: it cannot be written, see `check_folder`; or the spec has no `checkpoint`, or a value that its family
            cannot express; or tensors would be missing, unless `allow_drop`; or the modules of the model differ from
            its spec, unless `allow_change`.
    """
    model, folder = whole(model), Path(folder)
    graph = graph_of(model)
    source = model.meta.get("filled_from") if files_from is None else Path(files_from)
    check_unedited(model, allow_change=allow_change)
    if layout == "huggingface" and not allow_drop:
        _check_nothing_left_out(model)
    companions = companions_of(source, graph.spec.family)
    if layout == "transformers":
        write = _proved(model, companions, source)
    elif layout == "huggingface":
        write = _published(model, companions, plugins)
    else:
        write = _resolved(model, companions)
    check_folder(folder, force=force, companions=companions)
    broken = not_finite(model.state_dict())
    if broken and names_in(folder):
        message = f"the model has {BROKEN}: it cannot replace the model in {quoted(str(folder))}"
        raise SpecError(Diagnostic(message, notes=(broken,), help="name a new folder"))
    try:
        with fresh_folder(folder) as target:
            write(target)
    except SpecError:
        raise
    except Exception as error:
        cause = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise SpecError(Diagnostic(f"cannot write {quoted(str(folder))}: {cause}")) from error
    if broken:
        message = f"the model in {quoted(str(folder))} has {BROKEN}"
        text = Diagnostic(message, notes=(broken,), help=UNREAD).render("warning")
        warnings.warn(text.removeprefix("warning: "), NotFiniteWarning, stacklevel=3)
    return tuple(sorted(folder.iterdir(), reverse=True))


def _proved(model: fx.GraphModule, companions: Companions, weights_from: Path | None) -> Callable[[Path], None]:
    """Return the function that writes the code and weights of a model, and verifies them with transformers."""
    from tfkit.tools.save.remote_code.folder import write_folder
    from tfkit.tools.save.remote_code.parts import parts_of
    from tfkit.tools.save.remote_code.proof import Folders, check_transformers

    check_transformers()
    graph = graph_of(model)
    parts_of(graph)

    def write(target: Path) -> None:
        with Folders() as process:
            write_folder(
                model, target, spec_text(graph.spec), process, companions=companions, weights_from=weights_from
            )

    return write


def _check_nothing_left_out(model: fx.GraphModule) -> None:
    """Raise SpecError if the file that filled the model has tensors that the written file would lack."""
    reasons = model.meta.get("left_out")
    if reasons:
        message = f"{len(reasons):,} tensors of the file that filled the model would be missing"
        help = "write it without them with --allow-drop, in Python `allow_drop=True`"
        raise SpecError(Diagnostic(message, notes=left_out_lines(reasons), help=help))


def _resolved(model: fx.GraphModule, companions: Companions) -> Callable[[Path], None]:
    def write(target: Path) -> None:
        companions.write(target)
        write_model(model, graph_of(model), target)

    return write


def _published(model: fx.GraphModule, companions: Companions, plugins: Plugins | None) -> Callable[[Path], None]:
    graph = graph_of(model)
    fields = with_further_fields(export_config(graph, plugins), companions.fields)
    assert graph.spec.family is not None
    weights, state = published(model, graph.spec.family), model.state_dict()
    types = {name_of(tensor.dtype) for tensor in state.values()}

    def write(target: Path) -> None:
        companions.write_files(target)
        text = json.dumps({**fields, "dtype": types.pop() if len(types) == 1 else "float32"}, indent=2)
        (target / CONFIG).write_text(f"{text}\n", encoding="utf-8")
        (target / SPEC).write_text(spec_text(graph.spec), encoding="utf-8")
        for file in write_shards(weights, state, target, metadata=safetensors_metadata(graph)):
            shutil.copymode(target / CONFIG, file)

    return write
