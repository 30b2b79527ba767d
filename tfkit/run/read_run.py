"""Reading a run: from its file to resolved values, a model and data. The language is the language of specs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, replace
from dataclasses import field as field_of
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tfkit.component import ChangeableMarker, Config, ContentMarker, FieldPath, leaf_values, marker, parts, with_values
from tfkit.errors import Diagnostic, Invalid, Source, Span, SpecError, listing
from tfkit.plugin.manager import Plugins
from tfkit.run.contract import Data
from tfkit.run.guarded_data import GuardedData, guarded_call
from tfkit.run.parametrization import PARAMETRIZATION, base_changes, base_numbers, with_factors
from tfkit.run.run_spec import ENDS, SET_STEPS, WITHOUT_STEPS, RunSpec
from tfkit.run.step_values import check_changes, check_number, has_fraction, listed_values
from tfkit.spec.arithmetic import is_arithmetic
from tfkit.spec.document import MODEL
from tfkit.spec.extending import short_path
from tfkit.spec.load import Spec, resolve_spec
from tfkit.spec.merge import Change, without_keys
from tfkit.spec.messages import diagnostic_of, fault_in
from tfkit.spec.model_spec import ModelSpec
from tfkit.spec.provenance import SET, Provenance
from tfkit.spec.read_document import (
    apply_document_change,
    document_language,
    find_document,
    model_of,
    of_model,
    read_changed,
    resolve_document,
    take_changed,
)
from tfkit.spec.tree import Mapping, Node, Scalar
from tfkit.spec.tree import Sequence as ListNode

SIZES = {"data.vocab_size": "vocab_size", "data.n_classes": "n_classes"}
"""Names in a run's model that stand for a size of the data, each with the attribute of the data."""
SIZE_NAME = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, SIZES))})(?:\.\w+)*(?!\w)")
"""The name of a size, also of an output, as in `data.n_classes.door`."""


@dataclass(frozen=True)
class RunFile:
    """A run that has been read: its values and their origins, its model, and its data.

    The numbers of the model and of the loss that change by step have their largest value, and `by_step` has the path
    of each: a path of a run may name a value that several components inherit.
    """

    config: RunSpec
    model: Spec
    """The model that is trained, with the factors of the parametrization."""
    data: Data
    provenance: Provenance
    file: str
    notes: tuple[Diagnostic, ...] = ()
    """Warnings."""
    written: Spec | None = None
    """The model as the run's file describes it, if the parametrization adds factors."""
    base: Spec | None = None
    """The model at its base sizes, if the run sets any."""
    changing: MappingABC[FieldPath, str] = field_of(default_factory=dict)
    """The fields that change by step: of the model, `(model, graph, ...)`, or of the loss, `(loss, ...)`; each with the
    path in the `by_step` of the file."""

    def changed(self, values: MappingABC[FieldPath, Any]) -> RunFile:
        """Return the run with some values of its model and of its loss replaced."""
        of_model = {path[1:]: value for path, value in values.items() if path[0] == MODEL}
        of_loss = {path[1:]: value for path, value in values.items() if path[0] == LOSS}
        config = self.config.model_copy(update={LOSS: with_values(self.config.loss, of_loss)})
        model = with_values(self.model.model.model_copy(update={"parameters": None}), of_model) if of_model else None
        return replace(self, config=config, model=replace(self.model, model=model) if model else self.model)

    def location(self, path: tuple[str, ...]) -> Span | None:
        """Return the location of a value of the run."""
        return self.provenance.span(path)

    def placed(self, error: SpecError, *path: str) -> SpecError:
        """Return an error with the location of a value of the run."""
        span = self.location(path)
        return SpecError(*(replace(diagnostic, span=span, path=".".join(path)) for diagnostic in error.diagnostics))


AnyRun: TypeAlias = str | os.PathLike[str] | MappingABC[Any, Any]
"""The name of a run, its path, its folder, or a mapping with the keys and values of its YAML."""


def read_run(run: AnyRun, plugins: Plugins, *, sets: Iterable[str] = ()) -> RunFile:
    """Read a run with its model and data, changed by `sets` (`path=value`). Raise SpecError with all of its errors."""
    if isinstance(run, MappingABC):
        return resolve_run(RunText.take(run, plugins, sets=sets), plugins)
    return resolve_run(RunText.read(find_document(run, RunSpec, plugins.specs), plugins, sets=sets), plugins)


@dataclass(frozen=True)
class RunText:
    """A run whose `extends` and changes have been applied, before any value is resolved."""

    root: Mapping
    file: str

    @classmethod
    def read(cls, path: Path, plugins: Plugins, *, sets: Iterable[str] = ()) -> RunText:
        """Read a file, and apply the changes in `sets`."""
        return cls(read_changed(path, RunSpec, plugins, sets=sets), str(short_path(path)))

    @classmethod
    def take(cls, data: MappingABC[Any, Any], plugins: Plugins, *, sets: Iterable[str] = ()) -> RunText:
        """Convert a mapping, and apply the changes in `sets`. Relative paths start at the current folder."""
        root = take_changed(data, RunSpec, plugins, sets=sets)
        return cls(root, root.span.source.name)

    def assigned(self, change: Change, plugins: Plugins) -> RunText:
        """Return the run with a value set, as by `--set`."""
        return replace(self, root=apply_document_change(self.root, change, RunSpec, plugins))

    def merged(self, patch: Mapping, folder: Path, plugins: Plugins) -> RunText:
        """Return the run changed by a run that extends it. Paths in the extending run start at `folder`."""
        return replace(self, root=document_language(RunSpec, plugins.specs).merge(self.root, patch, folder))

    def of_length(self, number: Scalar, *, of: Literal["steps", "tokens"]) -> RunText:
        """Return the run with a new length, in steps or tokens."""
        root = without_keys(self.root, ENDS)
        return replace(self, root=Mapping({**root.items, of: number}, {**root.keys, of: number.span}, root.span))


# ---- values ----


def resolve_run(text: RunText, plugins: Plugins, *, loaded: dict[str, Data] | None = None) -> RunFile:
    """Resolve a run. `loaded` is a cache of data that has been read; new data is added to it. Raises SpecError."""
    resolved, provenance = resolve_document(text.root, RunSpec, plugins)
    config, data = _run_with_data(resolved, provenance, {} if loaded is None else loaded)
    with of_model():
        written = resolve_spec(model_of_run(text, data), plugins, file=text.file)
    spec, base = written, None
    if config.parametrization.base is not None:
        base = _base_model(config, text, data, provenance, plugins)
        try:
            numbers = base_numbers(written, base)
            spec = with_factors(config.parametrization, written, base)
        except Invalid as error:
            raise SpecError(diagnostic_of(error, (PARAMETRIZATION,), provenance)) from error
        parametrization = config.parametrization.model_copy(update={"base": numbers})
        config = config.model_copy(update={PARAMETRIZATION: parametrization})
    warnings: Iterable[Invalid] = getattr(data, "warnings", ())
    notes = tuple(diagnostic_of(warning, ("data",), provenance) for warning in warnings)
    written_if_scaled = None if spec is written else written
    file = RunFile(config, spec, data, provenance, text.file, (*spec.notes, *notes), written_if_scaled, base)
    return _with_largest_numbers(file, resolved.by_step, text, plugins)


def _base_model(config: RunSpec, text: RunText, data: Data, provenance: Provenance, plugins: Plugins) -> Spec:
    """Return the model of a run at the base sizes of its parametrization."""
    root = text.root
    for change in base_changes(config.parametrization, root, provenance):
        root = apply_document_change(root, change, RunSpec, plugins)
    try:
        with of_model():
            return resolve_spec(model_of_run(replace(text, root=root), data), plugins, file=text.file)
    except SpecError as error:
        note = "this is the model at the base sizes of the parametrization"
        raise SpecError(
            *(replace(diagnostic, notes=(*diagnostic.notes, note)) for diagnostic in error.diagnostics)
        ) from error


def _with_largest_numbers(file: RunFile, by_step: MappingABC[str, Any], text: RunText, plugins: Plugins) -> RunFile:
    """Return the run with the largest values of the numbers that change by step, by the fields that take them."""
    changing: dict[FieldPath, str] = {}
    for path in by_step:
        fields = _changing_fields(path, text, file, plugins)
        if repeated := next((field for field in fields if field in changing), None):
            message = f"`{'.'.join(repeated)}` must change by a single entry; got `{changing[repeated]}` and `{path}`"
            raise SpecError(Diagnostic(message, file.location(("by_step", path)), f"by_step.{path}", help="remove one"))
        changing |= dict.fromkeys(fields, path)
    changes = {field: by_step[path] for field, path in changing.items()}
    resolved = {".".join(field): change for field, change in changes.items()}
    file = replace(file, config=file.config.model_copy(update={"by_step": resolved}), changing=changing)
    return file.changed({field: max(listed_values(change)) for field, change in changes.items()})


LOSS = "loss"


def _changing_fields(path: str, text: RunText, file: RunFile, plugins: Plugins) -> tuple[FieldPath, ...]:
    """Return the fields that take the number at a path of `by_step`. Raise SpecError for a field that cannot change."""
    span = file.location(("by_step", path)) or text.root.span
    values, names = _listed_values(path, file, span), path.split(".")
    root = names[0] if len(names) > 1 and all(names) and names[0] in (MODEL, LOSS) else None
    if root is None:
        of_batch = "write a change of the batch in its place, `batch: {length: {at: {0: 64, 1000: 128}}}`"
        helps = {"batch": of_batch, "optimizer": "use `schedule` for rates"}
        raise _unchangeable(path, file, span, help=helps.get(names[0]))
    leaves: list[dict[FieldPath, Any]] = []
    for value in values:
        changed = text.assigned(Change(tuple((name, span) for name in names), Scalar(value, span)), plugins)
        config: Config
        if root == LOSS:
            config = resolve_document(changed.root, RunSpec, plugins)[0].loss
        else:
            with of_model():
                config = resolve_spec(model_of_run(changed, file.data), plugins, file=text.file).model
        leaves.append({(root, *field): leaf for field, leaf in leaf_values(config) if field != ("parameters",)})
    fields = [field for field in leaves[0] if any(part.get(field) != leaves[0][field] for part in leaves)]
    if isinstance(config, ModelSpec):  # a node with `same` has the values of the node that it names
        fields = [field for field in fields if field[1] != "graph" or not config.graph[field[2]].same]
    if not fields:
        raise SpecError(Diagnostic(f"the change of `{path}` has no effect", span, f"by_step.{path}", help="remove it"))
    markers = dict(_marked_fields(config, (root,)))
    for field in fields:
        takes = [part[field] for part in leaves if part.keys() == leaves[0].keys()] == values
        if not takes or field not in markers:
            decides = [name for name in field if name != "graph"] != [name for name in names if name != "graph"]
            raise _unchangeable(path, file, span, f": it decides `{'.'.join(field)}`" if decides else "")
    return tuple(fields)


def _listed_values(path: str, file: RunFile, span: Span) -> list[Any]:
    """Return the values of an entry of `by_step`. Raise SpecError if it is not well-formed."""
    change, steps = file.config.by_step[path], file.config.steps
    try:
        check_changes(change, check_number)
    except Invalid as error:
        at = file.location(("by_step", path, *error.field.split(".", 1))) or span
        message = Diagnostic(error.message, at, f"by_step.{path}.{error.field}".rstrip("."), error.notes, error.help)
        raise SpecError(message) from None
    if steps is None and has_fraction(change):
        raise SpecError(Diagnostic(WITHOUT_STEPS, span, f"by_step.{path}", help=SET_STEPS))
    return listed_values(change)


def _unchangeable(path: str, file: RunFile, span: Span, more: str = "", help: str | None = None) -> SpecError:
    """Return the error for a number that cannot change by step."""
    marked = {**dict(_marked_fields(file.config.loss, (LOSS,))), **dict(_marked_fields(file.model.model, (MODEL,)))}
    names = [".".join(path) for path, value in marked.items() if value is not None]
    notes = (f"numbers that may change: batch.sequences, batch.length, {listing(names, MAX_NAMES)}".rstrip(", "),)
    return SpecError(Diagnostic(f"`{path}` cannot change by step{more}", span, f"by_step.{path}", notes, help))


def _marked_fields(config: Config, start: FieldPath) -> Iterator[tuple[FieldPath, float | None]]:
    """Yield the fields of a config, and of the configs inside it, that may change by step."""
    for path, part in parts(start, config):
        for name, info in type(part).model_fields.items() if isinstance(part, Config) else ():
            if marker(info, ChangeableMarker) is not None:
                yield (*path, name), getattr(part, name)


MAX_NAMES = 12
"""Maximum number of names that an error lists."""


def model_of_run(text: RunText, data: Data) -> Mapping:
    """Return the model of a run as a spec, with the name of the run and the vocabulary of its data."""
    return _with_sizes(model_of(text.root), data)


def _run_with_data(config: RunSpec, provenance: Provenance, loaded: dict[str, Data]) -> tuple[RunSpec, Data]:
    """Return the run with absolute paths to its data and weights, and the loaded data."""
    config = _with_located_content(config, (), provenance)
    span = provenance.span(("data", "files")) or provenance.span(("data",))
    located = config.data.located(_base_folder(span.source if span else None))
    name = f"{located!r} {config.batch.longest}"

    fault = fault_in(type(located), ("data",), provenance)
    if name not in loaded:
        with guarded_call(fault, "`build`"):
            loaded[name] = GuardedData(located.build(config.batch.longest), fault)
    start: dict[str, Config] = {}
    for key, start_config in (("weights", config.weights), ("branch", config.branch)):
        if start_config is not None:
            origin = provenance.span((key, str(start_config.word_key))) or provenance.span((key,))
            start[key] = start_config.located(_base_folder(origin.source if origin else None))
    if config.eval is not None and config.eval.tasks:
        spans = [provenance.span(("eval", "tasks", str(index), "file")) for index in range(len(config.eval.tasks))]
        folders = [_base_folder(span.source if span else None) for span in spans]
        tasks = tuple(task.located(folder) for task, folder in zip(config.eval.tasks, folders, strict=True))
        start["eval"] = config.eval.model_copy(update={"tasks": tasks})
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
        located = _with_located_content if marker(field, ContentMarker) is None else _absolute_paths
        changed[name] = located(getattr(value, name), (*path, name), provenance)
    return value.model_copy(update={name: new for name, new in changed.items() if new != getattr(value, name)})


def _absolute_paths(value: Any, path: tuple[str, ...], provenance: Provenance) -> Any:
    """Make a path, or several paths, absolute. Relative paths start at the folder of the file that contains them."""
    if isinstance(value, tuple):
        return tuple(_absolute_paths(part, (*path, str(index)), provenance) for index, part in enumerate(value))
    span = provenance.span(path) or provenance.span(path[:-1])
    return value if value is None else str((_base_folder(span.source if span else None) / value).absolute())


def _base_folder(text: Source | None) -> Path:
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
    """Replace names of sizes of the data by numbers, also in arithmetic; return all other values unchanged."""
    value = str(node.value)
    if not SIZE_NAME.search(value) or not is_arithmetic(value):
        return node
    text = SIZE_NAME.sub(lambda match: str(_size_of(match[0], node.span, data)), value)
    return replace(node, value=int(text) if text.isdecimal() else text)


def _size_of(name: str, span: Span, data: Data) -> int:
    """Return a size of the data; raise SpecError if the data does not have it."""
    key = ".".join(name.split(".")[:2])
    size = getattr(data, SIZES[key], None)
    if size is None:
        help = "use data with classes, such as the kind `labelled`"
        raise SpecError(Diagnostic(f"`{name}` must be a number, but the data has none", span, help=help))
    by_output = size if isinstance(size, MappingABC) else {"": size}
    sizes = {f"{key}.{output}".rstrip("."): number for output, number in by_output.items()}
    if name not in sizes:
        note = f"sizes: {', '.join(sizes)}"
        raise SpecError(Diagnostic(f"`{name}` is not a size of the data", span, notes=(note,)))
    return int(sizes[name])
