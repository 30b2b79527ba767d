"""The wording of errors in the kinds and values of a spec."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tfkit.component import Component, Config
from tfkit.errors import Diagnostic, Invalid, Span, SpecError, closest_name, listing, quoted, similar_name_help
from tfkit.plugin.discover import BUILT_IN
from tfkit.plugin.manager import Plugins
from tfkit.plugin.missing import where_kind_is
from tfkit.plugin.registry import Registered, last_line, written_in
from tfkit.spec.annotations import ConfigShape, allowed_values, joined_with_or
from tfkit.spec.arithmetic import ExpressionError
from tfkit.spec.extending import plugin_folders
from tfkit.spec.provenance import SET, Path, Provenance
from tfkit.spec.tree import Mapping, Node, Scalar
from tfkit.spec.tree import Sequence as ListNode

NOT_ALLOWED = frozenset(
    """int_type int_from_float int_parsing_size float_type bool_type string_type tuple_type list_type dict_type
    model_type model_attributes_type none_required finite_number greater_than greater_than_equal less_than
    less_than_equal literal_error""".split()  # noqa: SIM905
)
"""Pydantic's error types that are reported as `must be ...; got ...`."""
MAX_ERRORS = 50  # errors of one config
TYPE_TEXTS = {
    "string_pattern_mismatch": "text of letters, digits, `_`, `-` and `.`",
    "string_too_long": "text of at most {max_length} characters",
}


# ---- kinds ----


def kind_of(base: type[Component]) -> str:
    """Return the term for the kinds of a slot: `block`, or for instance `norm kind`."""
    return base.slot if base.word_key == base.slot else f"{base.slot.replace('_', ' ')} kind"


def _kind_noun(base: type[Component]) -> str:
    return base.slot if base.word_key == base.slot else "kind"


def kinds_with_origin(kinds: dict[str, Registered]) -> str:
    """List kinds, each with its plugin: `gqa, mha, mla (from tfkit-mla 0.1)`."""
    return listing([k if r.plugin == BUILT_IN else f"{k} (from {r.plugin})" for k, r in sorted(kinds.items())], 20)


def _kinds_note(base: type[Component], plugins: Plugins) -> str:
    return f"known {_kind_noun(base)}s: {kinds_with_origin(plugins.registry.kinds(base.slot, base))}"


def unknown_kind(word: str, base: type[Component], plugins: Plugins, span: Span, path: Path) -> Diagnostic:
    """Return the error for a kind that does not exist, or that belongs in a different slot."""
    registry = plugins.registry
    notes = [_kinds_note(base, plugins)]
    elsewhere = registry.find(base.slot, word)
    if elsewhere is not None:
        message = f"{base.slot} kind {quoted(word)} {elsewhere.config.role}, but the {base.slot} here {base.role}"
        return Diagnostic(message, span, ".".join(path), tuple(notes))
    slots = [slot.replace("_", " ") for slot in registry.slots_of(word)]
    help = similar_name_help(f"a {_kind_noun(base)}", word, registry.kinds(base.slot, base))
    if help is None and slots:
        help = f"{quoted(word)} is a kind of {joined_with_or([f'`{slot}`' for slot in slots])}"
    if base.word_key == base.slot != word and word in registry.slots():
        notes.append(f"`{word}` is a slot: its kinds fill a field, as `rope` does in `attention: {{position: rope}}`")
        help = f"list the kinds of the slot with `tfkit components {word}`"
    # Also if a different slot has a kind of this name.
    loaded = [plugin.name for plugin in plugins.loaded]
    help = where_kind_is(word, plugin_folders(pathlib.Path(span.source.name).parent), loaded) or help
    if plugins.broken:
        notes.append(f"plugins that could not be loaded: {listing(broken.name for broken in plugins.broken)}")
    return Diagnostic(f"unknown {kind_of(base)} {quoted(word)}", span, ".".join(path), tuple(notes), help)


def missing_kind(
    base: type[Component], node: Mapping, path: Path, plugins: Plugins, provenance: Provenance
) -> Diagnostic:
    """Return the error for a mapping without a kind. A similar key or node becomes the help."""
    key = str(base.word_key)
    siblings = [
        sibling[-1]
        for sibling in provenance.spans
        if len(sibling) == len(path) and sibling[:-1] == path[:-1] and sibling != path
    ]
    help = None
    if near := closest_name(key, node.items):
        span, help = node.keys[near], f"did you mean `{key}` by `{near}`?"
    else:
        span = provenance.span(path) or node.span
    if help is None and base.word_key == base.slot and (near := closest_name(path[-1], siblings)):
        help = f"a node with a similar name exists: `{near}`"
    noun = base.slot if base.word_key == base.slot else f"kind of {base.slot.replace('_', ' ')}"
    message = f"missing key `{key}`: which {noun} is {value_label(path)}?"
    return Diagnostic(message, span, ".".join((*path, key)), (_kinds_note(base, plugins),), help)


def not_a_config(path: Path, cls: type[Config], shape: ConfigShape, node: Node, plugins: Plugins) -> Diagnostic:
    """Return the error for a value that must be a mapping."""
    options = [f"the name of a {_kind_noun(cls)}"] if issubclass(cls, Component) else []
    if cls.word_key is not None and not options:
        options = [f"a {cls.word_key}"]
    options += ["true", "false"] if shape.boolean else []
    notes = (_kinds_note(cls, plugins),) if issubclass(cls, Component) else ()
    message = f"{value_label(path)} must be {joined_with_or([*options, 'a mapping'])}; got {spec_value_text(node)}"
    help = _value_hint(node.value, at=node.span) if isinstance(node, Scalar) else None
    return Diagnostic(message, node.span, ".".join(path), notes, help)


def no_list(path: Path, node: Node) -> tuple[str, str]:
    """Return the message and the help for a value that must be a list of configs."""
    return (
        f"{value_label(path)} must be a list; got {spec_value_text(node)}",
        f"write `{path[-1]}: [...]`, in the order of the list",
    )


def too_many(path: Path, number: int, limit: int) -> str:
    """Return the message for a list or mapping with more than `limit` items."""
    return f"{value_label(path)} must have at most {limit:,} items; got {number:,}"


def no_names(path: Path, node: Node) -> tuple[str, str]:
    """Return the message and the help for a value that must map names to configs."""
    return (
        f"{value_label(path)} must be a mapping of names; got {spec_value_text(node)}",
        "write a line `name: {...}` for each name",
    )


# ---- values ----


def value_label(path: Path) -> str:
    """Name the value at a path by its key; an item of a list by the key of the list."""
    return f"an item of `{path[-2]}`" if len(path) > 1 and path[-1].isdigit() else quoted(path[-1])


def spec_value_text(value: object) -> str:
    """Describe a value of a spec, or a node of its tree, for an error message."""
    if isinstance(value, Scalar):
        value = value.value
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return quoted(value)
    return "a list" if isinstance(value, list | tuple | ListNode) else "a mapping"


def no_value(info: FieldInfo, node: Scalar, path: Path, nested: int) -> Diagnostic:
    """Return the error for a value that the field does not accept, such as a word instead of a number."""
    words = allowed_values(info, nested=nested)
    message = f"{value_label(path)} must be {joined_with_or(words)}; got {spec_value_text(node)}"
    return Diagnostic(message, node.span, ".".join(path), help=_value_hint(node.value, words, at=node.span))


def from_pydantic(
    error: ValidationError, cls: type[Config], path: Path, provenance: Provenance, *, relations: bool
) -> Iterator[Diagnostic]:
    """Yield an error in tfkit's wording for each field of a config that pydantic rejected.

    Without `relations`, the errors of `Config.check`, which relates fields to each other, are omitted. Missing keys are
    always omitted, because the resolver reports them.
    """
    by_field: dict[Path, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        if detail["type"] != "missing" or len(detail["loc"]) > 1:
            by_field.setdefault(_value_path(detail, provenance, path), []).append(detail)
    for location, details in list(by_field.items())[:MAX_ERRORS]:
        kind = details[0]["type"]
        reason: Any = details[0].get("ctx", {}).get("error")
        if kind in ("value_error", "assertion_error") and location == path:
            if relations and kind == "assertion_error":
                yield crash_error(cls, "the check of its config", reason, path, provenance)
            elif relations:
                yield _relation_error(reason, path, provenance)
            continue
        yield _of_field(details, location, cls, path, provenance)


def _of_field(
    details: Sequence[ErrorDetails], location: Path, cls: type[Config], path: Path, provenance: Provenance
) -> Diagnostic:
    """Return the error for the value of a field of the config at `path`."""
    kind, here, span = details[0]["type"], provenance.written(location), provenance.span(location)
    reason: Any = details[0].get("ctx", {}).get("error")
    if isinstance(reason, Invalid):
        return Diagnostic(reason.message, span, ".".join(here), reason.notes, reason.help)
    if kind in NOT_ALLOWED:
        words = allowed_values(cls.model_fields[location[len(path)]], nested=len(location) - len(path) - 1)
        return _not_allowed(details, words, here, span)
    if number := _number_of_items(details):
        return Diagnostic(f"{value_label(here)} must have {number}", span, ".".join(here))
    if kind == "value_error":
        return Diagnostic(f"{value_label(here)}: {reason}", span, ".".join(here))
    if kind == "assertion_error":
        return crash_error(cls, "the check of its config", reason, location, provenance)
    takes = TYPE_TEXTS.get(kind, "").format(**details[0].get("ctx", {}))
    what = f"must be {takes}; got {spec_value_text(details[0]['input'])}" if takes else details[0]["msg"]
    return Diagnostic(f"{value_label(here)} {what}", span, ".".join(here))


def _not_allowed(details: Sequence[ErrorDetails], words: list[str], path: Path, span: Span | None) -> Diagnostic:
    """Return the error for a value outside the types and words that `words` describes."""
    value = details[0]["input"]
    real = value if all(detail["type"].startswith("int_") for detail in details) else None
    help = _value_hint(value, words, real, at=span)
    if help is None and isinstance(value, str) and any("number" in word for word in words):
        help = "write numbers and arithmetic without quotes"
    return Diagnostic(
        f"{value_label(path)} must be {joined_with_or(words)}; got {spec_value_text(value)}",
        span,
        ".".join(path),
        help=help,
    )


def _number_of_items(details: Sequence[ErrorDetails]) -> str | None:
    """Describe the required and the actual length of a list; None for all other errors."""
    kind, limits = details[0]["type"], details[0].get("ctx", {})
    if kind == "missing" and isinstance(details[0]["loc"][-1], int):  # pydantic reports each missing item separately
        length = len(details[0]["input"])
        return f"{length + len(details)} items; got {length}"
    if kind == "too_long":
        return f"at most {limits['max_length']} items; got {limits['actual_length']}"
    if kind == "too_short":
        return f"at least {limits['min_length']} items; got {limits['actual_length']}"
    return None


def _relation_error(reason: object, path: Path, provenance: Provenance) -> Diagnostic:
    """Return the error that `Config.check` raised, at a field or at the config."""
    if isinstance(reason, Invalid):
        return diagnostic_of(reason, path, provenance)
    return Diagnostic(str(reason), provenance.span(path), ".".join(path))


def diagnostic_of(reason: Invalid, path: Path, provenance: Provenance) -> Diagnostic:
    """Convert the `Invalid` that the config or block at `path` raised to an error with a location."""
    location = (*path, *reason.field.split(".")) if reason.field else path
    here = ".".join(provenance.written(location))
    return Diagnostic(reason.message, provenance.span(location), here, reason.notes, reason.help)


def crash_error(
    cls: type[Component] | type[Config], what: str, error: BaseException, path: Path, provenance: Provenance
) -> Diagnostic:
    """Return the error for a component whose code raised an exception: the plugin is at fault, not the spec."""
    cause = " ".join(str(error).split())
    notes = (f"{type(error).__name__}: {cause}".removesuffix(": "), *last_line(cls, error))
    name = f"{kind_of(cls)} `{cls.kind_name()}`" if issubclass(cls, Component) else f"`{cls.__name__}`"
    return Diagnostic(f"{name} failed in {what}", provenance.span(path), ".".join(path), notes, fault_of(cls))


def fault_in(cls: type[Component], path: Path, provenance: Provenance) -> Callable[[str, BaseException], SpecError]:
    """Return a function that converts an exception from a method of a component to a SpecError."""

    def fault(method: str, error: BaseException) -> SpecError:
        if isinstance(error, Invalid):
            return SpecError(diagnostic_of(error, path, provenance))
        return SpecError(crash_error(cls, method, error, path, provenance))

    return fault


def fault_of(cls: type[Config]) -> str:
    """Return the help for a component that violates its contract: the file to correct."""
    return f"correct the component instead of the spec: it is written in {written_in(cls)}"


def _value_path(detail: ErrorDetails, provenance: Provenance, path: Path) -> Path:
    """Return the path of the invalid value, without the names that pydantic adds for the members of a union."""
    location = (*path, str(detail["loc"][0])) if detail["loc"] else path
    for part in detail["loc"][1:]:
        if (*location, str(part)) in provenance.spans:
            location = (*location, str(part))
    return location


def _value_hint(value: object, words: Sequence[str] = (), real: object = None, *, at: Span | None = None) -> str | None:
    """Suggest the value that the author probably meant. `real` is a number where an integer belongs."""
    if isinstance(value, str) and value.strip("+-").replace(".", "", 1).isdigit():
        return f"write the number without quotes: {value}"
    if isinstance(value, str) and value.lower() in ("yes", "no", "on", "off"):
        return f"write {'true' if value.lower() in ('yes', 'on') else 'false'}"
    if isinstance(real, float) and real.is_integer():
        return f"write {int(real)}"
    if isinstance(value, str) and (near := closest_name(value, [word.strip("`") for word in words if word[0] == "`"])):
        return f"a similar word is allowed: `{near}`"
    if isinstance(value, int) and not isinstance(value, bool) and list(words[:2]) == ["true", "false"]:
        return "write true or false"
    return _empty_value_help(at) if value is None and at is not None else None


def _empty_value_help(at: Span) -> str | None:
    """Return the help for a null that was written as nothing; None if it was written as a word."""
    line = at.source.line(at.line)
    if re.match(r"null\b|~", line[at.column - 1 :], re.IGNORECASE):
        return None
    by_set = at.source.name == SET and line.partition("=")[2].strip() == ""
    return f"there is nothing after the {'`=`' if by_set else 'colon'}"


# ---- arithmetic ----


def unknown_name(name: str, numbers: Collection[str]) -> ExpressionError:
    """Return the error for a name that is not in scope. `numbers` are the names in scope whose values are numbers."""
    near = closest_name(name, numbers)
    help = f"a similar name exists: `{near}`" if near else None
    notes = (f"names: {listing(sorted(numbers))}",) if numbers else ()
    return ExpressionError(f"there is no {quoted(name)} to compute with", notes=notes, help=help)


def circle_error(names: Sequence[str]) -> ExpressionError:
    """Return the error for values that are computed from each other. `names` is the cycle."""
    way = f": {' -> '.join(names)}" if len(names) > 2 else ""
    error = ExpressionError(f"a value cannot be computed from itself{way}")
    error.circle = tuple(sorted(set(names)))
    return error


def expression_span(span: Span, text: str, columns: tuple[int, int] | None) -> Span:
    """Narrow the span of an expression to the columns of an operand, if the expression is on one line of the source."""
    line = span.source.line(span.line)
    if columns is None or line[span.column - 1 : span.column - 1 + len(text)] != text:
        return span
    return Span(span.source, span.line, span.column + columns[0], columns[1] - columns[0])
