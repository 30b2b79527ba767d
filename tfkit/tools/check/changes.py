"""A model's values, changed: every config in it is made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from tfkit.component import Config

C = TypeVar("C", bound=Config)
Place = tuple[str, ...]
Change = Callable[[Place, Any], Any]
"""The new value for a value and its path; a config that it returns as it is, is changed inside."""


def every(config: C, change: Change, path: Place = ()) -> C:
    """Change every value of a config; raise ValueError if a config rejects its new values."""
    names = type(config).model_fields
    return type(config).model_validate({n: _changed(getattr(config, n), change, (*path, n)) for n in names})


def _changed(value: Any, change: Change, path: Place) -> Any:
    if isinstance(value, Config):
        changed = change(path, value)
        return every(value, change, path) if changed is value else changed
    if isinstance(value, Mapping) and any(isinstance(item, Config) for item in value.values()):
        return {name: _changed(item, change, (*path, name)) for name, item in value.items()}
    if isinstance(value, tuple) and any(isinstance(item, Config) for item in value):
        return tuple(_changed(item, change, (*path, str(index))) for index, item in enumerate(value))
    return change(path, value)


def put(values: Mapping[Place, Any]) -> Change:
    """Return a change of the values at these places."""
    return lambda place, old: values.get(place, old)


def leaves(config: Config, path: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield every value inside a config that is not a config, with its path."""
    values: list[tuple[Place, Any]] = []

    def note(place: Place, value: Any) -> Any:
        if not isinstance(value, Config):
            values.append((place, value))
        return value

    every(config, note, path)
    yield from values


def without_dropout(path: Place, value: Any, *, but: Place = ()) -> Any:
    """Set a rate of dropout to 0, except the rate at the path `but`, and remove no stage."""
    if path[:-1] == but[:-1] or value is None:
        return value
    if path[-1] == "stages":
        return tuple(stage for stage in value if stage != "dropout")
    return 0.0 if path[-1] == "dropout" else value
