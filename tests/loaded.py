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
from tfkit.plugin.manager import Plugins


def loaded_once(load: Callable[..., Plugins]) -> Callable[..., Plugins]:
    """`load_plugins`, which loads anew where a test changes what there is to load.

    Each call has its own registry, as tests add components to theirs.
    """
    installed = discover.entry_points

    @cache
    def cached_plugins(entry_points: bool, *_: object) -> Plugins:
        actual = load(entry_points=entry_points)
        actual.registry.shared_names()  # which the copies then have
        return actual

    @wraps(load)
    def call(*invalid: Any, **options: Any) -> Plugins:
        changed = os.environ.get(discover.PLUGIN_DIR) or discover.entry_points is not installed
        named = {name: value for name, value in options.items() if value != () and name != "entry_points"}
        if changed or named or invalid:
            return load(*invalid, **options)
        key = (os.environ.get(discover.DISABLE), sys.modules.get("tfkit.components"), *sys.path)
        actual = cached_plugins(options.get("entry_points", True), *key)
        registry, hooks = copy(actual.registry), copy(actual.hooks)
        registry._slots = {slot: {**kinds} for slot, kinds in registry._slots.items()}
        hooks.calls = [*hooks.calls]
        return replace(actual, registry=registry, hooks=hooks)

    return call
