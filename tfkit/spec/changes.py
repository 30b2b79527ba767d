"""Changes of a spec as given in Python, converted to those that `--set` takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from numbers import Integral, Real

from tfkit.arguments import Sets, shown


def as_changes(sets: Sets) -> list[str]:
    """Return each change as `path=value`. Text among the values of a mapping is parsed as `--set` parses it.

    Raises TypeError for a value of a type that YAML does not have.
    """
    if isinstance(sets, str):
        return [sets]
    if isinstance(sets, Mapping):
        return [f"{path}={_as_yaml(path, value)}" for path, value in sets.items()]
    return list(sets)


def _as_yaml(path: str, value: object) -> str:
    """Format a value as JSON, which is valid YAML."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, allow_nan=False, default=_plain)
    except (TypeError, ValueError):
        message = f"the value of `{path}` in `sets` must be a number, a string, True, False, None, a list or a mapping"
        raise TypeError(f"{message} of these, not {shown(value)}") from None


def _plain(value: object) -> int | float:
    """Convert a number of another library, such as numpy, to a Python number."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError
