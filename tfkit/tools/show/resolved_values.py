"""A resolved spec as a list of values, each with its origin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tfkit.component import BlockConfig, Component, Config, PatchMarker, marker
from tfkit.graph.expand import Graph
from tfkit.spec.provenance import Origin, Provenance

How = Literal["given", "inherited", "default"]
Path = tuple[str, ...]
DEFAULT = Origin("default")
FLAT = 60  # maximum characters of a list or mapping of plain values on one line


@dataclass(frozen=True)
class ResolvedValue:
    """One line of the tree. `value` is None for a node without a plain value, such as a mapping."""

    path: Path
    value: str | None
    how: How
    file: str | None = None
    line: int | None = None

    @property
    def name(self) -> str:
        """The last key of the path."""
        return self.path[-1]

    @property
    def dotted(self) -> str:
        """The path as errors and `--set` write it."""
        return ".".join(self.path)


def values_of(graph: Graph) -> list[ResolvedValue]:
    """Return every resolved value of a spec, in its order; a mapping comes before its contents.

    For a layer variant, return only the differences from its stack.
    """
    walk = _Walk(graph.spec.provenance)
    values = list(walk.config(graph.spec.model, (), None))
    by_path = {value.path: value for value in values}
    distinct = [value.path for value in values if not _is_repeated_value(value, by_path, walk.variants)]
    around = {path[:length] for path in distinct for length in range(1, len(path) + 1)}
    return [value for value in values if value.path in around and not _of_the_map(value.path)]


def _of_the_map(path: Path) -> bool:
    """Return True for a value of a family in the spec, which does not affect the model."""
    return path[0] == "checkpoint" and len(path) > 1


def _is_repeated_value(
    value: ResolvedValue, by_path: Mapping[Path, ResolvedValue], variants: Mapping[Path, Path]
) -> bool:
    """Return True if a variant's value equals its stack's; `variants` maps each variant to its stack."""
    for variant, stack in variants.items():
        if value.path[: len(variant)] == variant and value.path != variant:
            twin = by_path.get((*stack, *value.path[len(variant) :]))
            return twin is not None and replace(twin, path=value.path) == value
    return False


class _Walk:
    def __init__(self, provenance: Provenance) -> None:
        self.origins = provenance.origins
        self.provenance = provenance
        self.variants: dict[Path, Path] = {}

    def config(self, config: Config, path: Path, outer: Origin | None) -> Iterator[ResolvedValue]:
        """Yield the fields of a config. `outer` is its origin if that also applies to everything in it."""
        for name, info in type(config).model_fields.items():
            if isinstance(config, Component) and path and name == config.word_key:
                continue
            if isinstance(config, BlockConfig) and name not in config.stated_fields:
                continue
            value = getattr(config, name)
            here = (*path, name)
            if marker(info, PatchMarker):
                self.variants |= {(*here, key): path[:-1] for key in value}
            yield from self._any(value, here, outer)

    def _any(self, value: Any, path: Path, outer: Origin | None) -> Iterator[ResolvedValue]:
        origin = self._origin(path, outer)
        if isinstance(value, Config):
            yield self._part(value, path, origin)
            yield from self.config(value, path, None if origin.how == "given" else origin)
        elif _is_plain(value):
            yield _resolved_value(path, text_of(value), origin)
        else:
            items = value if isinstance(value, Mapping) else {str(i): item for i, item in enumerate(value)}
            yield _resolved_value(path, None, origin)
            for key, item in items.items():
                yield from self._any(item, (*path, str(key)), None if origin.how == "given" else origin)

    def _origin(self, path: Path, outer: Origin | None) -> Origin:
        """Return the origin of a value, unless the origin of its entire config, inherited or default, covers it."""
        origin = self.origins.get(path)
        if origin is None and path in self.provenance.spans:
            origin = Origin("given", self.provenance.spans[path])
        if outer is None or origin is None or origin.how != "given":
            return origin or DEFAULT
        return DEFAULT if outer.how == "default" else Origin(outer.how, origin.span)

    def _part(self, config: Config, path: Path, origin: Origin) -> ResolvedValue:
        if not isinstance(config, Component):
            return _resolved_value(path, None, origin)
        kind = self.origins.get((*path, str(config.word_key)))
        if origin.how != "default" and kind is not None and kind.span is not None:
            origin = Origin(origin.how, kind.span)
        return _resolved_value(path, config.kind_name(), origin)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, tuple | list):
        parts = list(value)
    else:
        return True
    return not any(isinstance(part, Config) for part in parts) and len(text_of(value)) <= FLAT


def text_of(value: Any) -> str:
    """Format a plain value as YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {text_of(item)}' for key, item in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(text_of, value))}]"
    return str(value)


def number_text(value: Any) -> str:
    """Format a number for people: grouped thousands, floats with five digits."""
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else text_of(value)


def _resolved_value(path: Path, text: str | None, origin: Origin) -> ResolvedValue:
    span = origin.span
    if span is None or not span.number:
        return ResolvedValue(path, text, origin.how)
    return ResolvedValue(path, text, origin.how, span.source.name, span.line)
