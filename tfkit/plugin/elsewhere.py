"""The specs of tfkit's own plugins by name, to say for one that is not there which plugin to get: `elsewhere.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def specs() -> Mapping[str, Mapping[str, str]]:
    """Return each plugin's specs by name, each with the model type of its family, or an empty text."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def names() -> list[str]:
    """Return the names of all these specs."""
    return [name for models in specs().values() for name in models]


def plugin_of(name: str) -> str | None:
    """Return the plugin that has a spec of that name."""
    return next((plugin for plugin, models in specs().items() if name in models), None)


def plugin_of_family(model_type: str) -> str | None:
    """Return the plugin that has the family of a model type."""
    return next((plugin for plugin, models in specs().items() if model_type in models.values()), None)
