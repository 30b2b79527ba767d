"""The contents of a spec: the registered components, their fields, types, defaults and docs."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Lt
from pydantic.fields import FieldInfo

from tfkit.component import Component, Config, SharedMarker, WireMarker, marker
from tfkit.plugin.registry import Registered, Registry, field_docs
from tfkit.spec.like import SAME_KEY
from tfkit.tools.show.resolved_values import text_of

NAMES = {int: "int", float: "float", str: "text", bool: "bool", type(None): "null"}


@dataclass(frozen=True)
class FieldDoc:
    """A key that a component takes. `inherited`: the enclosing mappings may provide it."""

    name: str
    type: str
    required: bool
    default: str | None
    inherited: bool
    doc: str


@dataclass(frozen=True)
class ComponentDoc:
    """A registered component."""

    slot: str
    kind: str
    doc: str
    plugin: str
    file: str
    fields: tuple[FieldDoc, ...]


def slot_doc(registry: Registry, slot: str) -> str:
    """Return the purpose of a slot: the first sentence of its base class, without the slot's name."""
    (first, *_) = registry.kinds(slot).values()
    bases = [base for base in first.config.__mro__ if issubclass(base, Component) and "slot" in vars(base)]
    sentence = re.split(r"(?<=\w\.) ", _class_doc(bases[-1]).partition("\n")[0])[0]
    sentence = sentence.partition(": ")[2] if sentence.startswith("Slot ") else sentence
    return sentence[:1].upper() + sentence[1:]


def component_doc(registered: Registered) -> ComponentDoc:
    """Describe a component and its fields, in order, without its kind, and without `same`, which replaces them."""
    config = registered.config
    docs = field_docs(config)
    named = [item for item in config.model_fields.items() if item[0] not in (config.word_key, SAME_KEY)]
    fields = [_field_doc(name, info, docs.get(name, "")) for name, info in named]
    return ComponentDoc(
        config.slot, config.kind_name(), _class_doc(config), registered.plugin, registered.file, tuple(fields)
    )


def _class_doc(config: type[Config]) -> str:
    return inspect.cleandoc(config.__doc__ or "")


def _field_doc(name: str, info: FieldInfo, doc: str) -> FieldDoc:
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    kind = extra.get("default_kind")
    required = info.is_required() and kind is None
    default = None if required else str(kind) if kind is not None else _default_text(info)
    inherited = marker(info, SharedMarker) is not None
    return FieldDoc(name, _type_text(info), required, default, inherited, doc)


def _default_text(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True, validated_data={})
    return value.kind_name() if isinstance(value, Component) else "{}" if isinstance(value, Config) else text_of(value)


def _type_text(info: FieldInfo) -> str:
    text = _annotation_text(info.annotation, marker(info, WireMarker) is not None)
    bounds = ", ".join(_bound_texts(info.metadata))
    return text.replace("int", f"int {bounds}", 1).replace("float", f"float {bounds}", 1) if bounds else text


def _annotation_text(annotation: Any, wire: bool) -> str:
    """Format a type for a reader of specs: `int > 0 or null`, `list of node`, `norm`, `none | tanh`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = ", ".join(_bound_texts(arguments[1:]))
        return f"{_annotation_text(arguments[0], wire)} {bounds}".rstrip()
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_annotation_text(argument, wire) for argument in arguments))
    if origin is Literal:
        return " | ".join(map(text_of, arguments))
    if origin in (tuple, list):
        return f"list of {_annotation_text(arguments[0], wire)}"
    if origin is dict:
        return f"mapping of {_annotation_text(arguments[1], False)}"
    if isinstance(annotation, type) and issubclass(annotation, Component):
        return annotation.slot
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return "mapping"
    return "node" if annotation is str and wire else NAMES.get(annotation, str(annotation))


def _bound_texts(metadata: Any) -> Iterator[str]:
    for item in metadata:
        for part in getattr(item, "metadata", [item]):
            if isinstance(part, Gt | Ge | Lt):
                sign, value = {Gt: (">", "gt"), Ge: (">=", "ge"), Lt: ("<", "lt")}[type(part)]
                yield f"{sign} {getattr(part, value)}"
