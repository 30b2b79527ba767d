"""The base class of every type of file in the spec language, and the check that a file is of the expected type.

A type of document is a subclass of `Document`: models in this package, further types in plugins, which register them by
the hook `tfkit_documents`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import field_validator

from tfkit.component import Config
from tfkit.errors import Diagnostic, Invalid, SpecError, quoted
from tfkit.spec.merge import MergeKeys
from tfkit.spec.tree import Mapping as Tree

VERSION = 1
MODEL = "model"
"""The key of the spec inside a document."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
"""The form of the names of models and runs."""


class Document(Config):
    """A type of document: its fields, and what identifies it. Every file states the version of its language."""

    sort: ClassVar[str] = ""
    """The name of the type, a lower-case word such as `model`; empty for a base class of several types."""
    command: ClassVar[str] = ""
    """The command that takes documents of this type."""
    typical: ClassVar[tuple[str, ...]] = ()
    """Keys that identify the type: only documents of this type have all of them."""
    further_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that are not fields, because they are removed before the document is resolved: `("model",)` if it contains a
    spec."""
    exclusive_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of which a document has a single one: setting it removes all of them from the document that it extends."""
    listed_keys: ClassVar[tuple[str, ...]] = ()
    """Keys whose value may be one kind instead of a list."""
    arithmetic_names: ClassVar[tuple[str, ...]] = ()
    """Names that arithmetic in the model may contain, in addition to the names of its fields."""
    merge_keys: ClassVar[MergeKeys] = MergeKeys({})
    """Exceptions from the way in which mappings merge."""

    tfkit: Literal[1]
    """Version of the spec language."""

    @field_validator("tfkit", mode="before")
    @classmethod
    def _version(cls, version: object) -> object:
        if type(version) is int and version != VERSION:
            message = f"the version of the spec language must be {VERSION}, which this tfkit reads; got {version}"
            raise Invalid("tfkit", message, help=f"write `tfkit: {VERSION}`")
        return version


def check_sort(root: Tree, expected: type[Document]) -> None:
    """Raise SpecError if the keys of a document identify a different type than the expected one."""
    matching = sum(key in root.items for key in expected.typical)
    for document in _document_types(Document):
        if len(document.typical) > matching and all(name in root.items for name in document.typical):
            key = document.typical[0]
            message = f"{quoted(root.span.source.name)} must be a {expected.sort}; got a {document.sort}"
            raise SpecError(Diagnostic(message, root.keys[key], key, help=f"read it with `tfkit {document.command}`"))


def _document_types(base: type[Document]) -> Iterator[type[Document]]:
    """Yield the types of document that have been imported, without base classes of several types."""
    for document in base.__subclasses__():
        if document.sort and document.typical:
            yield document
        yield from _document_types(document)
