"""The top of every file in the spec language, how the types of documents are told apart, and their parts.

A type of document is a subclass of `Document`: the models of this package, and the documents of packages above it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import field_validator

from tfkit.component import Config
from tfkit.errors import Diagnostic, Invalid, SpecError, quoted
from tfkit.spec.merge import MergeKeys
from tfkit.spec.tree import Mapping as Tree

VERSION = 1
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
"""The form of the names of models and runs."""


class Document(Config):
    """A type of document: a file with the version of the language that it is written in."""

    sort: ClassVar[str]
    """The name of the type in errors, such as `model`."""
    command: ClassVar[str]
    """The command that reads its documents."""
    typical: ClassVar[tuple[str, ...]]
    """Keys that only documents of this type have together."""
    further_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that are not fields, since the document is resolved without them, such as the model inside a run."""
    merge_keys: ClassVar[MergeKeys] = MergeKeys({})
    """The paths at which its mappings merge in a special way."""

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
    """Raise SpecError if a document is not of the expected type, but of a different type."""
    if any(key in root.items for key in expected.typical):
        return
    for document in Document.__subclasses__():
        first = document.typical[0]
        if all(key in root.items for key in document.typical):
            message = f"{quoted(root.span.source.name)} must be a {expected.sort}; got a {document.sort}"
            raise SpecError(
                Diagnostic(message, root.keys[first], first, help=f"read it with `tfkit {document.command}`")
            )
