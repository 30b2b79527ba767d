"""The specs that come with tfkit, without building anything."""

from __future__ import annotations

from dataclasses import dataclass

from tfkit.spec.load import shipped_specs, specs_folder
from tfkit.spec.source import plain, read


@dataclass(frozen=True)
class Shipped:
    """A spec that comes with tfkit."""

    name: str
    description: str | None
    source: str | None


def shipped() -> list[Shipped]:
    """Every spec that comes with tfkit, by name."""
    texts = {name: plain(read(specs_folder() / f"{name}.yaml")) for name in shipped_specs()}
    return [Shipped(name, text.get("description"), text.get("source")) for name, text in texts.items()]
