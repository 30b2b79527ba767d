"""The specs that come with tfkit, without building anything."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

from tfkit.spec.load import read_tree, shipped_specs
from tfkit.spec.source import plain, read


@dataclass(frozen=True)
class Shipped:
    """A spec that comes with tfkit.

    Attributes:
        kind: `decoder`, `encoder`, or `encoder-decoder`.
        parameters: how many it has, if it says so.
        model_type: the family of its published checkpoint, if it has one.
        requires: the plugins that its components come from.
    """

    name: str
    kind: str
    parameters: int | None
    description: str | None
    model_type: str | None
    source: str | None
    requires: tuple[str, ...]


def shipped(words: Collection[str] = ()) -> list[Shipped]:
    """Every spec that comes with tfkit and has all of these words in its name, kind, family, plugins or description."""
    remembering = cache(read)  # the files that many others extend
    found = [_shipped(name, plain(read_tree(name, read=remembering))) for name in shipped_specs()]
    return [one for one in found if all(word.casefold() in _text(one) for word in words)]


def _shipped(name: str, spec: dict[str, Any]) -> Shipped:
    blocks = {node.get("block") for node in spec["graph"].values() if isinstance(node, dict)}
    kind = "encoder-decoder" if {"encoder", "decoder"} <= blocks else "encoder" if "encoder" in blocks else "decoder"
    checkpoint = spec.get("checkpoint") or {}
    return Shipped(
        name=name,
        kind=kind,
        parameters=spec.get("parameters"),
        description=spec.get("description"),
        model_type=checkpoint.get("model_type"),
        source=spec.get("source"),
        requires=tuple(spec.get("requires") or ()),
    )


def _text(one: Shipped) -> str:
    return " ".join(filter(None, (one.name, one.kind, one.model_type, one.description, *one.requires))).casefold()
