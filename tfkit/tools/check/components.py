"""The models in which a component is checked: every layout, for every pair of its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from tfkit.component import Component, SharedMarker, marker
from tfkit.errors import SpecError
from tfkit.plugin.manager import Plugins
from tfkit.spec.messages import kind_of
from tfkit.tools.check.all_pairs import all_pairs
from tfkit.tools.check.small import LAYOUTS, subjects_of
from tfkit.tools.check.subject import Subject


def models_of(config: type[Component], plugins: Plugins, seed: int) -> list[tuple[Subject, str]]:
    """The models around a component, with their descriptions. Options that the component refuses together are left out.

    Raises SpecError if there are none.
    """
    found: list[tuple[Subject, str]] = []
    refused: SpecError | None = None
    for fields in all_pairs(options_of(config)) or [{}]:
        for layout in LAYOUTS if config.slot != "init" else LAYOUTS[:1]:
            try:
                made = subjects_of(config, plugins, fields=fields, within=[layout], seed=seed)
            except SpecError as wrong:
                refused = wrong
            else:
                found += [(subject, _words(config, fields, name)) for name, subject in made.items()]
    if not found:
        assert refused is not None
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


def _words(config: type[Component], fields: Mapping[str, Any], layout: str) -> str:
    given = "".join(f", {name}: {str(value).lower()}" for name, value in fields.items())
    return f"{kind_of(config)} `{config.kind_name()}` in {layout}{given}"
