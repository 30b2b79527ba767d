"""The meaning of a run: the values that decide its numbers, by which its folder is named and known again.

The digest is of values that are not the defaults of their fields, and so stays as it is when a kind gets a field whose
default changes nothing. A folder keeps every value: if a default has changed since, it is the folder of another run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from pydantic.fields import FieldInfo

from tfkit.component import Component, Config
from tfkit.spec.annotations import extra, shape_of
from tfkit.spec.model_spec import ModelSpec
from tfkit.spec.run import ENDS, RunSpec

Value: TypeAlias = "str | int | float | bool | None"
LABELS = frozenset({"name", "description", "source", "requires", "parameters", "checkpoint"})
"""Keys at the top of a model that change none of its numbers."""


@dataclass(frozen=True)
class RunMeaning:
    """The values of a run and of its model; `others` are values without a field, such as digests of files."""

    run: RunSpec
    model: ModelSpec
    others: Mapping[str, Value]

    @cached_property
    def values(self) -> Mapping[str, Value]:
        """Each value by its path."""
        return dict(_flat(self._nested(whole=True), ""))

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits for the values that are not defaults."""
        return _digest(self._given)

    @property
    def former_digest(self) -> str:
        """The digest of every value, which named folders before defaults were left out of it."""
        return _digest(self.values)

    def differences(self, before: Mapping[str, Value]) -> list[str]:
        """Return the paths whose values differ from a folder. A path that the folder lacks has its default."""
        here, set_values = self.values, dict(_flat(self._given, ""))
        changed = [path for path, value in before.items() if path not in here or here[path] != value]
        return [*changed, *(path for path in set_values if path not in before)]

    @cached_property
    def _given(self) -> Mapping[str, Any]:
        return self._nested(whole=False)

    def _nested(self, *, whole: bool) -> dict[str, Any]:
        run = _Plain(material=True, whole=whole).entries(self.run)
        model = _Plain(material=False, whole=whole).entries(self.model)
        without = {name: value for name, value in model.items() if name not in LABELS}
        return {**{name: value for name, value in run.items() if name not in ENDS}, "model": without, **self.others}


@dataclass(frozen=True)
class _Plain:
    """Configs as JSON data: unless `whole`, without values that are the defaults of their fields."""

    material: bool
    whole: bool

    def entries(self, config: Config) -> dict[str, Any]:
        """Return the values of a config by name, and its kind."""
        values, fields = config.material() if self.material else dict(config), type(config).model_fields
        plain = {name: self.value(value) for name, value in values.items()}
        if not self.whole:
            usual = {name for name, value in plain.items() if name in fields and self._usual(fields[name], value)}
            plain = {name: value for name, value in plain.items() if name not in usual}
        return plain | ({str(config.word_key): config.kind_name()} if isinstance(config, Component) else {})

    def value(self, value: Any) -> Any:
        """Convert a value, and the values inside it."""
        if isinstance(value, Config):
            return self.entries(value)
        if isinstance(value, Mapping):
            return {name: self.value(entry) for name, entry in value.items()}
        return [self.value(entry) for entry in value] if isinstance(value, tuple | list) else value

    def _usual(self, field: FieldInfo, plain: Any) -> bool:
        """Return True if the plain value of a field is its default; of a slot, the unchanged default kind."""
        kind, shape = extra(field, "default_kind"), shape_of(field.annotation)
        if kind is not None and shape is not None:
            usual = {str(shape.config.word_key): kind}
            return plain in (usual, [usual])
        if field.is_required():
            return False
        return _json(plain) == _json(self.value(field.get_default(call_default_factory=True)))


def _flat(value: Any, path: str) -> Iterator[tuple[str, Value]]:
    """Yield each value with its path. Empty lists and mappings yield nothing."""
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for name, entry in parts:
            yield from _flat(entry, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.blake2b(_json(values).encode(), digest_size=16).hexdigest()
