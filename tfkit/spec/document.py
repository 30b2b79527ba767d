"""The top of every file in the spec language, a model, a run or a sweep; how they are told apart; and their parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import field_validator

from tfkit.component import Config
from tfkit.errors import Diagnostic, Invalid, SpecError, quoted
from tfkit.spec.provenance import Path
from tfkit.spec.tree import Mapping as Tree

VERSION = 1
Sort = Literal["model", "run", "sweep"]
KEYS: dict[Sort, tuple[str, ...]] = {"model": ("graph",), "run": ("model", "data"), "sweep": ("base", "compare")}
"""Keys that only documents of one sort have together."""
COMMANDS: dict[Sort, str] = {"model": "show", "run": "train", "sweep": "sweep"}
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
"""The form of the names of models and runs."""


class Document(Config):
    """A file with the version of the language that it is written in."""

    tfkit: Literal[1]
    """Version of the spec language."""

    @field_validator("tfkit", mode="before")
    @classmethod
    def _version(cls, version: object) -> object:
        if type(version) is int and version != VERSION:
            message = f"this tfkit reads version {VERSION} of the spec language, not {version}"
            raise Invalid("tfkit", message, help=f"write `tfkit: {VERSION}`")
        return version


def check_sort(root: Tree, expected: Sort) -> None:
    """Raise SpecError if a document is none of the sort that was asked for, but of another one."""
    if any(key in root.items for key in KEYS[expected]):
        return
    for sort, keys in KEYS.items():
        if all(key in root.items for key in keys):
            message = f"{quoted(root.span.source.name)} is a {sort}, not a {expected}"
            help = f"`tfkit {COMMANDS[sort]}` reads it"
            raise SpecError(Diagnostic(message, root.keys[keys[0]], keys[0], help=help))


def parts(path: Path, part: object) -> Iterator[tuple[Path, object]]:
    """Yield a config and everything inside it, each with its path."""
    yield path, part
    inside: Mapping[str, object] = {}
    if isinstance(part, Config):
        inside = {name: getattr(part, name) for name in type(part).model_fields}
    elif isinstance(part, Mapping):
        inside = part
    elif isinstance(part, tuple):
        inside = {str(index): item for index, item in enumerate(part)}
    for name, item in inside.items():
        yield from parts((*path, name), item)
