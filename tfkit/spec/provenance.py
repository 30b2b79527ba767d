"""The origins of a spec's values, which errors point at and `tfkit show` prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tfkit.errors import Span

Path = tuple[str, ...]
SET = "--set"
"""The name of the source of a `--set` argument."""


@dataclass(frozen=True)
class Origin:
    """The origin of a resolved value."""

    how: Literal["given", "inherited", "default"]
    span: Span | None = None


@dataclass
class Provenance:
    """The places of a spec's contents: the origin of each value, and the place of each path that was written."""

    origins: dict[Path, Origin] = field(default_factory=dict)
    spans: dict[Path, Span] = field(default_factory=dict)
    inherited: dict[Path, Path] = field(default_factory=dict)
    """For each value that was inherited, the path under which it was written."""

    def span(self, path: Path) -> Span | None:
        """Return the location of `path`, or of the nearest config around it."""
        while path and path not in self.spans:
            path = path[:-1]
        return self.spans.get(path)

    def written(self, path: Path) -> Path:
        """Return the path at which a value was written, which differs from its own if it was inherited."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.inherited:
                return (*self.inherited[path[:length]], *path[length:])
        return path
