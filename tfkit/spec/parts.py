"""A walk through a config and all configs inside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tfkit.component import Config
from tfkit.spec.provenance import Path


def parts(path: Path, part: object) -> Iterator[tuple[Path, object]]:
    """Yield a config and everything inside it, each with its path."""
    yield path, part
    inside: Mapping[str, object] = {}
    if isinstance(part, Config):
        inside = {name: getattr(part, name) for name in type(part).model_fields}
    elif isinstance(part, Mapping):
        inside = part
    elif isinstance(part, tuple):
        inside = {str(index): item for index, item in enumerate(part)}
    for name, item in inside.items():
        yield from parts((*path, name), item)
