"""Initial weights of a run: loading all or part of a checkpoint, and freezing parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from torch import fx

from tfkit.building.builder import graph_of
from tfkit.checkpoint.files import TensorFiles
from tfkit.checkpoint.fitting import check, check_meaning, nearest_map
from tfkit.checkpoint.tensor_names import collapsed
from tfkit.checkpoint.weight_map import Link, WeightMap
from tfkit.errors import Diagnostic, Invalid, SpecError, listing, quoted
from tfkit.run.checked_run import Run
from tfkit.run.run_spec import WeightsConfig
from tfkit.run.training.optimizer import no_match
from tfkit.spec.extending import shortest
from tfkit.spec.folder import model_folder

ALLOW = "list what to skip: `weights: {path: ..., missing: [names in the model], unused: [names in the file]}`"
SIDES = "`missing` takes the names of the model's weights, `unused` the names of the file's tensors"
CHANGE = "`weights: {path: ..., allow_change: true}` begins with them anyway"


def begin(model: fx.GraphModule, run: Run) -> dict[str, str]:
    """Fill a new model with the weights that its run names, and freeze some; return what was done, in words.

    Raises:
        SpecError: the weights cannot be read, or do not fit; or a pattern matches nothing.
    """
    done = {}
    config = run.config.weights
    if config is not None:
        try:
            done["weights"] = _fill(model, config)
        except Invalid as error:
            raise run.refused(error, "weights") from error
        except SpecError as error:
            raise run.file.placed(error, "weights") from error
    if run.branch is not None:
        done["branch"] = f"{run.branch.name.replace('-', ' ')} of {shortest(run.branch.parent)}"
    if run.config.freeze:
        try:
            done["frozen"] = listing(_collapsed(freeze(model, run.config.freeze)), 24)
        except Invalid as error:
            raise run.refused(error) from error
    return done


def freeze(model: fx.GraphModule, patterns: Sequence[str]) -> list[str]:
    """Take the parameters of these names out of training; returns their names.

    Raises `Invalid` for a pattern that matches nothing, and if nothing is left.
    """
    names = dict(model.named_parameters())
    _check_matches("freeze", patterns, names, (), "no parameter matches")
    frozen = [name for name in names if _matches(name, patterns)]
    if len(frozen) == len(names):
        raise Invalid("freeze", "every parameter is frozen: there is nothing to train")
    for name in frozen:
        names[name].requires_grad_(False)
    return frozen


def _fill(model: fx.GraphModule, config: WeightsConfig) -> str:
    path = model_folder(Path(config.path))
    graph = graph_of(model)
    with TensorFiles.open(path) as checkpoint:
        weights = nearest_map(model, graph, checkpoint)
        read, missing, unused = _in_part(weights, checkpoint.names, config)
        _check(read, model, checkpoint, path)
        if not config.allow_change:
            _check_meaning(checkpoint, model, path)
        read.load(checkpoint, model.state_dict())
    parts = [f"{len(read.links):,} of {len(weights.links):,} tensors from {shortest(path)}"]
    left = sorted(weights.left_out(name for name in checkpoint.names if name not in unused))
    parts += [f"omitted: {listing(_collapsed(left), 24)}"] if left else []
    parts += [f"missing: {listing(_collapsed(missing), 24)}"] if missing else []
    parts += [f"unused: {listing(_collapsed(unused), 24)}"] if unused else []
    return "; ".join(parts)


def _in_part(
    weights: WeightMap, names: Collection[str], config: WeightsConfig
) -> tuple[WeightMap, list[str], list[str]]:
    """Return the map of the tensors to load, the model's allowed missing names, and the file's allowed unused names."""
    links: list[Link] = []
    left_out: list[Link] = []
    for link in weights.links:
        (left_out if all(_matches(name, config.missing) for name in link.model) else links).append(link)
    taken = {name for link in links for name in link.file}
    unread = [name for name in names if name not in taken]
    unused = [name for name in unread if _matches(name, config.unused)]
    names_of_model = _own(weights.links)
    surplus = "no tensor that the model does not read matches"
    _check_matches("missing", config.missing, names_of_model, names, "no weight of the model matches")
    _check_matches("unused", config.unused, unread, set(names_of_model) - set(names), surplus)
    ignored = {**weights.ignored, **dict.fromkeys(unused, "omitted by the run")}
    # A family says what its file holds for a head without a tensor, such as a copy of the table; this head has tensors.
    separate = {name for link in left_out for name in link.file}
    copies = {name: other for name, other in weights.copies.items() if name not in separate}
    zeros = {name: path for name, path in weights.zeros.items() if name not in separate}
    read = replace(weights, links=tuple(links), ignored=ignored, copies=copies, zeros=zeros)
    return read, _own(left_out), unused


def _own(links: Sequence[Link]) -> list[str]:
    return [name for link in links for name in link.model]


def _check(weights: WeightMap, model: fx.GraphModule, checkpoint: TensorFiles, path: Path) -> None:
    try:
        check(weights, model.state_dict(), checkpoint.names, path)
    except SpecError as error:
        notes = [
            line
            for diagnostic in error.diagnostics
            for line in (f"{diagnostic.message}:", *(f"  {n}" for n in diagnostic.notes))
        ]
        message = f"the weights in {quoted(str(shortest(path)))} do not fit the model"
        raise SpecError(Diagnostic(message, notes=tuple(notes), help=ALLOW)) from error


def _check_meaning(checkpoint: TensorFiles, model: fx.GraphModule, path: Path) -> None:
    try:
        check_meaning(checkpoint, graph_of(model), path)
    except SpecError as error:
        raise SpecError(*(replace(diagnostic, help=CHANGE) for diagnostic in error.diagnostics)) from error


def _check_matches(
    field: str, patterns: Sequence[str], names: Collection[str], other_side: Collection[str], message: str
) -> None:
    """Raise `Invalid` for a pattern that matches none of the names; its help says if it matches the other side's."""
    for number, pattern in enumerate(patterns):
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        error = no_match(f"{field}.{number}", f"{message} {quoted(pattern)}", pattern, list(names))
        if any(fnmatchcase(name, pattern) for name in other_side):
            error.help = SIDES
        raise error


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _collapsed(names: Sequence[str]) -> list[str]:
    """Return the names, with equal layers of a stack listed once."""
    return [name for name, _ in collapsed(dict.fromkeys(names))]
