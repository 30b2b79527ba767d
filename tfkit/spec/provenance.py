"""The locations of a spec's values, to which errors point, and their origins, which `tfkit show` prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tfkit.errors import Span

Path = tuple[str, ...]
SET = "--set"
"""The name of the source of a `--set` argument."""


@dataclass(frozen=True)
class Origin:
    """The origin of a resolved value: the way in which it was set, and the location."""

    how: Literal["given", "inherited", "default"]
    span: Span | None = None


@dataclass
class Provenance:
    """The origin of each value of a spec, and the location of each path in its files."""

    origins: dict[Path, Origin] = field(default_factory=dict)
    spans: dict[Path, Span] = field(default_factory=dict)
    inherited: dict[Path, Path] = field(default_factory=dict)
    """For each inherited value, the path from which it was inherited."""

    def span(self, path: Path) -> Span | None:
        """Return the location of `path`, or of the nearest enclosing config that has a location."""
        while path and path not in self.spans:
            path = path[:-1]
        return self.spans.get(path)

    def written(self, path: Path) -> Path:
        """Return the path at which a value was written: the path it was inherited from, or `path` itself."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.inherited:
                return (*self.inherited[path[:length]], *path[length:])
        return path
