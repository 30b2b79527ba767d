"""The specs that come with tfkit, listed without building any."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

from tfkit.plugin.discover import canonical
from tfkit.plugin.manager import available
from tfkit.spec.load import read_tree, shipped_specs
from tfkit.spec.source import plain, read


@dataclass(frozen=True)
class Shipped:
    """A spec that comes with tfkit.

    Attributes:
        kind: `decoder`, `encoder`, or `encoder-decoder`.
        parameters: their number, if it is stated.
        model_type: the family of its published checkpoint, if it has one.
        requires: the plugins that its components come from.
        missing: those of them that are not available.
    """

    name: str
    kind: str
    parameters: int | None
    description: str | None
    model_type: str | None
    source: str | None
    requires: tuple[str, ...]
    missing: tuple[str, ...]


def shipped(words: Collection[str] = (), there: Collection[str] | None = None) -> list[Shipped]:
    """Every spec that comes with tfkit and has all of these words in its name, kind, family, plugins or description.

    `there` are the canonical names of the available plugins; those that would be loaded unless given.
    """
    there = available() if there is None else there
    remembering = cache(read)  # the files that many others extend
    found = [_shipped(name, plain(read_tree(name, read=remembering)), there) for name in shipped_specs()]
    return [one for one in found if all(word.casefold() in _text(one) for word in words)]


def _shipped(name: str, spec: dict[str, Any], there: Collection[str]) -> Shipped:
    blocks = {node.get("block") for node in spec["graph"].values() if isinstance(node, dict)}
    kind = "encoder-decoder" if {"encoder", "decoder"} <= blocks else "encoder" if "encoder" in blocks else "decoder"
    checkpoint, requires = spec.get("checkpoint") or {}, tuple(spec.get("requires") or ())
    return Shipped(
        name=name,
        kind=kind,
        parameters=spec.get("parameters"),
        description=spec.get("description"),
        model_type=checkpoint.get("model_type"),
        source=spec.get("source"),
        requires=requires,
        missing=tuple(plugin for plugin in requires if canonical(plugin) not in there),
    )


def _text(one: Shipped) -> str:
    return " ".join(filter(None, (one.name, one.kind, one.model_type, one.description, *one.requires))).casefold()
