"""A model's values, changed: every config in it is made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from tfkit.component import Config

C = TypeVar("C", bound=Config)
Path = tuple[str, ...]
Change = Callable[[Path, Any], Any]
"""The new value for a value and its path; it is asked of every value that is not a config or a mapping of some."""


def every(config: C, change: Change, path: Path = ()) -> C:
    """A config in which every value is changed. Nothing checks the result: the graph made of it does."""
    names = type(config).model_fields
    values = {name: _changed(getattr(config, name), change, (*path, name)) for name in names}
    return config.model_copy(update=values)


def _changed(value: Any, change: Change, path: Path) -> Any:
    if isinstance(value, Config):
        return every(value, change, path)
    if isinstance(value, Mapping) and any(isinstance(one, Config) for one in value.values()):
        return {name: _changed(one, change, (*path, name)) for name, one in value.items()}
    if isinstance(value, tuple) and any(isinstance(one, Config) for one in value):
        return tuple(_changed(one, change, (*path, str(index))) for index, one in enumerate(value))
    return change(path, value)


def put(path: Path, value: Any) -> Change:
    """A change of one value."""
    return lambda place, old: value if place == path else old


def leaves(config: Config, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value of a config and of those inside it, with its path."""
    found: list[tuple[Path, Any]] = []

    def note(place: Path, value: Any) -> Any:
        found.append((place, value))
        return value

    every(config, note, path)
    yield from found
