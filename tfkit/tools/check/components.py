"""The models in which a component is checked: every layout, for every pair of its options."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from tfkit.component import Component, SharedMarker, marker
from tfkit.errors import SpecError
from tfkit.plugin.manager import Plugins
from tfkit.tools.check.all_pairs import all_pairs
from tfkit.tools.check.small import LAYOUTS, Layout, subjects_of
from tfkit.tools.check.subject import Subject


def models_of(
    config: type[Component],
    plugins: Plugins,
    *,
    options: Mapping[str, Sequence[Any]],
    fields: Mapping[str, Any] | None = None,
    within: Sequence[Layout] = LAYOUTS,
    seed: int = 0,
    reference: Callable[..., Any] | None = None,
) -> dict[str, Subject]:
    """The models around a component, by their descriptions: in each layout, with every two values of its options.

    Options that it refuses together are left out. Raises SpecError if no model is left, or one is refused as it is.
    """
    found: dict[str, Subject] = {}
    refused: SpecError | None = None
    for row in all_pairs(options) or [{}]:
        given = {**(fields or {}), **row}
        for layout in within:
            try:
                made = subjects_of(config, plugins, fields=given, within=[layout], seed=seed, reference=reference)
            except SpecError as wrong:
                refused = wrong
            else:
                found |= {f"{name}{_words(row)}": subject for name, subject in made.items()}
    if refused is not None and not (found and options):
        raise refused
    return found


def options_of(config: type[Component]) -> dict[str, list[Any]]:
    """The values that a component's own fields may have: true and false, or one of some words."""
    found: dict[str, list[Any]] = {}
    for name, info in config.model_fields.items():
        if name == config.word_key or marker(info, SharedMarker) is not None:
            continue
        if info.annotation is bool:
            found[name] = [False, True]
        elif get_origin(info.annotation) is Literal:
            found[name] = list(get_args(info.annotation))
    return found


def _words(row: Mapping[str, Any]) -> str:
    return "".join(f", {name}: {json.dumps(value)}" for name, value in row.items())
