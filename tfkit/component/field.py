"""The slot of a family's rules: what a field of config.json means in a spec, read and written side by side.

A kind is a config with `read` and `write`; a family names it by its key, `{rope: decoder.attention.position}`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

from tfkit.component.config import Component

ABSENT: Any = object()
"""The value of a place that a spec does not have."""


class Reading(Protocol):
    """A config.json that is read, and the spec as the fields before this one have changed it."""

    model_type: str

    def value(self, name: str) -> Any:
        """Return the value of a field or its default; raise `Invalid` if it has neither."""

    def default(self, name: str) -> Any:
        """Return the default of a field; None without a default."""

    def given(self, around: str) -> dict[str, Any]:
        """Return the fields of the file that are not null and begin with `around`, by the rest of their names."""

    def knows(self, name: str) -> bool:
        """Return True if a field has its own rule."""

    def used(self, names: Iterable[str]) -> None:
        """Note fields that this one has read."""

    def compute(self, text: str) -> int | float:
        """Evaluate arithmetic over the fields; raise `Invalid`."""

    def at(self, path: str) -> Any:
        """Return the spec's value at a path; None if there is none."""

    def reaches(self, path: str) -> bool:
        """Return False for a path into an empty slot, an unused variant, or a node that the head removes."""

    def put(self, path: str, value: Any) -> None:
        """Change one place of the spec, unless the head leaves its node out.

        Mappings of one kind are merged, everything else is replaced.
        """

    def solve(self, expression: str, value: Any) -> None:
        """Change the spec so that an expression over one of its values has this value."""

    def layers(self, stack: str) -> list[str] | None:
        """Return the variant of each layer of a stack; None if the number of layers is wrong."""

    def arrange(self, stack: str, names: Sequence[str]) -> None:
        """Set the variant of each layer of a stack."""

    def variants(self, stack: str) -> dict[str, Any]:
        """Return the changes of each variant that layers of a stack have or may get."""

    def listed(self, stack: str) -> bool:
        """Return True if the file has a list of the stack's layers."""


class Writing(Protocol):
    """A spec, and the config.json that is written for it."""

    def default(self, name: str) -> Any:
        """Return the default of a field; None without a default."""

    def omits(self, name: str) -> bool:
        """Return True if a field that is left out means null."""

    def knows(self, name: str) -> bool:
        """Return True if a field has its own rule."""

    def value(self, path: str) -> Any:
        """Return the spec's value at a path; `ABSENT` if there is none."""

    def values(self, expressions: Sequence[str]) -> dict[str, Any]:
        """Return the values of the spec in several expressions, each by its path."""

    def evaluate(self, expression: str, value: Any) -> int | float:
        """Evaluate an expression over a value of the spec."""

    def compute(self, text: str) -> int | float:
        """Evaluate arithmetic over the fields; raise `Invalid`."""

    def says(self, path: str, value: Any) -> bool:
        """Return True if the spec's value at a path equals `value`, or the head removes its node."""

    def layers(self, stack: str) -> list[str]:
        """Return the variant of each layer of a stack."""

    def listed(self, stack: str) -> bool:
        """Return True if a field of the family lists the layers of a stack."""

    def put(self, name: str, value: Any) -> None:
        """Write a field."""


class FieldConfig(Component, ABC):
    """The meaning of a field of config.json in a spec, in both directions."""

    slot: ClassVar[str] = "field"

    @property
    def expressions(self) -> tuple[str, ...]:
        """The values of the spec that the field stands for: paths, or arithmetic over one and other fields."""
        return ()

    @property
    def null(self) -> str | None:
        """Arithmetic over other fields for the number that null stands for."""
        return None

    @property
    def lists(self) -> str | None:
        """The path of the stack whose layers the field lists."""
        return None

    @abstractmethod
    def read(self, name: str, file: Reading) -> None:
        """Change the spec as the field says; raises `Invalid`."""

    def pass_over(self, name: str, file: Reading) -> None:
        """Replace `read` for a field that other fields make meaningless; raise `Invalid` if it needs a meaning."""

    @abstractmethod
    def write(self, name: str, file: Writing) -> None:
        """Write the field from the spec. Raises `Invalid` if no value of the field can express the spec."""

    def write_unread(self, name: str, file: Writing) -> None:
        """Replace `write` for a field that other fields make meaningless."""


def case_of(value: object) -> str:
    """Return the word that a table has for a value."""
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else "null" if value is None else str(value)


def value_of(word: str) -> Any:
    """Return the value that a word of a table stands for."""
    return {"true": True, "false": False, "null": None}.get(word, int(word) if word.isdecimal() else word)
