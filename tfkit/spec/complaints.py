"""The words for what is wrong with a spec's data: kinds, keys, types."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tfkit.component import Component, Config
from tfkit.errors import Diagnostic, Invalid, Span, closest, listing, quoted
from tfkit.plugin.manager import BUILT_IN, Plugins
from tfkit.plugin.registry import Registered
from tfkit.spec.tree import Mapping, Scalar

if TYPE_CHECKING:
    from tfkit.spec.resolve import Provenance, Shape

_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "none_required": "null",
    "finite_number": "a finite number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "a name of letters, digits, `_`, `-` and `.`",
    "string_too_long": "at most {max_length} characters",
}


def kinds_with_origin(kinds: dict[str, Registered]) -> str:
    """`gqa, mha, mla (from tfkit-mla 0.1)`."""
    return listing([k if r.plugin == BUILT_IN else f"{k} (from {r.plugin})" for k, r in sorted(kinds.items())], 20)


def unknown_kind(word: str, base: type[Component], plugins: Plugins, span: Span, path: str) -> Diagnostic:
    """The kind that a spec names fits nowhere, or in another place."""
    registry = plugins.registry
    kinds = registry.kinds(base.slot, base)
    notes = [f"known kinds: {kinds_with_origin(kinds)}"]
    elsewhere = registry.find(base.slot, word)
    if elsewhere is not None:
        message = f"{base.slot} kind {quoted(word)} {elsewhere.config.role}, and this one {base.role}"
        return Diagnostic(message, span, path, tuple(notes))
    near = closest(word, kinds)
    slots = registry.slots_of(word)
    help = f"a kind with a similar name exists: `{near}`" if near else None
    if help is None and slots:
        help = f"{quoted(word)} is a kind of the slot {listing(slots)}"
    if plugins.broken:
        notes.append(f"plugins that could not be loaded: {listing(broken.name for broken in plugins.broken)}")
    return Diagnostic(f"unknown {base.slot} kind {quoted(word)}", span, path, tuple(notes), help)


def missing_kind(slot: str, key: str, node: Mapping, kinds: dict[str, Registered]) -> tuple[str, Span]:
    """A mapping does not say which kind it is."""
    return f"which {slot}? `{key}` is missing; known kinds: {kinds_with_origin(kinds)}", node.span


def not_a_config(name: str, cls: type[Config], shape: Shape, node: Scalar) -> str:
    """A scalar stands where a mapping belongs."""
    options = ["a mapping"]
    if cls.word_key is not None:
        options.insert(0, f"the name of a {cls.word_key}")
    if shape.boolean:
        options.append("true or false")
    return f"`{name}` takes {' or '.join(options)}, not {found(node.value)}"


def unknown_key(
    key: str, cls: type[Config], missing: Collection[str], plugins: Plugins, span: Span, path: str
) -> Diagnostic:
    """A key that the config does not have; one error with the missing key it was meant to be."""
    what = f"{cls.slot} kind `{cls.kind_name()}`" if issubclass(cls, Component) else "this mapping"
    known = [name for name in cls.model_fields if name != cls.word_key]
    near = closest(key, missing) or closest(key, known)
    notes = [f"keys of {what}: {listing(known, 24)}" if known else f"{what} has no keys"]
    if near in missing:
        return Diagnostic(f"unknown key {quoted(key)}; `{near}` is missing", span, path, tuple(notes))
    help = f"a key with a similar name exists: `{near}`" if near else None
    if issubclass(cls, Component):
        owners = [k for k, r in plugins.registry.kinds(cls.slot).items() if key in r.config.model_fields]
        if owners:
            help = f"{quoted(key)} is a key of the {cls.slot} kind {listing(sorted(owners))}"
    return Diagnostic(f"unknown key {quoted(key)}", span, path, tuple(notes), help)


def found(value: object) -> str:
    """A value of a spec in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return quoted(value)
    return "a list" if isinstance(value, list | tuple) else "a mapping"


def from_pydantic(
    error: ValidationError,
    cls: type[Config],
    path: tuple[str, ...],
    node: Mapping,
    provenance: Provenance,
    unknown: Collection[str],
) -> Iterator[Diagnostic]:
    """Turn pydantic's complaints about one config into our words, one for each field."""
    by_field: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        by_field.setdefault(_place(detail, provenance, path), []).append(detail)
    for place, details in by_field.items():
        kind = details[0]["type"]
        invalid = details[0].get("ctx", {}).get("error")
        if isinstance(invalid, Invalid):
            here = (*path, *invalid.field.split(".")) if invalid.field else path
            yield Diagnostic(invalid.message, provenance.span(here), ".".join(here), invalid.notes, invalid.help)
        elif kind == "missing":
            name = str(details[0]["loc"][0])
            if closest_missing(name, unknown) is None:
                yield _missing(name, cls, path, node)
        else:
            options = list(dict.fromkeys(_expected(detail) for detail in details))
            value = details[0]["input"]
            message = f"`{place[-1]}` takes {' or '.join(options)}, not {found(value)}"
            yield Diagnostic(message, provenance.span(place), ".".join(place), help=_hint(value))


def closest_missing(name: str, unknown: Collection[str]) -> str | None:
    """The unknown key that was probably meant to be the missing `name`."""
    return next((key for key in unknown if closest(key, [name])), None)


def _missing(name: str, cls: type[Config], path: tuple[str, ...], node: Mapping) -> Diagnostic:
    what = f"{cls.slot} kind `{cls.kind_name()}`" if issubclass(cls, Component) else "this mapping"
    if not path:
        what = "a spec"
    help = cls.model_fields[name].description
    return Diagnostic(f"missing key `{name}`: {what} needs it", node.span, ".".join(path), help=_one_line(help))


def _one_line(text: str | None) -> str | None:
    return None if text is None else f"it is {text[0].lower()}{' '.join(text[1:].split()).rstrip('.')}"


def _place(detail: ErrorDetails, provenance: Provenance, path: tuple[str, ...]) -> tuple[str, ...]:
    """The path of the value that is wrong, without pydantic's own names for the members of a union."""
    place = (*path, str(detail["loc"][0])) if detail["loc"] else path
    for part in detail["loc"][1:]:
        if (*place, str(part)) in provenance.spans:
            place = (*place, str(part))
    return place


def _expected(detail: ErrorDetails) -> str:
    context: dict[str, Any] = dict(detail.get("ctx", {}))
    if detail["type"] == "literal_error":
        return str(context["expected"]).replace("'", "`")
    template = _TYPES.get(detail["type"])
    return template.format(**context) if template else detail["msg"]


def _hint(value: object) -> str | None:
    if isinstance(value, str) and value.strip("+-").replace(".", "", 1).isdigit():
        return "without quotes it is a number"
    if isinstance(value, str) and value.lower() in ("yes", "no", "on", "off"):
        return "write true or false"
    return None
