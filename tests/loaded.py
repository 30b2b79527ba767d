"""The installed plugins, loaded once for all tests of a process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cache, wraps
from typing import Any

from tfkit.plugin import discover
from tfkit.plugin.manager import COMPONENTS, Plugins


def loaded_once(load: Callable[..., Plugins]) -> Callable[..., Plugins]:
    """`load_plugins`, which loads anew where a test changes what there is to load.

    Each call has its own registry, as tests add components to theirs.
    """
    installed = discover.entry_points

    @cache
    def kept(entry_points: bool, *_: object) -> Plugins:
        found = load(entry_points=entry_points)
        found.registry.shared_names()  # which the copies then have
        return found

    @wraps(load)
    def call(*wrong: Any, **given: Any) -> Plugins:
        changed = os.environ.get(discover.PLUGIN_DIR) or discover.entry_points is not installed
        named = {name: value for name, value in given.items() if value != () and name != "entry_points"}
        if changed or named or wrong:
            return load(*wrong, **given)
        places = (os.environ.get(discover.DISABLE), sys.modules.get(COMPONENTS), *sys.path)
        found = kept(given.get("entry_points", True), *places)
        registry, hooks = copy(found.registry), copy(found.hooks)
        registry._slots = {slot: {**kinds} for slot, kinds in registry._slots.items()}
        hooks.calls = [*hooks.calls]
        return replace(found, registry=registry, hooks=hooks)

    return call
