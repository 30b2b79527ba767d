"""From the file of a run to a checked one: the same language as of models, and a model inside.

`model:` is a path, the name of a spec, or a spec in place. A run that extends another changes its model too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tfkit.component import Data
from tfkit.errors import Diagnostic, Invalid, Source, Span, SpecError, closest, quoted
from tfkit.plugin.manager import Plugins
from tfkit.spec.folder import RUN
from tfkit.spec.load import (
    SUFFIXES,
    Language,
    Spec,
    based,
    find_spec,
    read_based,
    resolve_spec,
    shortest,
    specs_folder,
)
from tfkit.spec.merge import assign, extended, without
from tfkit.spec.messages import crashed, refused
from tfkit.spec.model_spec import ModelSpec
from tfkit.spec.provenance import SET, Provenance
from tfkit.spec.resolve import Resolver
from tfkit.spec.run import RunSpec
from tfkit.spec.scope import Given
from tfkit.spec.tree import Mapping, Node, Scalar
from tfkit.spec.tree import Sequence as ListNode

MODEL = "model"
VOCABULARY = "data.vocab_size"
"""The value in a run's model that stands for the size of the data's vocabulary."""


@dataclass(frozen=True)
class RunFile:
    """A run that has been read: its values and their origins, its model, and its data."""

    config: RunSpec
    model: Spec
    data: Data
    provenance: Provenance
    file: str
    notes: tuple[Diagnostic, ...] = ()
    """Warnings."""

    def place(self, path: tuple[str, ...]) -> Span | None:
        """The place of a value of the run."""
        return self.provenance.span(path)


def shipped_runs() -> list[str]:
    """The names of the runs that come with tfkit."""
    return sorted(path.stem for path in (specs_folder() / "runs").glob("*.yaml"))


def find_run(name: str | os.PathLike[str], *, beside: Path | None = None, span: Span | None = None) -> Path:
    """The file of a run, by its path, by the folder that it was trained in, or by the name of one of tfkit's own.

    Relative paths start from the folder `beside`. Raises SpecError if there is no such file.
    """
    text = os.fspath(name)
    path = (beside or Path()) / text
    if (path / RUN).is_file():
        return path / RUN
    if text.endswith(SUFFIXES) and (span is None or path.is_file()):
        return path
    shipped = specs_folder() / "runs" / f"{text.removeprefix('runs/')}.yaml"
    if shipped.is_file():
        return shipped
    near = closest(Path(text).stem, shipped_runs())
    help = f"a run with a similar name exists: `{near}`" if near else "give the path of a file: ./my_run.yaml"
    raise SpecError(Diagnostic(f"there is no run {quoted(text)}", span, "extends" if span else "", help=help))


def read_run(name: str | os.PathLike[str], plugins: Plugins, *, sets: Iterable[str] = ()) -> RunFile:
    """Read a run, its model and its data, changed by `sets` (`path=value`); raises SpecError with every error in it."""
    path = find_run(name)
    root = read_based(path, language=RUNS)
    return _resolved(root, list(sets), plugins, str(shortest(path)))


# ---- the model inside a run ----


def _merged(base: Mapping | None, root: Mapping, folder: Path) -> Mapping:
    """A run over the one that it extends; a model that is a name, or extends another, replaces that of the base."""
    own = {name: _listed(node) if name in ("track", "callbacks") else node for name, node in root.items.items()}
    root = Mapping(own, root.keys, root.span)
    model, under = root.items.get(MODEL), base.items.get(MODEL) if base else None
    if isinstance(model, Mapping) and "extends" not in model.items and isinstance(under, Mapping):
        model = extended(without(under, {"parameters"}), model)
    elif model is not None:
        model = _model(model, folder)
    merged = root if base is None else extended(without(base, {MODEL}), without(root, {MODEL}))
    model = under if model is None else model
    return merged if model is None else _with_model(merged, model, (root if MODEL in root.keys else base or root).keys)


def _with_model(root: Mapping, model: Node, keys: dict[str, Span]) -> Mapping:
    return Mapping({**root.items, MODEL: model}, {**root.keys, MODEL: keys.get(MODEL, model.span)}, root.span)


RUNS = Language(find_run, _merged)


def _model(node: Node, folder: Path) -> Node:
    """The tree of the spec that `model:` names or holds."""
    if isinstance(node, Scalar) and isinstance(node.value, str):
        return read_based(find_spec(node.value, beside=folder, span=node.span))
    if isinstance(node, Mapping):
        return based(node, folder)
    help = "write `model: gpt2`, a path, or a mapping"
    raise SpecError(Diagnostic("`model` takes a spec: its name, its path, or its text", node.span, MODEL, help=help))


def _listed(node: Node) -> Node:
    """One kind where a list of them belongs, as a list."""
    return node if isinstance(node, ListNode) or node == Scalar(None, node.span) else ListNode((node,), node.span)


def _changed(root: Mapping, sets: list[str], shared: frozenset[str]) -> Mapping:
    """A run changed by all `--set` arguments; raises SpecError with the errors of all of them."""
    errors: list[Diagnostic] = []
    for argument in sets:
        try:
            root = _assigned(root, argument, frozenset(ModelSpec.model_fields) | shared)
        except SpecError as wrong:
            errors += wrong.diagnostics
    if errors:
        raise SpecError(*errors)
    return root


def _assigned(root: Mapping, argument: str, of_model: frozenset[str]) -> Mapping:
    """A run changed by one `--set` argument; `of_model` are the keys at the top of its model."""
    name = argument.partition("=")[0].strip()
    model = root.items.get(MODEL)
    if name.startswith(f"{MODEL}.") and isinstance(model, Mapping):
        changed = assign(without(model, {"parameters"}), argument, of_model, what="model", within=f"{MODEL}.")
        return _with_model(root, changed, root.keys)
    root = assign(root, argument, frozenset({*RunSpec.model_fields, MODEL}), what="run")
    if name == MODEL:
        return _with_model(root, _model(root.items[MODEL], Path()), root.keys)
    if name in ("track", "callbacks") and name in root.items:
        return Mapping({**root.items, name: _listed(root.items[name])}, root.keys, root.span)
    return root


# ---- values ----


def _resolved(root: Mapping, sets: list[str], plugins: Plugins, file: str) -> RunFile:
    changed = _changed(root, sets, plugins.registry.shared_names())
    model = changed.items.get(MODEL)
    own = without(changed, {MODEL})
    scope: dict[str, Given] = {}
    scope |= {name: Given(node, (name,), scope) for name, node in own.items.items() if isinstance(node, Scalar)}
    resolver = Resolver(plugins)
    config = resolver.config(RunSpec, own, (), scope)
    errors = resolver.diagnostics
    if not isinstance(model, Mapping):
        help = "write `model: gpt2`, a path, or a mapping"
        errors.append(Diagnostic("the run has no `model`", root.span, MODEL, help=help))
    if errors:
        raise SpecError(*errors)
    assert isinstance(model, Mapping)
    provenance = resolver.provenance
    config, data = _data(config, provenance)
    named = {key: own.items[key] for key in ("tfkit", "name") if key not in model.items}
    model = Mapping({**named, **model.items}, {**own.keys, **model.keys}, model.span)
    spec = resolve_spec(_with_vocabulary(model, data), plugins, file=file)
    return RunFile(config, spec, data, provenance, file, spec.notes)


def _data(config: RunSpec, provenance: Provenance) -> tuple[RunSpec, Data]:
    """The run with places of its data that hold everywhere, and the data."""
    span = provenance.span(("data", "files")) or provenance.span(("data",))
    located = config.data.located(_folder(span.source if span else None))
    try:
        data = located.build(config.batch.length)
    except Invalid as wrong:
        raise SpecError(refused(wrong, ("data",), provenance)) from wrong
    except Exception as wrong:
        raise SpecError(crashed(type(located), "`build`", wrong, ("data",), provenance)) from wrong
    return config.model_copy(update={"data": located}), data


def _folder(text: Source | None) -> Path:
    """The folder where paths in a text start."""
    return Path() if text is None or text.name == SET else Path(text.name).parent


def _with_vocabulary(node: Node, data: Data) -> Mapping:
    """A model in which `data.vocab_size` is the number."""

    def filled(node: Node) -> Node:
        if isinstance(node, Mapping):
            return Mapping({name: filled(one) for name, one in node.items.items()}, node.keys, node.span)
        if isinstance(node, ListNode):
            return ListNode(tuple(map(filled, node.items)), node.span)
        return Scalar(data.vocab_size, node.span) if node.value == VOCABULARY else node

    found = filled(node)
    assert isinstance(found, Mapping)
    return found
