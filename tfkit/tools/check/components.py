"""The models in which a component is checked: every layout, for every pair of its options."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from tfkit.component import Component, SharedMarker, marker
from tfkit.errors import SpecError
from tfkit.plugin.manager import Plugins
from tfkit.tools.check.all_pairs import all_pairs
from tfkit.tools.check.small import LAYOUTS, NUMBER, SMALL, Layout, subjects_of
from tfkit.tools.check.subject import Subject

APART = {"field": "a config.json"}
APART |= dict.fromkeys("callback data loss metric optimizer schedule tokenizer tracker".split(), "a run")  # noqa: SIM905
"""The slots whose components are part of something else than a model."""


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
    """Return the models around a component, by their descriptions: each layout, with all pairs of option values.

    Options that it refuses together are left out. Raises SpecError if no model is left, or one is refused as it is.
    """
    models: dict[str, Subject] = {}
    refused: SpecError | None = None
    for row in all_pairs(options) or [{}]:
        values = {**(fields or {}), **row}
        for layout in within:
            try:
                subjects = subjects_of(config, plugins, fields=values, within=[layout], seed=seed, reference=reference)
            except SpecError as error:
                refused = error
            else:
                models |= {f"{name}{_words(row)}": subject for name, subject in subjects.items()}
    if refused is not None and not (models and options):
        raise refused
    return models


def options_of(config: type[Component]) -> dict[str, list[Any]]:
    """Return values of a component's fields: true and false, each of some words, or null and a value."""
    fields = {
        name: info
        for name, info in config.model_fields.items()
        if name != config.word_key and marker(info, SharedMarker) is None
    }
    options = {name: _values(name, info) for name, info in fields.items()}
    return {name: values for name, values in options.items() if len(values) > 1}


def _values(name: str, info: FieldInfo) -> list[Any]:
    """Return the values that a field takes in the models of a check; empty if it keeps its default."""
    if info.annotation is bool:
        return [False, True]
    if get_origin(info.annotation) is Literal:
        return list(get_args(info.annotation))
    if info.default is not None:
        return []
    words = [word for part in get_args(info.annotation) if get_origin(part) is Literal for word in get_args(part)]
    if words or bool in get_args(info.annotation):
        return [None, *(words or [False, True])]
    legal = (number for number in (SMALL.get(name), 0.5, NUMBER, 2.0, 1) if number is not None and _takes(info, number))
    return [None, *islice(legal, 1)]


def _takes(info: FieldInfo, value: Any) -> bool:
    """Return True if a field takes a value; the other fields of its config may still contradict it."""
    field: Any = Annotated[info.annotation, info]
    try:
        TypeAdapter(field).validate_python(value, strict=True)
    except (ValidationError, PydanticUserError):
        return False
    return True


def instead_of(config: type[Component], plugins: Plugins) -> str:
    """Return the help for a component that has no small model."""
    fields = f"`tfkit components {config.slot}` shows its fields"
    if config.slot in APART:
        return f"it is part of {APART[config.slot]}, not of a model; {fields}"
    written = re.compile(rf"\b{config.word_key}: {config.kind_name()}\b")
    files = plugins.specs.files if config.slot == "block" else {}
    name = next((name for name, file in files.items() if written.search(file.path.read_text(encoding="utf-8"))), None)
    return f"check a spec that has it: `tfkit check {name}`" if name else f"check a spec that has it; {fields}"


def _words(row: Mapping[str, Any]) -> str:
    return "".join(f", {name}: {json.dumps(value)}" for name, value in row.items())
