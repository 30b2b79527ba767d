"""A field that is a value of the spec, or arithmetic over one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tfkit.component import ABSENT, FieldConfig, Reading, Writing, case_of, value_of
from tfkit.errors import Invalid, quoted

REST = "rest"


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
        word = next((word for word in cases if word != REST and _is(word, value, file)), None)
        if word is not None and isinstance(cases[word], Mapping):
            for path, changed in cases[word].items():
                file.put(path, changed)
            return
        if word is not None:
            value = file.compute(cases[word]) if isinstance(cases[word], str) else cases[word]
        if value is not None:  # these first: they may create the config that the value belongs to
            for path, changed in cases.get(REST, {}).items():
                if file.reaches(path):
                    file.put(path, changed)
        for expression in self.expressions:
            file.solve(expression, value)

    def write(self, name: str, file: Writing) -> None:
        values = file.values(self.expressions)
        present = [value for value in values.values() if value is not ABSENT]
        for word, meant in (self.cases or {}).items():
            if isinstance(meant, Mapping) and word != REST and all(file.says(*change) for change in meant.items()):
                return file.put(name, file.compute(word) if file.knows(word) else value_of(word))
            if meant is None and (not present or (present[0] is None and not file.omits(name))):
                return file.put(name, file.compute(word))
        if not present or (present[0] is None and file.omits(name)):
            return None
        if any(value != present[0] for value in present):
            differing = ", ".join(f"{quoted(path)} {value}" for path, value in values.items())
            raise Invalid("", f"one field stands for several values of the spec, but they differ: {differing}")
        return file.put(name, file.evaluate(self.expressions[0], present[0]))


def _is(word: str, value: Any, file: Reading) -> bool:
    """Return True if a field has the value of a case: a word, a number, or another field."""
    if word == case_of(value) or isinstance(value, bool) or not isinstance(value, int | float):
        return word == case_of(value)
    try:
        return float(word) == value
    except ValueError:
        return file.knows(word) and file.compute(word) == value
