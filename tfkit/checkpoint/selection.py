"""Loading only some tensors of a checkpoint, or initializing some weights of a model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from torch import fx

from tfkit.checkpoint.files import TensorFiles
from tfkit.checkpoint.fitting import check_tensors, nearest_map, reject_changes, stated_changes
from tfkit.checkpoint.tensor_names import collapsed_layers
from tfkit.checkpoint.weight_map import Link, WeightMap
from tfkit.errors import Diagnostic, Invalid, SpecError, closest_name, listing, quoted
from tfkit.graph.semantics import ValueChange
from tfkit.nn.spread import outlines
from tfkit.spec.extending import short_path
from tfkit.spec.folder import model_folder

ALLOW = "list what to skip: `weights: {path: ..., missing: [names in the model], unused: [names in the file]}`"
SIDES = "`missing` takes the names of the model's weights, `unused` the names of the file's tensors"
CHANGE = "accept them with `allow_change: true`, or only some of them by their paths: `allow_change: [decoder.ffn]`"
_NUMBERS = re.compile(r"\.layers\.[^.]+")


@dataclass(frozen=True)
class Selection:
    """The weights that a model takes from a checkpoint, and the weights that are omitted."""

    missing: Sequence[str] = ()
    """Patterns of the model's weights that keep their values."""
    unused: Sequence[str] = ()
    """Patterns of the checkpoint's tensors that are not used; with a map, of the weights of its model."""
    allow_change: bool | Sequence[str] = False
    """Patterns of semantic values that may differ, or True for all values."""

    def fill(self, model: fx.GraphModule, path: Path) -> str:
        """Fill a model, and return a description.

        Raises:
            SpecError: the weights cannot be read, or do not fit.
            Invalid: a pattern or an entry of the map is invalid, or without effect; its field is a name of this class.
        """
        return _in_part(model, model_folder(path), self)

    def check(self, model: fx.GraphModule, path: Path) -> None:
        """Raise the errors of `fill` that need no values. The model may be on the meta device, and does not change."""
        _in_part(model, model_folder(path), self, values=False)

    def filled(self, model: fx.GraphModule, path: Path) -> fx.GraphModule:
        """Fill a model and return it. Raise SpecError also for invalid patterns and maps."""
        try:
            self.fill(model, path)
        except Invalid as error:
            raise SpecError(Diagnostic(error.message, notes=tuple(error.notes), help=error.help)) from error
        model.meta["filled_from"] = path.absolute()
        return model


def _in_part(model: fx.GraphModule, path: Path, selection: Selection, *, values: bool = True) -> str:
    graph = model.meta["graph"]
    with TensorFiles.open(path) as checkpoint:
        weights = nearest_map(model, graph, checkpoint)
        read, missing, unused = _selected_map(weights, checkpoint.names, selection)
        try:
            check_tensors(read, outlines(model.state_dict()), checkpoint.names, path)
        except SpecError as error:
            raise mismatch_error(path, {part.message: part.notes for part in error.diagnostics}) from error
        reject_changes(not_allowed(stated_changes(checkpoint, graph), selection), path, help=CHANGE)
        if values:
            state = model.state_dict()
            read.check_values(checkpoint, state)
            read.load(checkpoint, state, checked=True)
    left = sorted(weights.left_out(name for name in checkpoint.names if name not in unused))
    count = f"{len(read.links):,} of {len(weights.links):,} tensors from {short_path(path)}"
    return weights_description(count, omitted=left, missing=missing, unused=unused)


def _selected_map(
    weights: WeightMap, names: Collection[str], selection: Selection
) -> tuple[WeightMap, list[str], list[str]]:
    """Return the map of the tensors to load, the names in `missing`, and the names in `unused`."""
    links: list[Link] = []
    left_out: list[Link] = []
    for link in weights.links:
        (left_out if all(matches_any(name, selection.missing) for name in link.model) else links).append(link)
    copied = {weights.locations[name].parameter for link in left_out for name in link.model}
    for addition in weights.additions:
        if addition.location.parameter in copied:
            message = f"an adapter changes `{addition.location.parameter}`, which must not be `missing`"
            raise Invalid("missing", message, help="omit it from `missing`, or name the weights without the adapter")
    taken = {name for link in links for name in link.file}
    unread = [name for name in names if name not in taken]
    unused = [name for name in unread if matches_any(name, selection.unused)]
    names_of_model = _names_of(weights.links)
    surplus = "no tensor that the model does not read matches"
    check_matches("missing", selection.missing, names_of_model, names, "no weight of the model matches")
    check_matches("unused", selection.unused, unread, set(names_of_model) - set(names), surplus)
    ignored = {**weights.ignored, **dict.fromkeys(unused, "listed as unused")}
    # A family describes files in which the head has no tensor, but a copy of the table. This head has a tensor.
    separate = {name for link in left_out for name in link.file}
    copies = {name: other for name, other in weights.copies.items() if name not in separate}
    zeros = {name: path for name, path in weights.zeros.items() if name not in separate}
    read = replace(weights, links=tuple(links), ignored=ignored, copies=copies, zeros=zeros)
    return read, _names_of(left_out), unused


def _names_of(links: Sequence[Link]) -> list[str]:
    """Return the names in the model, sorted."""
    return [name for link in links for name in link.model]


def not_allowed(differences: Sequence[ValueChange], selection: Selection) -> list[ValueChange]:
    """Return the differences that `allow_change` does not cover. Raise `Invalid` for a pattern without effect."""
    if isinstance(selection.allow_change, bool):
        return [] if selection.allow_change else list(differences)
    paths = [without_layers(change.path) for change in differences]
    check_matches("allow_change", selection.allow_change, paths, (), "no value that differs matches")
    return [
        change for change, path in zip(differences, paths, strict=True) if not matches_any(path, selection.allow_change)
    ]


def without_layers(path: str) -> str:
    """Return the path of a semantic value without numbers of layers, by which the layers of a deeper model differ."""
    return _NUMBERS.sub("", path)


def no_match(field: str, message: str, pattern: str, names: Sequence[str]) -> Invalid:
    """Return the error for a pattern that matches no name in `names`."""
    words = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
    parts = [part.strip("*") for part in pattern.split(".") if part.strip("*")]
    near = next((word for part in parts if part not in words and (word := closest_name(part, words))), None)
    help = (
        f"a component with a similar name exists: `{near}`"
        if near
        else f"names are such as `{names[-1]}`"
        if names
        else None
    )
    return Invalid(field, message, help=help)


def check_matches(
    field: str, patterns: Sequence[str], names: Collection[str], other_side: Collection[str], message: str
) -> None:
    """Raise `Invalid` for a pattern without a match in `names`. The help names a match in `other_side`, if any."""
    for number, pattern in enumerate(patterns):
        if any(is_match(name, pattern) for name in names):
            continue
        error = no_match(f"{field}.{number}", f"{message} {quoted(pattern)}", pattern, list(names))
        if any(is_match(name, pattern) for name in other_side):
            error.help = SIDES
        raise error


def is_match(name: str, pattern: str) -> bool:
    """Return True if a pattern matches a name, or the name of a component that contains it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a name matches one of the patterns."""
    return any(is_match(name, pattern) for pattern in patterns)


def mismatch_error(path: Path, problems: Mapping[str, Sequence[str]]) -> SpecError:
    """Return the error for weights that do not fit, with lists of names by problem."""
    notes = [line for message, names in problems.items() for line in (f"{message}:", *(f"  {name}" for name in names))]
    message = f"the weights in {quoted(str(short_path(path)))} do not fit the model"
    return SpecError(Diagnostic(message, notes=tuple(notes), help=ALLOW))


def weights_description(count: str, **names: Sequence[str]) -> str:
    """Return a count of weights, and lists of names, with equal layers of a stack listed once."""
    return "; ".join(
        [count, *(f"{title}: {listing(shortened_names(part), 24)}" for title, part in names.items() if part)]
    )


def shortened_names(names: Sequence[str]) -> list[str]:
    """Return the names, with equal layers of a stack listed once."""
    return [name for name, _ in collapsed_layers(dict.fromkeys(names))]
