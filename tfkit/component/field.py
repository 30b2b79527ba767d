"""The slot for rules of a family: a rule converts a field of config.json to a spec and back.

A kind is a config with `read` and `write`; a family names it by its key, `{rope: decoder.attention.position}`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

from tfkit.component.config import Component

ABSENT: Any = object()
"""Returned for a path that a spec does not have."""


class Reading(Protocol):
    """A config.json that is being read, and the spec with the changes of all previous fields."""

    model_type: str

    def value(self, name: str) -> Any:
        """Return the value of a field, or its default; raise `Invalid` if it has neither."""

    def default(self, name: str) -> Any:
        """Return the default of a field; None without a default."""

    def present(self, around: str) -> dict[str, Any]:
        """Return the fields that begin with `around` and are not null, by the remainder of their names."""

    def knows(self, name: str) -> bool:
        """Return True if a field has its own rule."""

    def used(self, names: Iterable[str]) -> None:
        """Record that the rule has read further fields."""

    def compute(self, text: str) -> int | float:
        """Evaluate arithmetic over the fields; raise `Invalid`."""

    def at(self, path: str) -> Any:
        """Return the spec's value at a path; None if there is none."""

    def reaches(self, path: str) -> bool:
        """Return False for a path into an empty slot, an unused variant, or a node that the head removes."""

    def put(self, path: str, value: Any) -> None:
        """Set the value at a path of the spec, unless the head removes its node.

        Mappings of one kind are merged, everything else is replaced.
        """

    def solve(self, expression: str, value: Any) -> None:
        """Set the value in the spec for which `expression` equals `value`."""

    def layers(self, stack: str) -> list[str] | None:
        """Return the variant of each layer of a stack; None if the number of layers is wrong."""

    def arrange(self, stack: str, names: Sequence[str]) -> None:
        """Set the variant of each layer of a stack."""

    def variants(self, stack: str) -> dict[str, Any]:
        """Return the changes of each variant that layers of a stack have or can have."""

    def listed(self, stack: str) -> bool:
        """Return True if the file has a list of the stack's layers."""


class Writing(Protocol):
    """A spec, and the config.json that is being written for it."""

    def default(self, name: str) -> Any:
        """Return the default of a field; None without a default."""

    def omits(self, name: str) -> bool:
        """Return True if an omitted field means null."""

    def knows(self, name: str) -> bool:
        """Return True if a field has its own rule."""

    def value(self, path: str) -> Any:
        """Return the spec's value at a path; `ABSENT` if there is none."""

    def values(self, expressions: Sequence[str]) -> dict[str, Any]:
        """Return the values of the spec that occur in `expressions`, by path."""

    def evaluate(self, expression: str, value: Any) -> int | float:
        """Evaluate an expression with `value` as the value of its path."""

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
    """A rule: the conversion of a field of config.json to values of a spec, and back."""

    slot: ClassVar[str] = "field"
    determines: ClassVar[bool] = True
    """False if no value of the field has an effect on the model."""

    @property
    def expressions(self) -> tuple[str, ...]:
        """The values of the spec that the field determines: paths, or arithmetic over a path and other fields."""
        return ()

    @property
    def null(self) -> str | None:
        """Arithmetic over other fields for the number that null stands for; None if null is not a number."""
        return None

    @property
    def lists(self) -> str | None:
        """The path of the stack whose layers the field lists; None if it is not such a list."""
        return None

    @abstractmethod
    def read(self, name: str, file: Reading) -> None:
        """Apply the value of the field to the spec; raise `Invalid`."""

    def pass_over(self, name: str, file: Reading) -> None:
        """Run instead of `read` if other fields disable the field; raise `Invalid` if its value needs an effect."""

    @abstractmethod
    def write(self, name: str, file: Writing) -> None:
        """Write the field from the spec. Raises `Invalid` if no value of the field can express the spec."""

    def write_unread(self, name: str, file: Writing) -> None:
        """Run instead of `write` if other fields disable the field."""


def case_of(value: object) -> str:
    """Return the word for a value in the keys of a table."""
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else "null" if value is None else str(value)


def value_of(word: str) -> Any:
    """Return the value of a word in the keys of a table."""
    return {"true": True, "false": False, "null": None}.get(word, int(word) if word.isdecimal() else word)
