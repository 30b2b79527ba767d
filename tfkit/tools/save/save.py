"""Write a model to a folder, completely or not at all."""

from __future__ import annotations

import warnings
from pathlib import Path

from torch import fx

from tfkit.arguments import AnyPath, checked
from tfkit.building.builder import graph_of
from tfkit.building.edits import check_unedited
from tfkit.building.model import BuiltModel, complete_model
from tfkit.checkpoint.files import BROKEN, not_finite
from tfkit.checkpoint.fitting import left_out_lines
from tfkit.checkpoint.folder_format import spec_text
from tfkit.errors import Diagnostic, NotFiniteWarning, SpecError, quoted
from tfkit.plugin.hooks import in_words
from tfkit.plugin.manager import AnyPlugins, load_plugins
from tfkit.tools.common.atomic_files import fresh_folder, names_in
from tfkit.tools.common.companions import companions_of
from tfkit.tools.save.layouts import ModelOrigin, layouts_of

UNREAD = "it was written unchanged, but tfkit does not load it; `safetensors.torch.load_file` reads its weights"


@checked
def save(
    model: BuiltModel,
    folder: AnyPath,
    *,
    layout: str = "tfkit",
    force: bool = False,
    files_from: AnyPath | None = None,
    allow_drop: bool = False,
    allow_change: bool = False,
    names: str | None = None,
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
            `trust_remote_code=True`, and which is proved to compute the same before the folder is moved to its place;
            or the layout of a plugin.
        force: replace an existing model.
        files_from: the folder of a published model, or a file in it, by default the source of the model's weights. Its
            tokenizer, chat template, generation config and processors are copied unchanged, and so are the fields of
            its config.json that do not determine the model, such as the ids that end a text.
        allow_drop: write `huggingface` without the tensors of the published file that the family omits, such as
            the tensors of another head.
        allow_change: write the spec of a model whose modules were changed after it was built, such as an activation or
            a hook. The written model computes what the spec describes.
        names: `llama` writes `transformers` with separate projections and the names of Llama, such as
            `self_attn.q_proj`, on which adapters, quantization configs and parallel plans of published models depend.
            An attention or FFN without these projections keeps its names, with a `tfkit.NamesWarning`.
        plugins: the plugins that the spec was read with, and whose layouts are available; by default, all installed
            plugins.

    Raises:
        SpecError: there is no such layout, or it does not support `names`; or the folder contains a model, unless
            `force`, or other files; or the spec has no `checkpoint`, or a value that its family cannot express; or
            tensors would be missing, unless `allow_drop`; or the modules of the model differ from its spec, unless
            `allow_change`.
    """
    model, folder = complete_model(model), Path(folder)
    graph = graph_of(model)
    source = model.meta.get("filled_from") if files_from is None else Path(files_from)
    plugins = plugins or load_plugins()
    layouts = layouts_of(plugins)
    chosen = layouts.choose(layout, names)
    check_unedited(model, allow_change=allow_change)
    if chosen.drops and not allow_drop:
        _check_nothing_left_out(model)
    companions = companions_of(source, graph.spec.family)
    layouts.check_folder(folder, force=force, companions=companions)
    broken = not_finite(model.state_dict())
    if broken and names_in(folder):
        message = f"the model has {BROKEN}: it cannot replace the model in {quoted(str(folder))}"
        raise SpecError(Diagnostic(message, notes=(broken,), help="name a new folder"))
    try:
        with fresh_folder(folder) as target:
            chosen.write(model, target, ModelOrigin(spec_text(graph.spec), companions, source, plugins, names))
    except SpecError:
        raise
    except Exception as error:
        raise _write_error(error, folder, f"in the layout `{layout}`, from {layouts.plugins[layout]}") from error
    if broken:
        message = f"the model in {quoted(str(folder))} has {BROKEN}"
        text = Diagnostic(message, notes=(broken,), help=UNREAD).warning()
        warnings.warn(text, NotFiniteWarning, stacklevel=3)
    return tuple(sorted(folder.iterdir(), reverse=True))


def _write_error(error: Exception, folder: Path, origin: str) -> SpecError:
    """Return the error of a folder that cannot be written; `origin` names the code that failed, unless the disk did."""
    of_disk = getattr(error, "strerror", None)
    notes = () if of_disk else (origin,)
    return SpecError(Diagnostic(f"cannot write {quoted(str(folder))}: {of_disk or in_words(error)}", notes=notes))


def _check_nothing_left_out(model: fx.GraphModule) -> None:
    """Raise SpecError if the file that filled the model has tensors that the written file would lack."""
    reasons = model.meta.get("left_out")
    if reasons:
        message = f"{len(reasons):,} tensors of the file that filled the model would be missing"
        help = "write it without them with --allow-drop, in Python `allow_drop=True`"
        raise SpecError(Diagnostic(message, notes=left_out_lines(reasons), help=help))
