"""Reading a document with a model inside, such as a run: its fields, and a spec under the key `model`.

`model:` is a path, the name of a spec, or an inline spec. A document that extends a different document also changes its
model. The values of `--set` are paths of the document: `model.d_model=64`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from collections.abc import Mapping as MappingABC
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from tfkit.errors import Diagnostic, Span, SpecError, quoted, similar_name_help
from tfkit.plugin.known_specs import NamedSpecs
from tfkit.plugin.manager import Plugins
from tfkit.spec.data import read_data
from tfkit.spec.document import MODEL, Document
from tfkit.spec.extending import (
    MAX_EXTENDS,
    SUFFIXES,
    Language,
    is_folder,
    merge_over_base,
    read_based,
    read_named,
    short_path,
    yaml_files,
)
from tfkit.spec.load import Spec, resolve_spec, spec_language
from tfkit.spec.merge import Change, apply_change, change_of, is_null, merge_documents, without_keys
from tfkit.spec.model_spec import ModelSpec
from tfkit.spec.provenance import Provenance
from tfkit.spec.resolve import Resolver, Scoped
from tfkit.spec.source import read
from tfkit.spec.tree import Mapping, Node, Scalar
from tfkit.spec.tree import Sequence as ListNode

D = TypeVar("D", bound=Document)
HELP = "write `model: gpt2`, a path, or a mapping"


@dataclass(frozen=True)
class DocumentFile(Generic[D]):
    """A document that has been read: its values and their origins, and its model."""

    config: D
    model: Spec
    provenance: Provenance


def read_document(
    name: str | os.PathLike[str], document: type[D], plugins: Plugins, *, sets: Iterable[str] = ()
) -> DocumentFile[D]:
    """Read a document of a type, by its path or its name, with its model, changed by `sets` (`path=value`).

    Raises SpecError with every error in the document, or in its model.
    """
    path = find_document(name, document, plugins.specs)
    root = read_changed(path, document, plugins, sets=sets)
    config, provenance = resolve_document(root, document, plugins)
    with of_model():
        model = resolve_spec(model_of(root), plugins, file=str(short_path(path)))
    return DocumentFile(config, model, provenance)


# ---- files by name ----


def find_document(
    name: str | os.PathLike[str],
    document: type[Document],
    specs: NamedSpecs,
    *,
    folder: Path | None = None,
    span: Span | None = None,
    key: str = "extends",
) -> Path:
    """Return the file of a document. `name` is its path, its name, or a folder that contains it as `TYPE.yaml`.

    Relative paths start from `folder`. `key` is the key whose value is the name, at `span`. Raises SpecError
    if there is no such file.
    """
    text, sort = os.fspath(name), document.sort
    path = (folder or Path()) / text
    if os.path.isfile(path / f"{sort}.yaml"):
        return path / f"{sort}.yaml"
    if text.endswith(SUFFIXES) and (span is None or os.path.exists(path)):
        return path
    files = specs.files_of(sort)
    if (word := text.removeprefix(f"{sort}s/")) in files:
        return files[word].path
    if os.path.isdir(path):
        help = "name a folder that `tfkit train` wrote" if sort == "run" else None
        message = f"the folder {quoted(text)} has no {sort}.yaml"
        raise SpecError(Diagnostic(message, span, key if span else "", help=help))
    what, advice = f"a {sort}", f"give the path of a file, ./my_{sort}.yaml, or a name that `tfkit list {sort}` prints"
    advice = similar_name_help(what, path.stem, files, advice) or advice
    if sort == "run" and text in specs.files:
        advice = f"{quoted(text)} is a spec: `tfkit new {sort} {text} -o {sort}.yaml` writes a {sort} for it"
    help = similar_name_help(what, path.name, [file.name for file in yaml_files(path.parent)], advice)
    raise SpecError(Diagnostic(f"there is no {sort} {quoted(text)}", span, key if span else "", help=help))


def is_document(
    name: str, document: type[Document], specs: NamedSpecs, *, folder: Path = Path(), depth: int = MAX_EXTENDS
) -> bool:
    """Return True for the name of a document of a type, and for a file that has its keys or extends such a file.

    Relative paths start from `folder`. Names of specs, folders, and files that cannot be read are no documents. `depth`
    is the longest chain of `extends`.
    """
    if name in specs.files or is_folder(name, specs, folder=folder):
        return False
    try:
        path = find_document(name, document, specs, folder=folder)
        keys = read(path).items
    except SpecError:  # the command reports it for a model
        return False
    if any(key in keys for key in ModelSpec.typical):
        return False
    if all(key in keys for key in document.typical):
        return True
    base, is_part = keys.get("extends"), {*keys} <= {*document.model_fields, *document.further_keys, "extends"}
    if not isinstance(base, Scalar) or not is_part or depth == 0:
        return False
    return is_document(str(base.value), document, specs, folder=path.parent, depth=depth - 1)


# ---- text: `extends` and `--set` ----


def read_changed(path: Path, document: type[Document], plugins: Plugins, *, sets: Iterable[str] = ()) -> Mapping:
    """Read a file, and apply `extends` and the changes in `sets`, without resolving values."""
    return _changed_document(
        read_based(path, document_language(document, plugins.specs)), list(sets), document, plugins
    )


def take_changed(
    data: MappingABC[Any, Any], document: type[Document], plugins: Plugins, *, sets: Iterable[str] = ()
) -> Mapping:
    """Convert a mapping as `read_changed` reads a file. Relative paths start at the current folder."""
    root = merge_over_base(read_data(data), Path(), document_language(document, plugins.specs))
    return _changed_document(root, list(sets), document, plugins)


def document_language(document: type[Document], specs: NamedSpecs) -> Language:
    """Return the functions that find, read and merge documents of a type."""

    def find(name: str, folder: Path, span: Span) -> Path:
        return find_document(name, document, specs, folder=folder, span=span)

    def merge(base: Mapping | None, patch: Mapping, folder: Path) -> Mapping:
        values = {key: _list_node(node) if key in document.listed_keys else node for key, node in patch.items.items()}
        patch = Mapping(values, patch.keys, patch.span)
        under = None if base is None else base.items.get(MODEL)
        model = _merged_model(under, patch.items.get(MODEL), folder, specs)
        if base is None:
            merged = patch
        else:
            replaced = _replaced_keys(patch, document.exclusive_keys)
            merged = merge_documents(
                without_keys(base, {MODEL, *replaced}), without_keys(patch, {MODEL}), document.merge_keys
            )
        keys = {**(base.keys if base else {}), **patch.keys}
        return merged if model is None else _with_model(merged, model, keys[MODEL])

    return Language(document, find, merge)


def _replaced_keys(patch: Mapping, exclusive: frozenset[str]) -> frozenset[str]:
    """Return the keys of the base that an exclusive key in the patch replaces: all of them, or none."""
    has_value = any(name in exclusive and not is_null(node) for name, node in patch.items.items())
    return exclusive if has_value else frozenset()


def _merged_model(under: Node | None, model: Node | None, folder: Path, specs: NamedSpecs) -> Node | None:
    """Merge a model over the model of the base. A name, or a model with `extends`, replaces the base's model."""
    if isinstance(model, Mapping) and "extends" not in model.items and isinstance(under, Mapping):
        return merge_documents(without_keys(under, {"parameters"}), model)
    return under if model is None else _model_tree(model, folder, specs)


def _with_model(root: Mapping, model: Node, key: Span) -> Mapping:
    return Mapping({**root.items, MODEL: model}, {**root.keys, MODEL: key}, root.span)


def _model_tree(node: Node, folder: Path, specs: NamedSpecs) -> Node:
    """Return the tree of the spec that `model:` names or contains."""
    specs_language = spec_language(specs)
    if isinstance(node, Scalar) and isinstance(node.value, str):
        return read_named(node, MODEL, folder, specs_language)
    if isinstance(node, Mapping):
        return merge_over_base(node, folder, specs_language)
    raise SpecError(Diagnostic("`model` must be a spec: its name, its path, or its text", node.span, MODEL, help=HELP))


def _list_node(node: Node) -> Node:
    """Wrap a single kind in a list."""
    return node if isinstance(node, ListNode) or node == Scalar(None, node.span) else ListNode((node,), node.span)


def _changed_document(root: Mapping, sets: list[str], document: type[Document], plugins: Plugins) -> Mapping:
    """Apply all `--set` arguments to a document. Raise SpecError with the errors of all arguments."""
    errors: list[Diagnostic] = []
    for argument in sets:
        try:
            root = apply_document_change(root, change_of(argument), document, plugins)
        except SpecError as error:
            errors += error.diagnostics
    if errors:
        raise SpecError(*errors)
    return root


def apply_document_change(root: Mapping, change: Change, document: type[Document], plugins: Plugins) -> Mapping:
    """Assign a value of the document, or of its model, as `--set` does."""
    name, model = change.steps[0][0], root.items.get(MODEL)
    if name == MODEL and len(change.steps) > 1 and isinstance(model, Mapping):
        names = frozenset(ModelSpec.model_fields) | plugins.registry.shared_names()
        changed = apply_change(without_keys(model, {"parameters"}), change.inside(), names, what="model")
        return _with_model(root, changed, root.keys[MODEL])
    if name in document.exclusive_keys and not is_null(change.value):
        root = without_keys(root, document.exclusive_keys - {name})
    keys = frozenset({*document.model_fields, *document.further_keys})
    root = apply_change(root, change, keys, what=document.sort, keys=document.merge_keys)
    if name == MODEL:
        return _with_model(root, _model_tree(root.items[MODEL], Path(), plugins.specs), root.keys[MODEL])
    if name in document.listed_keys and name in root.items:
        return Mapping({**root.items, name: _list_node(root.items[name])}, root.keys, root.span)
    return root


# ---- values ----


def resolve_document(root: Mapping, document: type[D], plugins: Plugins) -> tuple[D, Provenance]:
    """Resolve the fields of a document, and return their origins. Raise SpecError also if there is no model."""
    fields = without_keys(root, {MODEL})
    scope: dict[str, Scoped] = {}
    scope |= {name: Scoped(node, (name,), scope) for name, node in fields.items.items() if isinstance(node, Scalar)}
    resolver = Resolver(plugins)
    config = resolver.config(document, fields, (), scope)
    errors = resolver.diagnostics
    if not isinstance(root.items.get(MODEL), Mapping):
        errors.append(Diagnostic(f"the {document.sort} has no `model`", root.span, MODEL, help=HELP))
    if errors:
        raise SpecError(*errors)
    return config, resolver.provenance


def model_of(root: Mapping) -> Mapping:
    """Return the model of a document as a spec. If the model has no name, it has the name of the document."""
    model = root.items[MODEL]
    assert isinstance(model, Mapping)
    names: dict[str, Node] = {key: root.items[key] for key in ("tfkit", "name") if key in root.items}
    return Mapping({**names, **model.items}, {**root.keys, **model.keys}, model.span)


@contextmanager
def of_model() -> Iterator[None]:
    """Prefix the paths of a model's errors with `model.`, as `--set` takes them."""
    try:
        yield
    except SpecError as error:
        raise SpecError(
            *(replace(diagnostic, path=f"{MODEL}.{diagnostic.path}".rstrip(".")) for diagnostic in error.diagnostics)
        ) from error
