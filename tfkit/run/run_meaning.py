"""The meaning of a run: the values that determine its results, which name and identify its folder.

The digest covers only values that differ from the defaults of their fields. It therefore stays the same when a kind
gets a new field whose default changes nothing. The folder stores every value: if a default has changed since, the
folder belongs to a different run. Files that determine the results count by their content, not by their path.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeAlias

from pydantic.fields import FieldInfo

from tfkit.component import Component, Config, ContentMarker, marker, parts
from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.run.run_spec import ENDS, RunSpec
from tfkit.spec.annotations import shape_of, slot_setting
from tfkit.spec.extending import short_path
from tfkit.spec.folder import model_folder
from tfkit.spec.model_spec import ModelSpec
from tfkit.spec.weight_files import content_of

Value: TypeAlias = "str | int | float | bool | None"
LABELS = frozenset({"name", "description", "source", "requires", "parameters", "checkpoint"})
"""Keys at the top of a model that have no effect on its results."""


@dataclass(frozen=True)
class RunSemantics:
    """The values of a run and its model. `others` are values that are not fields, such as digests of files."""

    run: RunSpec
    model: ModelSpec
    others: Mapping[str, Value]

    @cached_property
    def values(self) -> Mapping[str, Value]:
        """All values by path."""
        return dict(_flat_values(self._nested(defaults=True), ""))

    @cached_property
    def digest(self) -> str:
        """Digest of the values that are not defaults, 32 hexadecimal digits."""
        return _digest_of_values(self._without_defaults)

    def differences(self, before: Mapping[str, Value]) -> list[str]:
        """Return the paths whose values differ from those in a folder. A path that the folder lacks has its default."""
        here, set_values = self.values, dict(_flat_values(self._without_defaults, ""))
        changed = [path for path, value in before.items() if path not in here or here[path] != value]
        return [*changed, *(path for path in set_values if path not in before)]

    @cached_property
    def _without_defaults(self) -> Mapping[str, Any]:
        return self._nested(defaults=False)

    def _nested(self, *, defaults: bool) -> dict[str, Any]:
        run = _Plain(material=True, defaults=defaults).entries(self.run)
        model = _Plain(material=False, defaults=defaults).entries(self.model)
        without = {name: value for name, value in model.items() if name not in LABELS}
        return {**{name: value for name, value in run.items() if name not in ENDS}, "model": without, **self.others}


@dataclass(frozen=True)
class _Plain:
    """Converts configs to JSON data. Without `defaults`, values that are the defaults of their fields are omitted."""

    material: bool
    defaults: bool

    def entries(self, config: Config) -> dict[str, Any]:
        """Return the values of a config by name, with its kind."""
        values, fields = config.material() if self.material else dict(config), type(config).model_fields
        plain = {name: self.value(value) for name, value in values.items()}
        if not self.defaults:
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
        """Return True if the plain value of a field is its default or, for a slot, the unchanged default kind."""
        kind, shape = slot_setting(field, "default_kind"), shape_of(field.annotation)
        if kind is not None and shape is not None:
            usual = {str(shape.config.word_key): kind}
            return plain in (usual, [usual])
        if field.is_required():
            return False
        return _json_text(plain) == _json_text(self.value(field.get_default(call_default_factory=True)))


def _flat_values(value: Any, path: str) -> Iterator[tuple[str, Value]]:
    """Yield each value with its path. Empty lists and mappings have no path."""
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for name, entry in parts:
            yield from _flat_values(entry, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def _json_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _digest_of_values(values: Mapping[str, Any]) -> str:
    return hashlib.blake2b(_json_text(values).encode(), digest_size=16).hexdigest()


def content_paths(start: tuple[str, ...], root: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the files and folders of a config whose content counts, each with its path below `start`."""
    for location, part in parts(start, root):
        for name, field in type(part).model_fields.items() if isinstance(part, Config) else ():
            if marker(field, ContentMarker) is not None:
                inside = parts((*location, name), getattr(part, name))
                yield from ((path, value) for path, value in inside if isinstance(value, str))


def files_content(path: Path) -> str:
    """Return a digest of a file or of all files in a folder, 64 hexadecimal digits; raise SpecError if unreadable.

    The folder of a run stands for its latest checkpoint.
    """
    root = model_folder(path)
    try:
        files = [root] if root.is_file() else sorted(file for file in root.rglob("*") if file.is_file())
        if not files:
            raise FileNotFoundError(0, "the folder has no files" if root.is_dir() else "there is no such file")
        names = [(str(file.relative_to(root)), file, file.stat()) for file in files]
        digests = [(name, _file_content(file, stat.st_size, stat.st_mtime_ns)) for name, file, stat in names]
    except OSError as error:
        raise SpecError(Diagnostic(f"cannot read {quoted(str(short_path(path)))}: {error.strerror}")) from error
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


@cache  # a sweep has many runs with one teacher
def _file_content(path: Path, size: int, modified: int) -> str:
    """Return the digest of a file. Its size and modification time are arguments because they are keys of the cache."""
    if path.suffix == ".safetensors":
        return content_of(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
