"""Writing a resolved spec as YAML that loads as the same model.

Every inheritable value is written where it applies, so no config depends on an enclosing config. Other values are
omitted if they equal their default. Layer variants are written as changes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from tfkit.component import BlockConfig, Component, Config, PatchMarker, SharedMarker, WireMarker, marker
from tfkit.errors import Invalid
from tfkit.spec.annotations import numbers_and_words, slot_setting
from tfkit.spec.model_spec import InputConfig, ModelSpec
from tfkit.spec.scalars import MAX_DIGITS, word_value
from tfkit.spec.source import UNWELCOME, plain_data
from tfkit.spec.tree import MERGE
from tfkit.spec.tree import Mapping as Tree

SCHEMA = "schema.json"
WIDTH = 110
INDENT = "  "
TOKENS = InputConfig(type="tokens")

Data: TypeAlias = "dict[str, Data] | list[Data] | str | int | float | bool | None"

_BLOCK_PLAIN = re.compile(r"[\w/.](?:[\w./ ()=+*%{}\[\]-]|:(?=[^\s:]))*(?<! )")
_PLAIN_SCALAR = re.compile(r"[\w/(](?:[\w./ ()=+*%-]|:(?=[^\s:]))*(?<! )")


class Quoted(str):
    """Text that would be arithmetic without quotes."""


def render_spec(model: ModelSpec) -> str:
    """Return the YAML of a resolved spec. `parse_spec` returns an equal model for it.

    Raises ValueError for models that YAML cannot express, which only code can construct: models with a key `<<`, and
    models with a variant that removes entries from a mapping of its stack.
    """
    data = spec_data(model)
    lines = []
    for key, value in data.items():
        if key == "graph" and isinstance(value, dict) and value:
            lines += ["", "graph:", *lines_of(value, 1), ""]
        else:
            lines += _entry_lines(key, value, 0)
    return "\n".join(lines).rstrip("\n") + "\n"


def render_tree(root: Tree) -> str:
    """Return the YAML of an unresolved spec, in which shared values are written once."""
    data = {key: plain_data(node) for key, node in root.items.items()}
    lines = []
    for key, value in data.items():
        apart = key in ("graph", "checkpoint") and isinstance(value, dict)
        lines += ["", f"{key}:", *lines_of(value, 1), ""] if apart else _entry_lines(key, value, 0)
    return "\n".join(lines).rstrip("\n").replace("\n\n\n", "\n\n") + "\n"


def schema_line(folder: Path) -> str:
    """Return the comment that points editors to the schema in `folder`; empty if there is no schema."""
    return f"# yaml-language-server: $schema={SCHEMA}\n" if os.path.isfile(folder / SCHEMA) else ""


def spec_data(model: ModelSpec) -> dict[str, Data]:
    """Return a resolved spec as plain data, in the order of its text."""
    data = data_of(model)
    if "inputs" in data and all(value == TOKENS for value in model.inputs.values()):
        data["inputs"] = list(model.inputs)
    return {name: data[name] for name in ModelSpec.model_fields if name in data}


def data_of(config: Config, parent: Config | None = None) -> dict[str, Data]:
    """Return the mapping of a config; `parent` is the enclosing config."""
    data: dict[str, Data] = {}
    for name in _field_order(config):
        value, info = getattr(config, name), type(config).model_fields[name]
        if not _needs_writing(config, name):
            continue
        if marker(info, PatchMarker):
            assert parent is not None, "patches change the config around theirs"
            data[name] = {key: _config_patch(parent, changed) for key, changed in value.items()}
        else:
            data[name] = _value_data(value, config, name)
    return data


def _field_order(config: Config) -> list[str]:
    """Sort the fields for reading: kind, wires, short values, mappings."""
    fields = type(config).model_fields

    def rank(name: str) -> int:
        if name == config.word_key:
            return 0
        return 1 if marker(fields[name], WireMarker) else 3 if _is_nested(getattr(config, name)) else 2

    return sorted(fields, key=rank)


def _is_nested(value: object) -> bool:
    return isinstance(value, Config | Mapping) or (isinstance(value, tuple) and any(map(_is_nested, value)))


def _needs_writing(config: Config, name: str) -> bool:
    """Return True if a field must be written, because omitting it could change its value."""
    info = type(config).model_fields[name]
    if isinstance(config, BlockConfig) and name not in config.stated_fields:
        return False
    if name == config.word_key or info.is_required() or marker(info, SharedMarker) is not None:
        return True
    if slot_setting(info, "default_kind") is not None:
        return True
    return not _is_same_value(getattr(config, name), info.get_default(call_default_factory=True))


def _is_same_value(a: object, b: object) -> bool:
    """Return True if two values are equal and have the same type: True is not 1."""
    return type(a) is type(b) and a == b


def _value_data(value: Any, config: Config, name: str) -> Data:
    if isinstance(value, Config):
        data = data_of(value, config)
        return _word_or_mapping(data, value) if isinstance(value, Component) and value.word_key == "kind" else data
    if isinstance(value, Mapping):
        return {key: _value_data(item, config, name) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_value_data(item, config, name) for item in value]
        return [
            _word_or_mapping(item, config) if isinstance(config, Config) else item
            for item, config in zip(items, value, strict=True)
        ]
    if isinstance(value, str):
        numbers, words = numbers_and_words(type(config).model_fields[name].annotation)
        return Quoted(value) if numbers and value not in words else value
    assert value is None or isinstance(value, bool | int | float), f"{name}: {value!r} cannot be written in a spec"
    return value


def _word_or_mapping(data: Data, config: Config) -> Data:
    """Return the word that can replace a mapping with a single key, if there is one; else the mapping."""
    if isinstance(data, dict) and list(data) == [config.word_key]:
        word = data[str(config.word_key)]
        return data if word == "none" else word  # `none` would leave the slot empty
    return data


def _config_patch(base: Config, changed: Config) -> dict[str, Data]:
    """Return the patch that `tfkit.spec.merge` applies to `base` to obtain `changed`."""
    patch: dict[str, Data] = {}
    for name in _field_order(changed):
        old, new = getattr(base, name), getattr(changed, name)
        in_base = _needs_writing(base, name)
        if _is_same_value(old, new) and (in_base or not _needs_writing(changed, name)):
            continue
        merges = type(old) is type(new) and getattr(old, "kind", None) == getattr(new, "kind", None)
        if isinstance(new, Config) and merges and in_base:
            patch[name] = _config_patch(old, new)
        else:
            after = _value_data(new, changed, name)
            patch[name] = _data_patch(_value_data(old, base, name), after, name) if in_base else after
    return patch


def _data_patch(old: Data, new: Data, name: str) -> Data:
    """Return the patch from `old` to `new`: mappings with the same kind merge; any other value is replaced."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    if "kind" in new and new["kind"] != old.get("kind"):
        return new
    if gone := [key for key in old if key not in new]:
        raise ValueError(f"`{name}`: a variant cannot remove {gone}")
    return {k: _data_patch(old[k], v, name) if k in old else v for k, v in new.items() if k not in old or old[k] != v}


def lines_of(data: Mapping[str, Data], depth: int) -> list[str]:
    """Return the lines of a mapping, indented by its depth."""
    return [line for key, value in data.items() for line in _entry_lines(key, value, depth)]


def _entry_lines(key: str, value: Data, depth: int) -> list[str]:
    """Return `key: value` on one line if it fits, else with each entry of the value on a line."""
    if key == MERGE:
        raise ValueError(f"`{MERGE}` cannot be a key: it merges")
    start = f"{INDENT * depth}{_string_text(key, flow=False)}:"
    line = f"{start} {_flow_text(value) if isinstance(value, dict | list) else _scalar_text(value, flow=False)}"
    if len(line) <= WIDTH or not isinstance(value, dict | list):
        return [line]
    return [start, *(lines_of(value, depth + 1) if isinstance(value, dict) else _item_lines(value, depth + 1))]


def _item_lines(items: list[Data], depth: int) -> list[str]:
    lines: list[str] = []
    for item in items:
        line = f"{INDENT * depth}- {_flow_text(item)}"
        if len(line) <= WIDTH or not isinstance(item, dict):
            lines.append(line)
        else:
            first, *rest = lines_of(item, depth + 1)
            lines += [f"{INDENT * depth}- {first.lstrip()}", *rest]
    return lines


def _flow_text(value: Data) -> str:
    if isinstance(value, dict):
        if MERGE in value:
            raise ValueError(f"`{MERGE}` cannot be a key: it merges")
        return "{" + ", ".join(f"{_string_text(key)}: {_flow_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow_text, value))}]"
    return _scalar_text(value, flow=True)


def _scalar_text(value: str | int | float | bool | None, *, flow: bool) -> str:
    if isinstance(value, str):
        return _string_text(value, flow=flow)
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    # The loader rejects literals of this length, but accepts a result of arithmetic.
    return f"0 + {value}" if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS else repr(value)


def _string_text(text: str, *, flow: bool = True) -> str:
    """Quote a string unless YAML reads it as a string without quotes."""
    plain = _PLAIN_SCALAR.fullmatch(text) if flow else _BLOCK_PLAIN.fullmatch(text.replace(", ", "  "))
    if plain and not isinstance(text, Quoted) and _reads_as_text(text):
        return text
    return '"' + "".join(map(_escaped_char, text)) + '"'


def _reads_as_text(text: str) -> bool:
    try:
        return isinstance(word_value(text), str)
    except Invalid:
        return False


def _escaped_char(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    if char in "\t\r\n":
        return {"\t": "\\t", "\r": "\\r", "\n": "\\n"}[char]
    return f"\\U{ord(char):08x}" if UNWELCOME.match(char) else char
