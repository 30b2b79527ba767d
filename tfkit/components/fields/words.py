"""Fields whose values are words of a table, each with a value or with changes of the spec."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from tfkit.component import FieldConfig, Reading, Writing, case_of, value_of
from tfkit.errors import Invalid, listing, quoted

TABLES: Mapping[str, Mapping[str, Any]] = {
    "tie": {"true": "embedding", "false": None},
    "scale": {"true": "sqrt_d_model", "false": None},
}
"""Tables that many families share."""


class WordsConfig(FieldConfig):
    """A word for one value of the spec: `{words: tie, at: logits.tie}`."""

    kind: Literal["words"] = "words"
    words: str | dict[str, Any]
    """The value for each word; or the name of a table: see `TABLES`."""
    at: str | tuple[str, ...]
    """The path of the value, or of several that share it."""

    def check(self) -> None:
        """Refuse the name of a table that there is not."""
        super().check()
        if isinstance(self.words, str) and self.words not in TABLES:
            message = f"there is no table {quoted(self.words)}"
            raise Invalid("words", message, help=f"tables: {listing(TABLES)}; or write one in place: `{{word: value}}`")

    @property
    def table(self) -> Mapping[str, Any]:
        """The value for each word."""
        return TABLES[self.words] if isinstance(self.words, str) else self.words

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the value."""
        return (self.at,) if isinstance(self.at, str) else self.at

    def read(self, name: str, file: Reading) -> None:
        word = known_word(name, file.value(name), self.table, file)
        for path in self.paths:
            file.put(path, self.table[word])

    def write(self, name: str, file: Writing) -> None:
        fit = [word for word, value in self.table.items() if all(file.says(path, value) for path in self.paths)]
        file.put(name, value_of(first_word(fit, name, self.table)))


class CasesConfig(FieldConfig):
    """A value for changes in several places of the spec: `{cases: {"true": {decoder.placement: parallel}, ...}}`."""

    kind: Literal["cases"] = "cases"
    cases: dict[str, dict[str, Any]]
    """For each value of the field the changes of the spec by path."""
    unread: Any = None
    """The value to write where other fields leave the field without a meaning; it is omitted if null."""
    idle: tuple[Any, ...] | None = None
    """The values that the field may have where other fields leave it without a meaning; all by default."""

    def read(self, name: str, file: Reading) -> None:
        for path, changed in self.cases[known_word(name, file.value(name), self.cases, file)].items():
            file.put(path, changed)

    def write(self, name: str, file: Writing) -> None:
        fit = [word for word, value in self.cases.items() if all(file.says(*change) for change in value.items())]
        file.put(name, value_of(first_word(fit, name, self.cases)))

    def pass_over(self, name: str, file: Reading) -> None:
        value = file.given(name).get("")
        if self.idle is not None and value is not None:
            known_word(name, value, [case_of(idle) for idle in self.idle], file)

    def write_unread(self, name: str, file: Writing) -> None:
        if self.unread is not None:
            file.put(name, self.unread)


def known_word(name: str, value: Any, table: Collection[str], file: Reading) -> str:
    """Return the word of a table that a field has."""
    word = case_of(value)
    if word not in table:
        message = f"{quoted(name)} is {quoted(word)}, which {file.model_type} does not support here"
        raise Invalid("", message, notes=[f"it can be {listing(table)}"])
    return word


def first_word(fit: list[str], name: str, table: Collection[str]) -> str:
    """Return the first word that expresses the value of a spec. Raise `Invalid` if no word does."""
    if not fit:
        message = f"no value of {quoted(name)} expresses the value of the spec"
        raise Invalid("", message, notes=[f"it has {', '.join(table)}"])
    return fit[0]
