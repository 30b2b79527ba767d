"""Fields that do not change the spec."""

from __future__ import annotations

from typing import Any, Literal

from tfkit.component import FieldConfig, Reading, Writing, case_of
from tfkit.components.fields.layers import spelt_out
from tfkit.errors import Invalid, quoted

EQUAL = "= "
MORE = "a spec whose family extends this one may give it a meaning, see specs/README.md: --family FILE"
"""The way out of a value that a family does not support."""


class OnlyConfig(FieldConfig):
    """The one value that the specs of the family can express, `{only: false}`, or that other fields give."""

    kind: Literal["only"] = "only"
    only: Any
    """The value, which is written too, unless it is null. A text that begins with `= ` is another field or arithmetic
    over fields, `= local_attention // 2`: the two must agree, and nothing is written. `{= other: {its value: value}}`
    has a word for each value of the other."""
    also: Any = None
    """Another value that means the same."""
    because: str | None = None
    """The reason why it can have no other value."""

    @property
    def _other(self) -> tuple[str, dict[str, Any]] | None:
        """The field or the arithmetic that gives the value, and its words."""
        text, words = next(iter(self.only.items())) if isinstance(self.only, dict) and self.only else (self.only, {})
        return (text.removeprefix(EQUAL), words) if isinstance(text, str) and text.startswith(EQUAL) else None

    def read(self, name: str, file: Reading) -> None:
        value = file.given(name).get("", None if self._other else file.default(name))
        if value == self.also:
            return
        if self._other is not None:
            self._agree(name, value, file, *self._other)
            return
        expected = list(self.only) if isinstance(self.only, tuple) else self.only
        if value not in (expected, None):
            must = f"{quoted(name)} must be {quoted(case_of(expected))}"
            why = self.because or f"{file.model_type} supports no other value"
            raise Invalid("", f"{must}: {why}", help=None if self.because else MORE)

    def _agree(self, name: str, value: Any, file: Reading, other: str, words: dict[str, Any]) -> None:
        other_value = file.value(other) if other.isidentifier() else file.compute(other)
        expected = words.get(case_of(other_value), other_value)
        if value is not None and spelt_out(value) != spelt_out(expected):
            message = (
                f"{quoted(name)} is {quoted(case_of(value))}, but {quoted(other)} gives {quoted(case_of(expected))}"
            )
            raise Invalid("", message, help="transformers believes one of them: leave the wrong one out")

    def write(self, name: str, file: Writing) -> None:
        if self.only is not None and self._other is None:
            file.put(name, self.only)


class UnusedConfig(FieldConfig):
    """A field without a meaning: `unused`; or `{unused: 0}`, where it is written with that value."""

    kind: Literal["unused"] = "unused"
    unused: Any = None
    """The value to write, where the default of its class in transformers does not fit every model; may be null."""

    def read(self, name: str, file: Reading) -> None:
        """Accept any value."""

    def write(self, name: str, file: Writing) -> None:
        if "unused" in self.model_fields_set:
            file.put(name, self.unused)
