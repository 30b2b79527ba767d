"""The form of a JSON Schema: alternatives that are told apart by type, and equal fields that are written once.

A value that fits none of several alternatives is `not valid under any of the given schemas`, without a word about the
wrong key. Alternatives of different types need no guess: a mapping is meant as the mapping among them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

Schema = dict[str, Any]

LEAST_SHARED = 60  # characters below which a field is written out: a reference is no shorter
ARITHMETIC = {"$ref": "#/$defs/arithmetic"}  # as `ref` writes it
TEXTS = ("title", "description", "markdownDescription")


def any_of(options: Iterable[Schema]) -> Schema:
    """Return the schema of a value that fits any of these."""
    schemas = list(options)
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas} if schemas else {}


def ref(name: str) -> Schema:
    """Return a reference to the definition of that name."""
    return {"$ref": f"#/$defs/{name}"}


def told_apart(schema: Any) -> Any:
    """Return the schema with every `anyOf` in it decided by type, where that is possible."""
    if isinstance(schema, list):
        return [told_apart(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    decided = {key: told_apart(part) for key, part in schema.items() if key != "anyOf"}
    return {**decided, **_alternatives(told_apart(_flat(schema["anyOf"])))} if "anyOf" in schema else decided


def with_fields_once(defs: Mapping[str, Schema]) -> dict[str, Schema]:
    """Move each field that occurs several times into a separate definition."""
    fields = [
        (name, json.dumps(schema)) for part in defs.values() for name, schema in part.get("properties", {}).items()
    ]
    names: dict[str, str] = {}
    taken: Counter[str] = Counter()
    for (name, text), count in Counter(fields).items():
        if count > 1 and len(text) >= LEAST_SHARED and text not in names:
            taken[name] += 1
            names[text] = f"field.{name}" if taken[name] == 1 else f"field.{name}.{taken[name]}"
    shared = {name: json.loads(text) for text, name in names.items()}
    return {**{name: _with_references(part, names) for name, part in defs.items()}, **shared}


def _with_references(part: Schema, names: Mapping[str, str]) -> Schema:
    if "properties" not in part:
        return part
    keys = {name: (names.get(json.dumps(schema)), schema) for name, schema in part["properties"].items()}
    properties = {name: ref(key) if key else schema for name, (key, schema) in keys.items()}
    return {**part, "properties": properties}


def _flat(options: Iterable[Schema]) -> list[Schema]:
    """Flatten nested alternatives and remove duplicates."""
    alternatives: list[Schema] = []
    for option in options:
        inner = _flat(option["anyOf"]) if option.keys() - TEXTS == {"anyOf"} else [option]
        alternatives += [option_schema for option_schema in inner if option_schema not in alternatives]
    return alternatives


def _alternatives(options: list[Schema]) -> Schema:
    parts: dict[str, list[Schema]] = {"object": [], "array": [], "string": [], "": []}
    for option in options:
        for kind, alternative in _by_type(option):
            parts[kind].append(alternative)
    merged = {
        kind: _strings(schemas) if kind == "string" else _merged(schemas) for kind, schemas in parts.items() if schemas
    }
    if merged.get("string") == ARITHMETIC and "type" in merged.get("", {}):
        merged[""] = {**_widened(merged.pop(""), ["string"]), **merged.pop("string")}
    *first, last = merged.items()
    schema = _widened(last[1], [kind for kind, _ in first])
    for kind, alternative in reversed(first):
        schema = {"if": {"type": kind}, "then": alternative, "else": schema}
    return schema


def _by_type(option: Schema) -> list[tuple[str, Schema]]:
    """Return an alternative by the type of its values, split in two if it lists values of several types."""
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


def _strings(options: list[Schema]) -> Schema:
    """Merge words into one list with their descriptions, followed by any other strings."""
    words: dict[str, str] = {}
    for option in options:
        about = option.get("enumDescriptions") or [option.get("description", "")] * len(option.get("enum", []))
        words |= dict(zip(option.get("enum", []), about, strict=True))
    listed: Schema = {"enum": list(words)}
    if any(words.values()):
        listed["enumDescriptions"] = list(words.values())
    rest = [option for option in options if "enum" not in option]
    return _merged([listed, *rest] if words else rest)


def _merged(options: list[Schema]) -> Schema:
    """Merge alternatives of similar types, if at most the first of them restricts more than its type."""
    if {"type": "boolean"} in options:  # takes the false of "nothing"
        options = [{"type": "null"} if option == {"enum": [None, False]} else option for option in options]
    if len(options) == 1:
        return options[0]
    limited = [option for option in options if option.keys() != {"type"}]
    if len(limited) > 1 or any("type" not in option or "enum" in option for option in options):
        return {"anyOf": options}
    return {**(limited or options)[0], "type": list(dict.fromkeys(option["type"] for option in options))}


def _widened(schema: Schema, types: list[str]) -> Schema:
    """Add types that a different alternative decides to a schema."""
    if "type" not in schema or "enum" in schema or not types:
        return schema
    present = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {**schema, "type": list(dict.fromkeys([*present, *types]))}
