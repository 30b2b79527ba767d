"""Fields omitted from a config.json: the default of transformers' config class applies, or an error is raised."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, TypeAlias

import transformers

from tfkit.component import ABSENT
from tfkit.errors import SpecError
from tfkit.graph.semantics import semantics_of

from .cases import earlier
from .changed_fields import NOT_THE_MODEL, quiet
from .config_mutations import Mutation, at, config_of, imported

Verdict = Literal["equal", "required", "refused", "illegal", "wrong"]
Meanings: TypeAlias = dict[str, tuple[str | None, str]]
"""Digests of models, or errors, by the text of a config.json."""


def locations_in(config: Mapping[str, Any], around: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The locations of all fields, also of those inside mappings."""
    for name, value in config.items():
        if name != "model_type" and name not in NOT_THE_MODEL:
            yield (*around, name)
            yield from locations_in(value, (*around, name)) if isinstance(value, dict) else ()


def spelt_out(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with every field, as the config class of transformers reads it."""
    fields = deepcopy(dict(config))
    with quiet():
        read = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields).to_dict()
    fields_of_model = {name: value for name, value in read.items() if name not in NOT_THE_MODEL}
    return json.loads(json.dumps({"model_type": config["model_type"], **fields_of_model}))


def verdict(name: str, location: tuple[str, ...], folder: Path, meanings: Meanings) -> tuple[Verdict, str]:
    """The outcome of a case without the field at a location, and the reason.

    `meanings` are the results of earlier locations.

    A field without a default in its family is required; otherwise the file is refused only if it is with the value
    that transformers has for the field.
    """
    config = Mutation(location, ABSENT).of(config_of(name))
    try:
        full = spelt_out(config)
    except Exception as error:  # transformers says in many ways that it cannot
        return "illegal", repr(error)
    actual, why = meaning(name, config, folder)
    if re.search(rf"\b{location[-1]}(\.\w+)?` is missing", why):
        return "required", why
    key = json.dumps(full)  # often the config of the case, whose value is the default
    if key not in meanings:
        meanings[key] = meaning(name, full, folder)
    expected, why_not = meanings[key]
    if actual != expected:
        return "wrong", why or why_not or "with all fields it is another model"
    return ("refused", why) if actual is None else ("equal", "")


def meaning(name: str, config: Mapping[str, Any], folder: Path) -> tuple[str | None, str]:
    """The digest of the model of a config.json; None if there is none, and the error."""
    try:
        return semantics_of(imported(name, config, folder)).digest, ""
    except SpecError as error:
        return None, str(error)


def outcomes(name: str, folder: Path) -> dict[str, tuple[Verdict, str]]:
    """The outcome for each field of a case that no earlier case of its family has with that value."""
    tried = [
        (location, at(config_of(other), location))
        for other in earlier(name)
        for location in locations_in(config_of(other))
    ]
    untried = [
        location for location in locations_in(config_of(name)) if (location, at(config_of(name), location)) not in tried
    ]
    meanings: Meanings = {}
    return {".".join(location): verdict(name, location, folder, meanings) for location in untried}
