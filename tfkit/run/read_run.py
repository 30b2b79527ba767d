"""Reading a run: from its file to resolved values, a model and data. The language is the language of specs.

`model:` is a path, the name of a spec, or an inline spec. A run that extends a different run also changes its model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from collections.abc import Mapping as MappingABC
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tfkit.component import Config, ContentMarker, marker
from tfkit.errors import Diagnostic, Invalid, Source, Span, SpecError, quoted, similar
from tfkit.plugin.known_specs import KnownSpecs, own_specs
from tfkit.plugin.manager import Plugins
from tfkit.run.contract import Data
from tfkit.run.guarded_data import GuardedData, guarded
from tfkit.run.run_spec import ENDS, LISTS, MODEL, RunSpec
from tfkit.spec.data import read_data
from tfkit.spec.extending import (
    MAX_EXTENDS,
    SUFFIXES,
    Language,
    based,
    is_folder,
    read_based,
    read_named,
    shortest,
    yaml_files,
)
from tfkit.spec.folder import RUN
from tfkit.spec.load import Spec, models, resolve_spec
from tfkit.spec.merge import Change, change_of, extended, is_null, put, without
from tfkit.spec.messages import fault_in, refused
from tfkit.spec.model_spec import ModelSpec
from tfkit.spec.provenance import SET, Provenance
from tfkit.spec.resolve import Resolver, Scoped
from tfkit.spec.source import read
from tfkit.spec.tree import Mapping, Node, Scalar
from tfkit.spec.tree import Sequence as ListNode

SIZES = {"data.vocab_size": "vocab_size", "data.n_classes": "n_classes"}
"""Values in a run's model that stand for a size of the data, each with the attribute of the data."""


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
        """Return the location of a value of the run."""
        return self.provenance.span(path)

    def placed(self, error: SpecError, *path: str) -> SpecError:
        """Return an error with the location of a value of the run."""
        span = self.place(path)
        return SpecError(*(replace(diagnostic, span=span, path=".".join(path)) for diagnostic in error.diagnostics))


def shipped_runs() -> list[str]:
    """Return the names of the runs that come with tfkit."""
    return sorted(path.stem for path in (own_specs() / "runs").glob("*.yaml"))


def find_run(
    name: str | os.PathLike[str], *, folder: Path | None = None, span: Span | None = None, key: str = "extends"
) -> Path:
    """Return the file of a run. `name` is its path, the folder in which it was trained, or the name of a shipped run.

    Relative paths start from `folder`. `key` is the key whose value is the name, at `span`. Raises SpecError
    if there is no such file.
    """
    text = os.fspath(name)
    path = (folder or Path()) / text
    if os.path.isfile(path / RUN):
        return path / RUN
    if text.endswith(SUFFIXES) and (span is None or os.path.exists(path)):
        return path
    shipped = own_specs() / "runs" / f"{text.removeprefix('runs/')}.yaml"
    if os.path.isfile(shipped):
        return shipped
    help = similar(
        "a run",
        path.stem,
        shipped_runs(),
        "give the path of a file, ./my_run.yaml, or a name that `tfkit list run` prints",
    )
    help = similar("a run", path.name, [file.name for file in yaml_files(path.parent)], help)
    raise SpecError(Diagnostic(f"there is no run {quoted(text)}", span, key if span else "", help=help))


def is_run(name: str, specs: KnownSpecs, *, folder: Path = Path(), depth: int = MAX_EXTENDS) -> bool:
    """Return True for the name of a shipped run, and for a file that has the keys of a run or extends a run.

    Relative paths start from `folder`. Names of specs, folders, and files that cannot be read are not runs. `depth` is
    the longest chain of `extends`.
    """
    if name in specs.files or is_folder(name, specs, folder=folder):
        return False
    try:
        path = find_run(name, folder=folder)
        keys = read(path).items
    except SpecError:  # the command reports it for a model
        return False
    if any(key in keys for key in ModelSpec.typical):
        return False
    if all(key in keys for key in RunSpec.typical):
        return True
    base, is_part = keys.get("extends"), {*keys} <= {*RunSpec.model_fields, MODEL, "extends"}
    if not isinstance(base, Scalar) or not is_part or depth == 0:
        return False
    return is_run(str(base.value), specs, folder=path.parent, depth=depth - 1)


AnyRun: TypeAlias = str | os.PathLike[str] | MappingABC[Any, Any]
"""The name of a run, its path, its folder, or a mapping with the keys and values of its YAML."""


def read_run(run: AnyRun, plugins: Plugins, *, sets: Iterable[str] = ()) -> RunFile:
    """Read a run with its model and data, changed by `sets` (`path=value`). Raise SpecError with all of its errors."""
    if isinstance(run, MappingABC):
        return resolve_run(RunText.take(run, plugins, sets=sets), plugins)
    return resolve_run(RunText.read(find_run(run), plugins, sets=sets), plugins)


@dataclass(frozen=True)
class RunText:
    """A run whose `extends` and changes have been applied, before any value is resolved."""

    root: Mapping
    file: str

    @classmethod
    def read(cls, path: Path, plugins: Plugins, *, sets: Iterable[str] = ()) -> RunText:
        """Read a file, and apply the changes in `sets`."""
        root = read_based(path, _runs(plugins.specs))
        return cls(_changed(root, list(sets), plugins), str(shortest(path)))

    @classmethod
    def take(cls, data: MappingABC[Any, Any], plugins: Plugins, *, sets: Iterable[str] = ()) -> RunText:
        """Convert a mapping, and apply the changes in `sets`. Relative paths start at the current folder."""
        root = based(read_data(data), Path(), _runs(plugins.specs))
        return cls(_changed(root, list(sets), plugins), root.span.source.name)

    def assigned(self, change: Change, plugins: Plugins) -> RunText:
        """Return the run with a value set, as by `--set`."""
        return replace(self, root=_assigned(self.root, change, plugins))

    def merged(self, patch: Mapping, folder: Path, plugins: Plugins) -> RunText:
        """Return the run changed by a run that extends it. Paths in the extending run start at `folder`."""
        return replace(self, root=_runs(plugins.specs).merge(self.root, patch, folder))

    def of_length(self, number: Scalar, *, of: Literal["steps", "tokens"]) -> RunText:
        """Return the run with a new length, in steps or tokens."""
        root = without(self.root, ENDS)
        return replace(self, root=Mapping({**root.items, of: number}, {**root.keys, of: number.span}, root.span))


# ---- the model inside a run ----


def _runs(specs: KnownSpecs) -> Language:
    """Return the functions that find, read and merge runs."""

    def find(name: str, folder: Path, span: Span) -> Path:
        return find_run(name, folder=folder, span=span)

    def merge(base: Mapping | None, patch: Mapping, folder: Path) -> Mapping:
        listed = {key: _listed(node) if key in LISTS else node for key, node in patch.items.items()}
        patch = Mapping(listed, patch.keys, patch.span)
        under = None if base is None else base.items.get(MODEL)
        model = _merged_model(under, patch.items.get(MODEL), folder, specs)
        if base is None:
            merged = patch
        else:
            merged = extended(without(base, {MODEL, *_ended(patch)}), without(patch, {MODEL}), RunSpec.merge_keys)
        keys = {**(base.keys if base else {}), **patch.keys}
        return merged if model is None else _with_model(merged, model, keys[MODEL])

    return Language(RunSpec, find, merge)


def _ended(patch: Mapping) -> frozenset[str]:
    """Return the keys of the base that a length in the patch replaces: all of `ENDS`, or none."""
    has_one = any(name in ENDS and not is_null(node) for name, node in patch.items.items())
    return ENDS if has_one else frozenset()


def _merged_model(under: Node | None, model: Node | None, folder: Path, specs: KnownSpecs) -> Node | None:
    """Merge a model over the model of the base. A name, or a model with `extends`, replaces the base's model."""
    if isinstance(model, Mapping) and "extends" not in model.items and isinstance(under, Mapping):
        return extended(without(under, {"parameters"}), model)
    return under if model is None else _model(model, folder, specs)


def _with_model(root: Mapping, model: Node, key: Span) -> Mapping:
    return Mapping({**root.items, MODEL: model}, {**root.keys, MODEL: key}, root.span)


def _model(node: Node, folder: Path, specs: KnownSpecs) -> Node:
    """Return the tree of the spec that `model:` names or contains."""
    language = models(specs)
    if isinstance(node, Scalar) and isinstance(node.value, str):
        return read_named(node, MODEL, folder, language)
    if isinstance(node, Mapping):
        return based(node, folder, language)
    help = "write `model: gpt2`, a path, or a mapping"
    raise SpecError(Diagnostic("`model` must be a spec: its name, its path, or its text", node.span, MODEL, help=help))


def _listed(node: Node) -> Node:
    """Wrap a single kind in a list."""
    return node if isinstance(node, ListNode) or node == Scalar(None, node.span) else ListNode((node,), node.span)


def _changed(root: Mapping, sets: list[str], plugins: Plugins) -> Mapping:
    """Apply all `--set` arguments to a run. Raise SpecError with the errors of all arguments."""
    errors: list[Diagnostic] = []
    for argument in sets:
        try:
            root = _assigned(root, change_of(argument), plugins)
        except SpecError as error:
            errors += error.diagnostics
    if errors:
        raise SpecError(*errors)
    return root


def _assigned(root: Mapping, change: Change, plugins: Plugins) -> Mapping:
    """Assign a value of the run, or of its model."""
    name, model = change.steps[0][0], root.items.get(MODEL)
    if name == MODEL and len(change.steps) > 1 and isinstance(model, Mapping):
        names = frozenset(ModelSpec.model_fields) | plugins.registry.shared_names()
        changed = put(without(model, {"parameters"}), change.inside(), names, what="model")
        return _with_model(root, changed, root.keys[MODEL])
    if name in ENDS and not is_null(change.value):
        root = without(root, ENDS - {name})
    root = put(root, change, frozenset({*RunSpec.model_fields, MODEL}), what="run", keys=RunSpec.merge_keys)
    if name == MODEL:
        return _with_model(root, _model(root.items[MODEL], Path(), plugins.specs), root.keys[MODEL])
    if name in LISTS and name in root.items:
        return Mapping({**root.items, name: _listed(root.items[name])}, root.keys, root.span)
    return root


# ---- values ----


def resolve_run(text: RunText, plugins: Plugins, *, loaded: dict[str, Data] | None = None) -> RunFile:
    """Resolve a run. `loaded` is a cache of data that has been read; new data is added to it. Raises SpecError."""
    root, model = text.root, text.root.items.get(MODEL)
    settings = without(root, {MODEL})
    scope: dict[str, Scoped] = {}
    scope |= {name: Scoped(node, (name,), scope) for name, node in settings.items.items() if isinstance(node, Scalar)}
    resolver = Resolver(plugins)
    config = resolver.config(RunSpec, settings, (), scope)
    errors = resolver.diagnostics
    if not isinstance(model, Mapping):
        help = "write `model: gpt2`, a path, or a mapping"
        errors.append(Diagnostic("the run has no `model`", root.span, MODEL, help=help))
    if errors:
        raise SpecError(*errors)
    provenance = resolver.provenance
    config, data = _data(config, provenance, {} if loaded is None else loaded)
    with of_model():
        spec = resolve_spec(model_of(text, data), plugins, file=text.file)
    warnings: Iterable[Invalid] = getattr(data, "warnings", ())
    notes = tuple(refused(warning, ("data",), provenance) for warning in warnings)
    return RunFile(config, spec, data, provenance, text.file, (*spec.notes, *notes))


def model_of(text: RunText, data: Data) -> Mapping:
    """Return the model of a run as a spec, with the name of the run and the vocabulary of its data."""
    run, model = text.root, text.root.items[MODEL]
    assert isinstance(model, Mapping)
    named = {key: run.items[key] for key in ("tfkit", "name") if key not in model.items}
    model = Mapping({**named, **model.items}, {**run.keys, **model.keys}, model.span)
    return _with_sizes(model, data)


@contextmanager
def of_model() -> Iterator[None]:
    """Prefix the paths of a model's errors with `model.`, as `--set` takes them."""
    try:
        yield
    except SpecError as error:
        raise SpecError(
            *(replace(diagnostic, path=f"{MODEL}.{diagnostic.path}".rstrip(".")) for diagnostic in error.diagnostics)
        ) from error


def _data(config: RunSpec, provenance: Provenance, loaded: dict[str, Data]) -> tuple[RunSpec, Data]:
    """Return the run with absolute paths to its data and weights, and the loaded data."""
    config = _with_located_content(config, (), provenance)
    span = provenance.span(("data", "files")) or provenance.span(("data",))
    located = config.data.located(_folder(span.source if span else None))
    name = f"{located!r} {config.batch.length}"

    fault = fault_in(type(located), ("data",), provenance)
    if name not in loaded:
        with guarded(fault, "`build`"):
            loaded[name] = GuardedData(located.build(config.batch.length), fault)
    start: dict[str, Config] = {}
    for key, start_config in (("weights", config.weights), ("branch", config.branch)):
        if start_config is not None:
            origin = provenance.span((key, str(start_config.word_key))) or provenance.span((key,))
            start[key] = start_config.located(_folder(origin.source if origin else None))
    return config.model_copy(update={"data": located, **start}), loaded[name]


def _with_located_content(value: Any, path: tuple[str, ...], provenance: Provenance) -> Any:
    """Return a config whose paths to content do not depend on the current folder."""
    if isinstance(value, tuple):
        return tuple(_with_located_content(part, (*path, str(i)), provenance) for i, part in enumerate(value))
    if isinstance(value, dict):
        return {name: _with_located_content(part, (*path, name), provenance) for name, part in value.items()}
    if not isinstance(value, Config):
        return value
    changed = {}
    for name, field in type(value).model_fields.items():
        located = _with_located_content if marker(field, ContentMarker) is None else _absolute
        changed[name] = located(getattr(value, name), (*path, name), provenance)
    return value.model_copy(update={name: new for name, new in changed.items() if new != getattr(value, name)})


def _absolute(value: Any, path: tuple[str, ...], provenance: Provenance) -> Any:
    """Make a path, or several paths, absolute. Relative paths start at the folder of the file that contains them."""
    if isinstance(value, tuple):
        return tuple(_absolute(part, (*path, str(index)), provenance) for index, part in enumerate(value))
    span = provenance.span(path) or provenance.span(path[:-1])
    return value if value is None else str((_folder(span.source if span else None) / value).absolute())


def _folder(text: Source | None) -> Path:
    """Return the folder where relative paths in a text start."""
    return Path() if text is None or text.name == SET else Path(text.name).parent


def _with_sizes(node: Node, data: Data) -> Mapping:
    """Replace each size of the data in a model, such as `data.vocab_size`, by the number."""

    def filled(node: Node) -> Node:
        if isinstance(node, Mapping):
            return Mapping({name: filled(entry) for name, entry in node.items.items()}, node.keys, node.span)
        if isinstance(node, ListNode):
            return ListNode(tuple(map(filled, node.items)), node.span)
        return _with_size(node, data)

    replaced = filled(node)
    assert isinstance(replaced, Mapping)
    return replaced


def _with_size(node: Scalar, data: Data) -> Scalar:
    """Replace the name of a size of the data by its number; return all other values unchanged."""
    value = str(node.value)
    key = next((key for key in SIZES if f"{value}.".startswith(f"{key}.")), None)
    if key is None:
        return node
    size = getattr(data, SIZES[key], None)
    if size is None:
        help = "use data with classes, such as the kind `labelled`"
        raise SpecError(Diagnostic(f"`{value}` must be a number, but the data has none", node.span, help=help))
    by_output = size if isinstance(size, MappingABC) else {"": size}
    sizes = {f"{key}.{output}".rstrip("."): number for output, number in by_output.items()}
    if value not in sizes:
        note = f"sizes: {', '.join(sizes)}"
        raise SpecError(Diagnostic(f"`{value}` is not a size of the data", node.span, notes=(note,)))
    return Scalar(sizes[value], node.span)
