"""Fields that do not change the spec."""

from __future__ import annotations

from typing import Any, Literal

from tfkit.component import FieldConfig, Reading, Writing, case_of
from tfkit.errors import Invalid, quoted


class OnlyConfig(FieldConfig):
    """The one value that the specs of the family can express: `{only: false}`."""

    kind: Literal["only"] = "only"
    only: Any
    """The value; it is written too, unless it is null."""

    def read(self, name: str, file: Reading) -> None:
        value = file.given(name).get("")
        wanted = list(self.only) if isinstance(self.only, tuple) else self.only
        if value not in (wanted, None):
            must = f"{quoted(name)} must be {quoted(case_of(wanted))}"
            raise Invalid("", f"{must}: {file.model_type} supports no other value")

    def write(self, name: str, file: Writing) -> None:
        if self.only is not None:
            file.put(name, self.only)


class UnusedConfig(FieldConfig):
    """A field without a meaning: `unused`; or `{unused: 0}`, where it is written with that value."""

    kind: Literal["unused"] = "unused"
    unused: Any = None
    """The value to write, where the default of its class in transformers does not fit every model; may be null."""

    def read(self, name: str, file: Reading) -> None:
        """Any value is right."""

    def write(self, name: str, file: Writing) -> None:
        if "unused" in self.model_fields_set:
            file.put(name, self.unused)
