"""The check of a file against a model: names, shapes and types, the semantics of the weights, and omitted tensors.

A single error lists all mismatches, with similar names. Tensors of the file that the model omits are reported at
loading, and again before the model is saved without them.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from tfkit.checkpoint.adapters import additions_of
from tfkit.checkpoint.files import TensorFiles, TensorInfo
from tfkit.checkpoint.links import FamilyLinks
from tfkit.checkpoint.llama_names import LlamaNames
from tfkit.checkpoint.pattern import PatternError
from tfkit.checkpoint.remote_code import transformers_map
from tfkit.checkpoint.tensor_names import collapsed_layers, counts_by_module, name_matcher
from tfkit.checkpoint.weight_map import Link, WeightMap
from tfkit.errors import Diagnostic, LeftOutWarning, SpecError, closest_name, listing, quoted
from tfkit.graph.expand import Graph
from tfkit.graph.semantics import Semantics, ValueChange, parse_semantics, semantics_of, value_changes
from tfkit.spec.families import FamilyConfig, expanded_names
from tfkit.spec.folder import holds_code
from tfkit.spec.header import AGAIN, Malformed, parse_object, quoted_path

FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
MAX_NAMES = 8
"""Maximum number of names that are listed for each reason of an omission."""
SEMANTICS = "tfkit_meaning"
DIGEST = "tfkit_digest"
MAX_DIFFERENCES = 20
"""Maximum number of differences that an error lists."""
ALLOW_CHANGE = "load them anyway with --allow-change, in Python `allow_change=True`"


def fitting_map(
    model: nn.Module, graph: Graph, checkpoint: TensorFiles, path: Path, *, allow_change: bool = False
) -> WeightMap:
    """Return the map for the names in a file: the model's names, or the names of its family.

    Raises:
        SpecError: the file does not contain exactly this model; or, without `allow_change`, it states different
            semantic values.
    """
    weights = nearest_map(model, graph, checkpoint)
    check_tensors(weights, model.state_dict(), checkpoint.names, path)
    if not allow_change:
        check_semantics(checkpoint, graph, path)
    return weights


def nearest_map(model: nn.Module, graph: Graph, checkpoint: TensorFiles) -> WeightMap:
    """Return the map that shares most names with a file, and what the adapters of a checkpoint add; see `_nearest`."""
    weights = _nearest(model, graph, checkpoint)
    if not checkpoint.adapters:
        return weights
    assert isinstance(model, fx.GraphModule)
    return replace(weights, additions=additions_of(model, checkpoint))


def _nearest(model: nn.Module, graph: Graph, checkpoint: TensorFiles) -> WeightMap:
    """Return the map that shares most names with a file: of the model, of transformers, or of the family.

    The family is used only for a file that lacks names of the model, because a model may have components that its
    family does not describe.

    Raises:
        SpecError: the file has the names of the family, which does not describe this model.
    """
    names, family = checkpoint.names, graph.spec.family
    candidates = [WeightMap.of_model(model), transformers_map(model, graph)]
    if any(holds_code(file.parent) for file in checkpoint.metadata):
        candidates.append(transformers_map(model, graph, LlamaNames.of(model, graph)))
    nearest = max(candidates, key=lambda candidate: candidate.count_in(names))
    if family is None or nearest.count_in(names) == len(nearest.links):
        return nearest
    assert isinstance(model, fx.GraphModule)
    links = FamilyLinks(model, family)
    published = links.map.for_names(names)
    if nearest.count_in(names) >= published.count_in(names):
        return nearest
    if links.errors:
        raise links.errors[0]
    return published


def floating_type(checkpoint: TensorFiles) -> torch.dtype:
    """Return the dtype of a file's tensors and of the adapters that change them; float32 if there are several."""
    types = {info.dtype for files in (checkpoint, *checkpoint.adapters) for info in files.names.values()} & FLOATS
    return types.pop() if len(types) == 1 else torch.float32


def check_tensors(weights: WeightMap, state: Mapping[str, Tensor], file: Mapping[str, TensorInfo], path: Path) -> None:
    """Raise SpecError unless a file has exactly the tensors of a map, with matching shapes and types."""
    name = quoted(path.name)
    expected: dict[str, tuple[int, ...]] = {}
    shapes: dict[str, str] = {}
    for link in weights.links:
        views = [tuple(view.shape) for view in weights.views(link, state)]
        expected |= {key: _required_shape(link, index, views) for index, key in enumerate(link.file)}
        if all(key in file for key in link.file):
            shapes |= _shape_mismatches(link, views, file)
    unread = name_matcher(weights.unread)
    missing = collapsed_layers({key: shape for key, shape in expected.items() if key not in file})
    surplus = collapsed_layers({k: i.shape for k, i in file.items() if k not in expected and not unread.fullmatch(k)})
    types = collapsed_layers({k: file[k].dtype for k in expected if k in file and file[k].dtype not in FLOATS})
    problems: list[Diagnostic] = []
    if missing:
        notes = [
            f"{key}{f' {list(shape)}' if shape else ''}{_similar_name_note(key, surplus)}" for key, shape in missing
        ]
        problems.append(Diagnostic(f"{name} lacks tensors of the model", notes=tuple(notes)))
    if surplus:
        notes = [f"{key} {list(shape)}" for key, shape in surplus]
        problems.append(Diagnostic(f"{name} has tensors that the model lacks", notes=tuple(notes)))
    if shapes:
        notes = [f"{key}: {text}" for key, text in collapsed_layers(shapes)]
        convert = "convert them in a run with `map`, for instance to fewer key-value heads: docs/finetuning.md"
        help = None if missing or surplus else convert
        problems.append(Diagnostic(f"{name} has tensors of other shapes than the model", notes=tuple(notes), help=help))
    if types:
        notes = [f"{key}: {str(type).removeprefix('torch.')}" for key, type in types]
        problems.append(Diagnostic(f"{name} has tensors that are not floating-point numbers", notes=tuple(notes)))
    if problems:
        raise SpecError(*problems)


def _required_shape(link: Link, index: int, views: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the required shape of a tensor of the file; empty if it depends on other tensors of the file."""
    if link.pattern is None:
        return views[index]
    try:
        return link.pattern.inverse().shapes(views, link.sizes)[index]
    except PatternError:
        return ()


def _shape_mismatches(link: Link, views: list[tuple[int, ...]], file: Mapping[str, TensorInfo]) -> dict[str, str]:
    shapes = [file[name].shape for name in link.file]
    if link.pattern is None:
        pairs = zip(link.file, shapes, views, strict=True)
        return {name: f"{list(a)} in the file, {list(b)} in the model" for name, a, b in pairs if a != b}
    try:
        link.pattern.shapes(shapes, link.sizes, views)
    except PatternError as error:
        return {link.file[0]: f"{error.message}, for {link.model[0]}"}
    return {}


def _similar_name_note(name: str, surplus: Iterable[tuple[str, Any]]) -> str:
    near = closest_name(name, [key for key, _ in surplus])
    return f"; the file has {near}" if near else ""


def left_out_lines(reasons: Mapping[str, str]) -> tuple[str, ...]:
    """Return a line for each reason, with the names of its tensors, or with its modules if there are many names."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    lines = {reason: [name for name, _ in collapsed_layers(dict.fromkeys(part))] for reason, part in names.items()}
    for reason, tensors in names.items():
        if len(lines[reason]) > MAX_NAMES:
            counts = counts_by_module(tensors).items()
            lines[reason] = [f"{name} ({_tensor_count(count)})" if count > 1 else name for name, count in counts]
    return tuple(f"{reason}: {listing(texts, MAX_NAMES)}" for reason, texts in lines.items())


def _tensor_count(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count:,} tensors"


def left_out_note(reasons: Mapping[str, str], file: str) -> Diagnostic:
    """Return the diagnostic that lists the tensors of a file that the model omits."""
    return Diagnostic(f"the model omits {_tensor_count(len(reasons))} of {file}", notes=left_out_lines(reasons))


def map_without_model(family: FamilyConfig, names: Collection[str]) -> WeightMap:
    """Return the entries of a family that are in no link, with the names in a file."""
    copies, zeros = family.copies, family.zeros
    return WeightMap((), {}, family.prefix, family.body, copies, family.ignored, zeros=zeros).for_names(names)


def left_out_of(folder: Path, family: FamilyConfig) -> dict[str, str]:
    """Return the tensors of the weights in a folder that a model omits, with the reasons, from the family alone.

    Return nothing if the weights cannot be read.
    """
    texts = [text for text in family.tensors.values() if isinstance(text, str)]
    files = [family.in_file(name) for text in texts for name in expanded_names(text)]
    entries = name_matcher(name + leaf for name in files for leaf in ("", ".weight", ".bias"))
    with suppress(SpecError), TensorFiles.open(folder) as opened:
        located = map_without_model(family, opened.names)
        cut = located.prefix

        def in_family(name: str) -> str:
            return family.prefix + name.removeprefix(cut) if name.startswith(cut) else name

        # Tensors in `tensors` may be omitted, depending on the spec: loading reports these.
        reasons = located.left_out(opened.names)
        return {name: why for name, why in reasons.items() if not entries.fullmatch(in_family(name))}
    return {}


def warn_of(reasons: Mapping[str, str], file: str) -> None:
    """Issue a warning if the model omits tensors of a file."""
    if reasons:
        warnings.warn(left_out_note(reasons, file).warning(), LeftOutWarning, stacklevel=4)


# ---- the semantics of weights: metadata of a file, compared with the model that loads it ----


def safetensors_metadata(graph: Graph) -> dict[str, str]:
    """Return the metadata of every safetensors file of a model: the semantics of its tensors, and their digest."""
    semantics = semantics_of(graph)
    return {"format": "pt", DIGEST: semantics.digest, SEMANTICS: semantics.text}


def check_semantics(checkpoint: TensorFiles, graph: Graph, path: Path) -> None:
    """Raise SpecError if a file states semantics of its weights that differ from the model's."""
    reject_changes(stated_changes(checkpoint, graph), path)


def stated_changes(checkpoint: TensorFiles, graph: Graph) -> list[ValueChange]:
    """Return the differences between the semantics that a file states and the model's.

    Files that tfkit did not write state none.
    """
    expected = semantics_of(graph)
    texts = {file: text for file, text in checkpoint.metadata.items() if SEMANTICS in text}
    unequal = (file for file, text in texts.items() if text.get(DIGEST) != expected.digest)
    return next(
        filter(None, (value_changes(_stored_semantics(texts[file][SEMANTICS], file), expected) for file in unequal)), []
    )


def reject_changes(differences: Sequence[ValueChange], path: Path, *, help: str = ALLOW_CHANGE) -> None:
    """Raise SpecError if there are differences between the semantics of weights and a model's."""
    if differences:
        more = (f"and {len(differences) - MAX_DIFFERENCES} more",) if len(differences) > MAX_DIFFERENCES else ()
        notes = (*map(str, differences[:MAX_DIFFERENCES]), *more)
        message = f"the weights in {quoted_path(path)} belong to a different model"
        raise SpecError(Diagnostic(message, notes=notes, help=help))


def _stored_semantics(text: str, file: Path) -> Semantics:
    try:
        return parse_semantics(parse_object(text.encode()))
    except (Malformed, ValueError) as error:
        message = f"{quoted_path(file)} has an invalid description of the semantics of its weights: {error}"
        raise SpecError(Diagnostic(message, help=AGAIN)) from error
