"""The config of the text model that a model of images or sound contains, from the config.json of that model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tfkit.checkpoint.config_json import FILE_FIELDS, OF_TEXT, TEXT, TIED, text_config_in, text_fields
from tfkit.component import case_of
from tfkit.errors import Diagnostic, SpecError, listing, quoted
from tfkit.spec.families import FamilyConfig, class_of, expanded_names
from tfkit.spec.folder import has_weights
from tfkit.spec.merge import is_null
from tfkit.spec.source import plain_data
from tfkit.spec.tree import Mapping, node_of

_HEAD = re.compile(r"(?:For(?:Sequence|Token)Classification|ForQuestionAnswering|Model)$")
"""Matches the heads for text of the classes that contain text models."""


def text_config(config: Mapping, family: FamilyConfig, folder: Path) -> Mapping:
    """Return the config of the text model, with the fields around it that apply to it, and the class of its head.

    If no field around it states whether the output matrix is tied, the weights in the folder decide.
    """
    inner = _inner(config)
    around = {name: value for name, value in config.items.items() if not is_null(value)}
    if TIED not in family.fields:
        around.pop(TIED, None)
    elif TIED not in around and (tied := _is_tied(family, folder)) is not None:
        around[TIED] = node_of(tied, inner.span)
    fixed = {**family.inside.get(_type_of(config), {}), "architectures": _classes(config, family)}
    items = text_fields(inner.items, around) | {name: node_of(value, inner.span) for name, value in fixed.items()}
    spans = {**dict.fromkeys(items, inner.span), **config.keys, **inner.keys}
    return Mapping(items, {name: spans[name] for name in items}, inner.span)


def with_tie_of_weights(config: Mapping, family: FamilyConfig, folder: Path) -> Mapping:
    """Add whether the output matrix is tied to a config that does not state it; the weights in the folder decide."""
    stated = TIED in config.items or TIED not in family.fields
    tied = None if stated else _is_tied(family, folder)
    if tied is None:
        return config
    return Mapping({**config.items, TIED: node_of(tied, config.span)}, {**config.keys, TIED: config.span}, config.span)


def text_family(config: Mapping, family: FamilyConfig) -> FamilyConfig:
    """Return the family with the defaults of the class of a text model, of which a `text_config` omits many."""
    defaults = family.text_types.get(_type_of(_inner(config)), {})
    return family.model_copy(update={"defaults": {**family.defaults, **defaults}})


def fields_left_out(config: Mapping) -> tuple[str, ...]:
    """Return the fields of a config.json that do not apply to its text model."""
    inner = {TEXT} if TEXT in config.items else _inner(config).items.keys()
    return tuple(name for name in config.items if name not in OF_TEXT | FILE_FIELDS | inner)


def text_model_notes(config: Mapping, family: FamilyConfig) -> Iterator[Diagnostic]:
    """Yield the note that a spec is only the text model of a config.json, and notes on the values of the class."""
    model_type, inner = _type_of(config), _inner(config)
    message = f"the spec is only the text model of {quoted(model_type)}, of type {quoted(family.model_type)}"
    yield Diagnostic(message, notes=(f"fields that it omits: {listing(fields_left_out(config), 20)}",))
    for name, value in family.inside.get(model_type, {}).items():
        stated = plain_data(inner.items[name]) if name in inner.items else family.defaults.get(name)
        if stated != value:
            message = f"the class of {quoted(model_type)} computes with {quoted(f'{name}: {case_of(value)}')}"
            note = f"the spec has this value; {TEXT} states {quoted(case_of(stated))}"
            yield Diagnostic(message, inner.keys.get(name, inner.span), f"{TEXT}.{name}", notes=(note,))


def _inner(config: Mapping) -> Mapping:
    inner = text_config_in(config.items)
    return inner if isinstance(inner, Mapping) else Mapping(inner, config.keys, config.span)


def _type_of(config: Mapping) -> str:
    return str(plain_data(config.items.get("model_type", node_of(None, config.span))))


def _classes(config: Mapping, family: FamilyConfig) -> list[str]:
    """Return the class of the text model with the head of the class around it; empty for the default head."""
    classes = plain_data(config.items.get("architectures", node_of(None, config.span)))
    names = classes if isinstance(classes, list) else []
    words = [match[0] for name in names if (match := _HEAD.search(str(name)))]
    heads = [head for word in words for head in (f"Text{word}", word) if head in family.heads or head == word]
    return [class_of(heads[0], family.architecture)] if heads else []


def _is_tied(family: FamilyConfig, folder: Path) -> bool | None:
    """Return False if the weights in a folder contain the output matrix; None without weights."""
    if not has_weights(folder):
        return None
    from tfkit.checkpoint.files import TensorFiles
    from tfkit.checkpoint.fitting import map_without_model

    texts = [text for text in family.tensors.values() if isinstance(text, str)]
    modules = {family.in_file(name) for text in texts for name in expanded_names(text)}
    with suppress(SpecError), TensorFiles.open(folder) as opened:
        names = zip(family.copies, map_without_model(family, opened.names).copies, strict=True)
        return not any(stored in opened.names for name, stored in names if name.rpartition(".")[0] in modules)
    return None
