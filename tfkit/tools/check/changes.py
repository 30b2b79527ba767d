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
    """A config in which every value is changed; raises ValueError if a config refuses its new values."""
    names = type(config).model_fields
    return type(config).model_validate({n: _changed(getattr(config, n), change, (*path, n)) for n in names})


def _changed(value: Any, change: Change, path: Place) -> Any:
    if isinstance(value, Config):
        found = change(path, value)
        return every(value, change, path) if found is value else found
    if isinstance(value, Mapping) and any(isinstance(one, Config) for one in value.values()):
        return {name: _changed(one, change, (*path, name)) for name, one in value.items()}
    if isinstance(value, tuple) and any(isinstance(one, Config) for one in value):
        return tuple(_changed(one, change, (*path, str(index))) for index, one in enumerate(value))
    return change(path, value)


def put(values: Mapping[Place, Any]) -> Change:
    """A change of the values at these places."""
    return lambda place, old: values.get(place, old)


def leaves(config: Config, path: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every value of a config and of those inside it that is not a config itself, with its path."""
    found: list[tuple[Place, Any]] = []

    def note(place: Place, value: Any) -> Any:
        if not isinstance(value, Config):
            found.append((place, value))
        return value

    every(config, note, path)
    yield from found


def without_dropout(path: Place, value: Any, *, but: Place = ()) -> Any:
    """The change of a model that makes all rates of dropout 0, except that with the path `but`; it leaves no stage."""
    if path[:-1] == but[:-1] or value is None:
        return value
    if path[-1] == "stages":
        return tuple(stage for stage in value if stage != "dropout")
    return 0.0 if path[-1] == "dropout" else value
