"""Types of document from the hook `tfkit_documents` of plugins: files around a model, such as runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.expand import Graph, announce_graph, expand
from tfkit.plugin.discover import DISABLE
from tfkit.plugin.manager import Plugins
from tfkit.plugin.registry import WORD
from tfkit.spec.document import MODEL, Document
from tfkit.spec.load import Spec
from tfkit.spec.model_spec import ModelSpec
from tfkit.spec.read_document import of_model, read_document
from tfkit.spec.schema import Schema, document_schema


@dataclass(frozen=True)
class DocumentType:
    """A type of document: what tfkit's commands do with its files. A subclass overrides what its type does differently.

    Attributes:
        config: the fields of the documents, and the keys that identify them.
    """

    config: type[Document]

    @property
    def name(self) -> str:
        """The name of the type."""
        return self.config.sort

    @property
    def has_model(self) -> bool:
        """True if the documents contain a model: commands that take a spec then take them as well."""
        return MODEL in self.config.further_keys

    def model(self, name: str | os.PathLike[str], plugins: Plugins, *, sets: Iterable[str] = ()) -> Spec:
        """Read a document by its path or name, and return its model, with all warnings. Raises SpecError."""
        return read_document(name, self.config, plugins, sets=sets).model

    def trained_model(self, name: str | os.PathLike[str], plugins: Plugins, *, sets: Iterable[str] = ()) -> Any:
        """Return the model that a document trains, without values, as `tfkit.count_params` takes a model.

        None if it is the model of `model`, and all of its parameters are trained.
        """
        return None

    def check(self, name: str | os.PathLike[str], plugins: Plugins, *, sets: Iterable[str] = ()) -> Graph:
        """Check a document completely, as `tfkit validate` does, and return its model. Raises SpecError."""
        return graph_of(self.model(name, plugins, sets=sets), plugins)

    def schema(self, plugins: Plugins) -> Schema:
        """Return the JSON Schema of the type, which `tfkit schema TYPE` prints."""
        return document_schema(self.config, plugins)

    def template(self, spec: str, folder: Path, plugins: Plugins) -> str | None:
        """Return the text that `tfkit new TYPE SPEC` writes to a file in `folder`; None if there is no template."""
        return None

    def weight_warnings(self, weights: Path, graph: Graph) -> Iterable[Diagnostic]:
        """Return warnings about weights that belong to a document, such as changes of code since their training."""
        return ()


def graph_of(model: Spec, plugins: Plugins) -> Graph:
    """Expand the model of a document. The paths of its errors begin with `model.`."""
    with of_model():
        return announce_graph(expand(model), plugins)


def document_types(plugins: Plugins) -> tuple[Mapping[str, DocumentType], tuple[Diagnostic, ...]]:
    """Return the types of all plugins by name, and a warning for each plugin whose hook fails.

    Raises SpecError if two plugins define a type of the same name.
    """
    answers = plugins.hooks.call("tfkit_documents", _checked_types)
    by_name: dict[str, tuple[str, DocumentType]] = {}
    clashes = []
    for plugin, types in reversed(answers.values):  # pluggy calls the plugin that was loaded last first
        for item in types:
            if item.name in by_name:
                message = f"there are two types of document named `{item.name}`"
                help = f"rename one of the two, or switch one plugin off by its name: {DISABLE}=<name>"
                clashes.append(Diagnostic(message, notes=(by_name[item.name][0], plugin), help=help))
            by_name.setdefault(item.name, (plugin, item))
    if clashes:
        raise SpecError(*clashes)
    return {name: item for name, (_, item) in by_name.items()}, answers.faults


def _checked_types(returned: object) -> list[DocumentType]:
    """Return the result of a hook as a list; raise TypeError for anything but types of document."""
    types = []
    for item in returned if isinstance(returned, Iterable) else [returned]:
        if not isinstance(item, DocumentType):
            raise TypeError(f"must return a list of tfkit.DocumentType; got {type(item).__name__}")
        _check_document(item.config)
        types.append(item)
    return types


def _check_document(document: Any) -> None:
    """Raise TypeError unless a class is a type of document that tfkit can identify."""
    if not (isinstance(document, type) and issubclass(document, Document)):
        raise TypeError("must return types whose `config` is a subclass of tfkit.Document")
    name = document.__name__
    missing = [field for field in ("sort", "command", "typical") if not getattr(document, field, None)]
    if missing:
        raise TypeError(f"`{name}` has no `{missing[0]}`")
    if not WORD.fullmatch(document.sort) or document.sort == ModelSpec.sort:
        raise TypeError(f"`{name}.sort` must be a lower-case word other than `model`; got {document.sort!r}")
    unknown = [key for key in document.typical if key not in {*document.model_fields, *document.further_keys}]
    if unknown:
        raise TypeError(f"`{name}.typical` must contain keys of the document; got {unknown[0]!r}")
