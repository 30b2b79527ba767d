"""Fields that are a value of the spec, or arithmetic over one; and fields that do not change the spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tfkit.component import ABSENT, FieldConfig, Reading, Writing, case_of, value_of
from tfkit.components.fields.layer_variants import spelt_out
from tfkit.errors import Invalid, quoted

REMAINDER = "rest"
EQUALITY_SIGN = "= "
MORE = "a spec whose family extends this one may give it a meaning, see specs/README.md: --family FILE"
"""Help for a value that a family does not support."""


class ValueConfig(FieldConfig):
    """A value of the spec, `hidden_size: d_model`, or arithmetic that has an inverse, `mask.left + 1`."""

    kind: Literal["value"] = "value"
    at: str | tuple[str, ...]
    """The path of the value, or of several that share it; or arithmetic over one path, whose other names are fields."""
    cases: dict[str, Any] | None = None
    """For special values of the field (words, numbers, other fields) the value that it stands for, or the changes of
    the spec by path; `rest` are changes for every other value but null."""

    @property
    def expressions(self) -> tuple[str, ...]:
        return (self.at,) if isinstance(self.at, str) else self.at

    @property
    def null(self) -> str | None:
        meant = (self.cases or {}).get("null")
        return meant if isinstance(meant, str) else None

    def read(self, name: str, file: Reading) -> None:
        value, cases = file.value(name), self.cases or {}
        word = next((word for word in cases if word != REMAINDER and _is(word, value, file)), None)
        if word is not None and isinstance(cases[word], Mapping):
            for path, changed in cases[word].items():
                file.put(path, changed)
            return
        if word is not None:
            value = file.compute(cases[word]) if isinstance(cases[word], str) else cases[word]
        if value is not None:  # these changes may create the config that contains the value
            for path, changed in cases.get(REMAINDER, {}).items():
                if file.reaches(path):
                    file.put(path, changed)
        for expression in self.expressions:
            file.solve(expression, value)

    def write(self, name: str, file: Writing) -> None:
        values = file.values(self.expressions)
        present = [value for value in values.values() if value is not ABSENT]
        for word, meant in (self.cases or {}).items():
            if isinstance(meant, Mapping) and word != REMAINDER and all(file.says(*change) for change in meant.items()):
                return file.put(name, file.compute(word) if file.knows(word) else value_of(word))
            if meant is None and (not present or (present[0] is None and not file.omits(name))):
                return file.put(name, file.compute(word))
        if not present or (present[0] is None and file.omits(name)):
            return None
        if any(value != present[0] for value in present):
            differing = ", ".join(f"{quoted(path)} {value}" for path, value in values.items())
            raise Invalid("", f"the values of the spec that one field represents must be equal; got {differing}")
        number = file.evaluate(self.expressions[0], present[0])
        # Strict classes of transformers reject an integer in place of a float.
        return file.put(name, float(number) if type(number) is int and type(file.default(name)) is float else number)


def _is(word: str, value: Any, file: Reading) -> bool:
    """Return True if a field has the value of a case: a word, a number, or a different field."""
    if word == case_of(value) or isinstance(value, bool) or not isinstance(value, int | float):
        return word == case_of(value)
    try:
        return float(word) == value
    except ValueError:
        return file.knows(word) and file.compute(word) == value


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
        """The field or arithmetic that determines the value, and its words."""
        text, words = next(iter(self.only.items())) if isinstance(self.only, dict) and self.only else (self.only, {})
        return (
            (text.removeprefix(EQUALITY_SIGN), words)
            if isinstance(text, str) and text.startswith(EQUALITY_SIGN)
            else None
        )

    def read(self, name: str, file: Reading) -> None:
        value = file.present(name).get("", None if self._other else file.default(name))
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
            raise Invalid("", message, help="remove the wrong field: transformers uses only one of the two")

    def write(self, name: str, file: Writing) -> None:
        if self.only is not None and self._other is None:
            file.put(name, self.only)


class UnusedConfig(FieldConfig):
    """A field without a meaning: `unused`; or `{unused: 0}`, where it is written with that value."""

    determines = False
    kind: Literal["unused"] = "unused"
    unused: Any = None
    """The value to write, where the default of its class in transformers does not fit every model; may be null."""

    def read(self, name: str, file: Reading) -> None:
        """Accept any value."""

    def write(self, name: str, file: Writing) -> None:
        if "unused" in self.model_fields_set:
            file.put(name, self.unused)
