"""JSON Schema (draft 2020-12) of the spec language and all installed plugins, for completion and checks in editors.

The schema checks fields independently; only the loader checks relations between fields. Every mapping has two
definitions: the complete mapping, and its changes (with the prefix `changes.`), in which no key is required. Layer
variants and specs with `extends` use the changes.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.fields import FieldInfo

from tfkit.component import BlockConfig, Component, Config, PatchMarker, SharedMarker, marker
from tfkit.plugin.discover import BUILT_IN
from tfkit.plugin.manager import Plugins
from tfkit.plugin.registry import Registered, field_docs
from tfkit.spec.annotations import ConfigShape, numbers_and_words, shape_of, slot_setting
from tfkit.spec.document import MODEL, Document
from tfkit.spec.like import LIKE, SAME_KEY
from tfkit.spec.model_spec import ModelSpec

Schema = dict[str, Any]

DRAFT = "https://json-schema.org/draft/2020-12/schema"
CHANGES = "changes."
NAME = r"^(?!.*_mask$)[A-Za-z][A-Za-z0-9_]*$"  # as the graph checks it: an identifier
EMPTY_SLOT = {"enum": [None, False, "none"], "description": "Nothing: the slot stays empty."}
SHARED_DESCRIPTION = "Inherited from the enclosing mappings of the spec if it is not given."
MIN_SHARED = 60  # length in characters below which a reference would not be shorter than the field
ARITHMETIC = {"$ref": "#/$defs/arithmetic"}  # as `reference_to` writes it
LIKE_NODE = {LIKE: {"type": ["string", "null"], "description": "The node whose keys are defaults, except its wires."}}
TEXTS = ("title", "description", "markdownDescription")


def json_schema(plugins: Plugins) -> Schema:
    """Return the schema of a spec as plain data. Its order depends only on the plugins."""
    language = SchemaWriter(plugins)
    complete, changes = language.spec(partial=False), language.spec(partial=True)
    return language.schema("spec", "A transformer as tfkit reads it", complete, changes, language.arithmetic())


def document_schema(document: type[Document], plugins: Plugins) -> Schema:
    """Return the schema of a type of document, as `json_schema` does for a spec."""
    writer, sort = SchemaWriter(plugins), document.sort
    complete, changes = writer.document(document, partial=False), writer.document(document, partial=True)
    arithmetic = writer.arithmetic(*document.arithmetic_names)
    return writer.schema(sort, f"A {sort} as tfkit reads it", complete, changes, arithmetic)


class SchemaWriter:
    """Writes a definition for each config and each slot that a spec can contain."""

    def __init__(self, plugins: Plugins) -> None:
        self.registry = plugins.registry
        self.defs: dict[str, Schema] = {}
        self.configs: dict[str, type[Config]] = {}

    def schema(self, name: str, title: str, complete: Schema, changes: Schema, arithmetic: Schema) -> Schema:
        """Return the schema of a complete document or, if it extends another, of its changes."""
        definitions = {name: complete, f"{CHANGES}{name}": changes, "arithmetic": arithmetic, **self.defs}
        return {
            "$schema": DRAFT,
            "title": title,
            "type": "object",
            "if": {"required": ["extends"]},
            "then": reference_to(f"{CHANGES}{name}"),
            "else": reference_to(name),
            "$defs": dict(sorted(with_fields_once(with_type_choices(definitions)).items())),
        }

    def document(self, document: type[Document], *, partial: bool) -> Schema:
        """Return the schema of the top of a document: its fields and its model, which may omit name and version."""
        self.defs.setdefault(f"{CHANGES}spec", self.spec(partial=True))
        mapping = self.mapping(document, partial=partial)
        properties = mapping["properties"]
        about = "The model: the name or path of a spec, or a spec in place."
        properties[MODEL] = {"description": about, **any_of([{"type": "string"}, reference_to(f"{CHANGES}spec")])}
        for name in document.listed_keys:
            items = properties[name].pop("items")
            properties[name] = {**about_of(properties[name]), **any_of([items, {"type": "array", "items": items}])}
        about = f"The {document.sort}, by path or name, that this one changes."
        properties["extends"] = {"type": "string", "description": about}
        if not partial:
            mapping["required"] = [*mapping["required"], MODEL]
        return mapping

    def spec(self, *, partial: bool) -> Schema:
        """Return the schema of the top of a spec: its fields, and the shared fields."""
        mapping = self.mapping(ModelSpec, partial=partial)
        properties = mapping["properties"]
        for part in ("inputs", "graph"):
            properties[part]["propertyNames"] = {"pattern": NAME}
        names = {"type": "array", "items": {"type": "string", "pattern": NAME}, "uniqueItems": True}
        inputs = properties.pop("inputs")
        properties["inputs"] = {**about_of(inputs), "anyOf": [names, _without_descriptions(inputs)]}
        shared = sorted(self.registry.shared_names() - set(ModelSpec.model_fields))
        properties |= {name: self._shared(name, partial=partial) for name in shared}
        about = "The spec, by path or bare name, that this one changes."
        properties["extends"] = {"type": "string", "description": about}
        if partial:  # null removes what is inherited
            for name in properties.keys() - {"tfkit", "name", "extends"}:
                properties[name] = {
                    **about_of(properties[name]),
                    "anyOf": [_without_descriptions(properties[name]), {"type": "null"}],
                }
        return mapping

    def arithmetic(self, *further: str) -> Schema:
        """Return the schema of arithmetic: names of numbers, literals and operators."""
        fields = [field for config in self.configs.values() for field in config.model_fields.items()]
        names = "|".join(sorted({*further, *(name for name, info in fields if numbers_and_words(info.annotation)[0])}))
        return {
            "pattern": rf"^(?!\s*[\d.]+\s*$)(?:[\s\d.()+*/%-]|\d[eE]|\b(?:{names})\b)+$",
            "patternErrorMessage": "Neither a number nor arithmetic over the spec's own fields.",
            "maxLength": 200,
            "description": "Arithmetic over the spec's own fields, such as d_head ** -0.5.",
        }

    def _shared(self, name: str, *, partial: bool) -> Schema:
        """Return the schema of a shared key: the values that fields of this name accept, anywhere in a spec."""
        options: list[Schema] = []
        users: set[str] = set()
        for _, config in sorted(self.configs.items()):
            info = config.model_fields.get(name)
            if info is None or marker(info, SharedMarker) is None:
                continue
            bare = _without_descriptions(self._field(config, name, info, partial=partial))
            options += [option for option in bare.get("anyOf", [bare]) if option not in options]
            users |= {config.slot} if issubclass(config, Component) else set()
        about = f"Shared by every component that takes it: {', '.join(sorted(users))}."
        return {**_description_keys(about), **any_of(options)}

    def _config(self, config: type[Config], *, partial: bool, name: str, about: str = "") -> Schema:
        """Return a reference to the definition of a config's mapping."""
        if self.configs.setdefault(name, config) is not config:
            name = f"{config.__module__}.{config.__qualname__}"
            self.configs[name] = config
        key = f"{CHANGES}{name}" if partial else name
        if key not in self.defs:
            self.defs[key] = {}  # ends the recursion: its fields may contain it
            self.defs[key] |= {"title": name, **self.mapping(config, partial=partial), **_description_keys(about)}
        return reference_to(key)

    def mapping(self, config: type[Config], *, partial: bool) -> Schema:
        fields = config.model_fields
        first = [name for name in (config.word_key,) if name in fields]
        properties = {
            name: self._field(config, name, fields[name], partial=partial) for name in dict.fromkeys([*first, *fields])
        }
        properties |= LIKE_NODE if issubclass(config, BlockConfig) else {}
        required = [] if partial else _required_fields(config)
        return {
            **_description_keys(inspect.cleandoc(config.__doc__ or "")),
            "type": "object",
            "properties": properties,
            "additionalProperties": False,
            **({"required": required} if required else {}),
        }

    def _field(self, config: type[Config], name: str, info: FieldInfo, *, partial: bool) -> Schema:
        text = " ".join(
            filter(None, [field_docs(config).get(name), SHARED_DESCRIPTION if marker(info, SharedMarker) else None])
        )
        shape = shape_of(info.annotation)
        if name == config.word_key and issubclass(config, Component):
            return {**_description_keys(text), "const": config.kind_name()}
        removable = partial and issubclass(config, ModelSpec)
        if shape is None:
            plain = _plain_schema(config, name)
            return {**_description_keys(text), **(_with_null_entries(plain) if removable else plain)}
        default = slot_setting(info, "default_kind")
        options = self._configs(
            shape,
            implied=slot_setting(info, "implied_kind") or default,
            partial=partial or marker(info, PatchMarker) is not None,
        )
        options = _with_null_entries(options) if removable else options
        return {**_description_keys(text), **({"default": default} if default else {}), **options}

    def _configs(self, shape: ConfigShape, *, implied: str | None, partial: bool) -> Schema:
        # A list in a change replaces the previous list, so its items are complete.
        options = self._alternatives(shape.config, implied, partial=partial and shape.container != "list")
        if shape.container == "list":
            options = [{"type": "array", "items": any_of(options)}]
        elif shape.container == "dict":
            options = [{"type": "object", "additionalProperties": any_of(options)}]
        options += [{"type": "boolean"}] if shape.boolean else []
        options += [EMPTY_SLOT] if shape.null and shape.container == "one" else []
        options += [{"type": "null"}] if shape.null and shape.container != "one" else []
        return any_of(options)

    def _alternatives(self, config: type[Config], implied: str | None, *, partial: bool) -> list[Schema]:
        """Return the alternatives for one config: a mapping, or a single word."""
        if issubclass(config, Component):
            kinds = self.registry.kinds(config.slot, config)
            words = {
                kind: _about_kind(registered)
                for kind, registered in kinds.items()
                if not _required_fields(registered.config)
            }
            listed = [{"enum": list(words), "enumDescriptions": list(words.values())}] if words else []
            return [*listed, self._slot(config, implied if implied in kinds else None, partial=partial)]
        options = [self._config(config, partial=partial, name=config.__name__.removesuffix("Config"))]
        return [self._word(config, config.word_key), *options] if config.word_key else options

    def _word(self, config: type[Config], key: str) -> Schema:
        """Return the schema of a word that replaces a mapping: a kind, or the value of its field `key`."""
        info = config.model_fields[key]
        if shape_of(info.annotation) is None:
            return _plain_schema(config, key)
        return {"type": "string", **_without_descriptions(self._field(config, key, info, partial=False))}

    def _slot(self, base: type[Component], implied: str | None, *, partial: bool) -> Schema:
        """Return a reference to the definition of a slot's mapping, restricted to the kinds that `base` takes.

        The kind determines the keys. A mapping without a kind has the `implied` kind; in a change, any kind.
        """
        name = base.slot if "slot" in vars(base) else f"{base.slot}.{base.__name__.removesuffix('Config')}"
        key = f"{CHANGES}{name}" if partial else f"{name}.or.{implied}" if implied else name
        if key not in self.defs:
            self.defs[key] = {}  # ends the recursion: its fields may contain it
            self.defs[key] |= {"title": name, **_description_keys(inspect.cleandoc(base.__doc__ or ""))}
            self.defs[key] |= self._mapping_of(base, name, implied, partial=partial)
        return reference_to(key)

    def _mapping_of(self, base: type[Component], name: str, implied: str | None, *, partial: bool) -> Schema:
        kinds, word = self.registry.kinds(base.slot, base), str(base.word_key)
        named = {"required": [word]}
        if implied and not partial:
            complete, alone = self._slot(base, None, partial=False), self._kind(kinds[implied], partial=False)
            return {"type": "object", "if": named, "then": complete, "else": alone}
        cases = [
            {"if": {"properties": {word: {"const": kind}}, **named}, "then": self._kind(registered, partial=partial)}
            for kind, registered in kinds.items()
        ]
        if partial:
            cases.append({"if": named, "else": self._of_some_kind(kinds.values(), name)})
        elif base.slot == BlockConfig.slot:
            changes = self._slot(base, None, partial=True)
            based = {"anyOf": [{"required": [LIKE]}, {"required": [SAME_KEY]}]}
            cases = [{"if": based, "then": changes, "else": {**named, "allOf": cases}}]
            named = {}
        return {
            "type": "object",
            "properties": {word: {"enum": list(kinds)}},
            **({} if partial else named),
            **({"allOf": cases} if cases else {}),
        }

    def _of_some_kind(self, kinds: Iterable[Registered], name: str) -> Schema:
        """Return a reference to the definition of a change without a kind, which may have the keys of all kinds."""
        key = f"{CHANGES}{name}.any"
        self.defs[key] = {}
        fields: dict[str, list[Schema]] = {}
        for registered in kinds:
            for field, info in registered.config.model_fields.items():
                schema = self._field(registered.config, field, info, partial=True)
                if field != registered.config.word_key and schema not in fields.setdefault(field, []):
                    fields[field].append(schema)
        properties = {
            field: {**about_of(schemas[0]), **any_of(map(_without_descriptions, schemas))}
            for field, schemas in fields.items()
        } | (LIKE_NODE if name == BlockConfig.slot else {})
        self.defs[key] |= {"type": "object", "properties": properties, "additionalProperties": False}
        return reference_to(key)

    def _kind(self, registered: Registered, *, partial: bool) -> Schema:
        name = f"{registered.config.slot}.{registered.config.kind_name()}"
        return self._config(registered.config, partial=partial, name=name, about=_about_kind(registered))


def _with_null_entries(schema: Schema) -> Schema:
    """Allow null for the entries of a mapping of names to configs: it removes the entry that the base has."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [_with_null_entries(option) for option in schema["anyOf"]]}
    if not isinstance(schema.get("additionalProperties"), dict):
        return schema
    return {**schema, "additionalProperties": any_of([schema["additionalProperties"], {"type": "null"}])}


def _required_fields(config: type[Config]) -> list[str]:
    """Return the required fields of a mapping: fields without a default that cannot be inherited."""
    return [
        name
        for name, info in config.model_fields.items()
        if info.is_required() and marker(info, SharedMarker) is None and slot_setting(info, "default_kind") is None
    ]


def _plain_schema(config: type[Config], name: str) -> Schema:
    """Return the schema of a field without configs, which allows arithmetic for numbers."""
    schema = _without_descriptions(_pydantic_properties(config).get(name, {}), "default")
    return _with_arithmetic(schema) if numbers_and_words(config.model_fields[name].annotation)[0] else schema


@cache
def _pydantic_properties(config: type[Config]) -> Schema:
    try:
        properties: Schema = config.model_json_schema().get("properties", {})
        return properties
    except PydanticInvalidForJsonSchema:  # a field of a type that a plugin defines
        return {}


def _with_arithmetic(schema: Schema) -> Schema:
    if schema.get("type") in ("integer", "number"):
        default = {"default": schema["default"]} if "default" in schema else {}
        return {**default, **any_of([_without_descriptions(schema), reference_to("arithmetic")])}
    if "anyOf" in schema:
        options = [_with_arithmetic(option) for option in schema["anyOf"]]
        return {**schema, "anyOf": [alternative for option in options for alternative in option.get("anyOf", [option])]}
    if isinstance(schema.get("additionalProperties"), dict):
        return {**schema, "additionalProperties": _with_arithmetic(schema["additionalProperties"])}
    return schema


ABOUT = ("title", "description", "markdownDescription", "default")


def _without_descriptions(schema: Schema, *keep: str) -> Schema:
    """Return a schema without its descriptions, except the keys `keep`."""
    return {key: value for key, value in schema.items() if key not in ABOUT or key in keep}


def about_of(schema: Schema) -> Schema:
    """Return the descriptions of a schema."""
    return {key: value for key, value in schema.items() if key in ABOUT}


def _about_kind(registered: Registered) -> str:
    text = inspect.cleandoc(registered.config.__doc__ or "")
    return text if registered.plugin == BUILT_IN else f"{text} (from {registered.plugin})".strip()


def _description_keys(text: str) -> Schema:
    """Return the two keys of a description: plain text, and Markdown for editors that render it."""
    if not text:
        return {}
    return {"description": text, **({"markdownDescription": text} if "`" in text else {})}


# ---- the form of a schema: alternatives that are distinguished by type, and equal fields that are written once ----
#
# For a value that matches no alternative, an editor reports `not valid under any of the given schemas`, and not the
# invalid key. If the alternatives have different types, the type of the value selects one of them.


def any_of(options: Iterable[Schema]) -> Schema:
    """Return the schema of a value that matches any of `options`."""
    schemas = list(options)
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas} if schemas else {}


def reference_to(name: str) -> Schema:
    """Return a reference to the definition `name`."""
    return {"$ref": f"#/$defs/{name}"}


def with_type_choices(schema: Any) -> Any:
    """Replace every `anyOf` in a schema by a choice by type, where possible."""
    if isinstance(schema, list):
        return [with_type_choices(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    decided = {key: with_type_choices(part) for key, part in schema.items() if key != "anyOf"}
    return (
        {**decided, **_choice_by_type(with_type_choices(_flat_options(schema["anyOf"])))}
        if "anyOf" in schema
        else decided
    )


def with_fields_once(defs: Mapping[str, Schema]) -> dict[str, Schema]:
    """Move each field that occurs several times into a separate definition."""
    fields = [
        (name, json.dumps(schema)) for part in defs.values() for name, schema in part.get("properties", {}).items()
    ]
    names: dict[str, str] = {}
    taken: Counter[str] = Counter()
    for (name, text), count in Counter(fields).items():
        if count > 1 and len(text) >= MIN_SHARED and text not in names:
            taken[name] += 1
            names[text] = f"field.{name}" if taken[name] == 1 else f"field.{name}.{taken[name]}"
    shared = {name: json.loads(text) for text, name in names.items()}
    return {**{name: _with_references(part, names) for name, part in defs.items()}, **shared}


def _with_references(part: Schema, names: Mapping[str, str]) -> Schema:
    if "properties" not in part:
        return part
    keys = {name: (names.get(json.dumps(schema)), schema) for name, schema in part["properties"].items()}
    properties = {name: reference_to(key) if key else schema for name, (key, schema) in keys.items()}
    return {**part, "properties": properties}


def _flat_options(options: Iterable[Schema]) -> list[Schema]:
    """Flatten nested alternatives and remove duplicates."""
    alternatives: list[Schema] = []
    for option in options:
        inner = _flat_options(option["anyOf"]) if option.keys() - TEXTS == {"anyOf"} else [option]
        alternatives += [option_schema for option_schema in inner if option_schema not in alternatives]
    return alternatives


def _choice_by_type(options: list[Schema]) -> Schema:
    parts: dict[str, list[Schema]] = {"object": [], "array": [], "string": [], "": []}
    for option in options:
        for kind, alternative in _by_type(option):
            parts[kind].append(alternative)
    merged = {
        kind: _merged_strings(schemas) if kind == "string" else _merged_options(schemas)
        for kind, schemas in parts.items()
        if schemas
    }
    if merged.get("string") == ARITHMETIC and "type" in merged.get("", {}):
        merged[""] = {**_with_types(merged.pop(""), ["string"]), **merged.pop("string")}
    *first, last = merged.items()
    schema = _with_types(last[1], [kind for kind, _ in first])
    for kind, alternative in reversed(first):
        schema = {"if": {"type": kind}, "then": alternative, "else": schema}
    return schema


def _by_type(option: Schema) -> list[tuple[str, Schema]]:
    """Return an alternative with the type of its values, split in two if it lists values of several types."""
    if "enum" in option:
        words = [value for value in option["enum"] if isinstance(value, str)]
        rest = [value for value in option["enum"] if not isinstance(value, str)]
        split = [("string", {**option, "enum": words})] if words else []
        return [*split, ("", {"enum": rest})] if rest else split
    if "const" in option:
        return [("string" if isinstance(option["const"], str) else "", option)]
    if "$ref" in option:
        return [("string" if option == ARITHMETIC else "object", option)]
    kind = option.get("type")
    return [(kind if kind in ("object", "array", "string") else "", option)]


def _merged_strings(options: list[Schema]) -> Schema:
    """Merge lists of words and their descriptions into one, followed by the remaining alternatives of type string."""
    words: dict[str, str] = {}
    for option in options:
        about = option.get("enumDescriptions") or [option.get("description", "")] * len(option.get("enum", []))
        words |= dict(zip(option.get("enum", []), about, strict=True))
    listed: Schema = {"enum": list(words)}
    if any(words.values()):
        listed["enumDescriptions"] = list(words.values())
    rest = [option for option in options if "enum" not in option]
    return _merged_options([listed, *rest] if words else rest)


def _merged_options(options: list[Schema]) -> Schema:
    """Merge alternatives of similar types if all except the first restrict only the type."""
    if {"type": "boolean"} in options:  # takes the false of "nothing"
        options = [{"type": "null"} if option == {"enum": [None, False]} else option for option in options]
    if len(options) == 1:
        return options[0]
    limited = [option for option in options if option.keys() != {"type"}]
    if len(limited) > 1 or any("type" not in option or "enum" in option for option in options):
        return {"anyOf": options}
    return {**(limited or options)[0], "type": list(dict.fromkeys(option["type"] for option in options))}


def _with_types(schema: Schema, types: list[str]) -> Schema:
    """Let a schema also accept `types`, which a different alternative checks."""
    if "type" not in schema or "enum" in schema or not types:
        return schema
    present = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {**schema, "type": list(dict.fromkeys([*present, *types]))}
