"""Random valid specs: a small spec, changed key by key as the schema of all installed kinds allows.

The schema knows keys, kinds and types; a change that only the loader refuses, such as heads that do not divide a width,
is left out.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from hypothesis import strategies as st

import tfkit
from tfkit.spec.schema import json_schema
from tfkit.tools.check.reduced import reduced_model

PLUGINS = tfkit.load_plugins()
DEFS: Mapping[str, Any] = json_schema(PLUGINS)["$defs"]
Data = dict[str, Any]
Schema = Mapping[str, Any]

STACK: Data = {"n_layers": 2, "attention": {"kind": "mha", "n_heads": 4}, "ffn": {"kind": "gelu", "d_ff": 16}}
GRAPHS: list[Data] = [
    {
        "embedding": {"block": "embedding", "position": "learned"},
        "encoder": {"block": "encoder", **STACK},
        "pooler": {"block": "pooler", "select": "mean"},
        "classes": {"block": "classifier", "n_classes": 3},
    },
    {
        "embedding": {"block": "embedding"},
        "decoder": {"block": "decoder", **STACK},
        "logits": {"block": "lm_head", "tie": "embedding"},
    },
    {
        "source_embedding": {"block": "embedding", "input": "source"},
        "encoder": {"block": "encoder", **STACK},
        "embedding": {"block": "embedding", "input": "target"},
        "decoder": {"block": "decoder", "memory": "encoder", **STACK},
        "logits": {"block": "lm_head"},
    },
]
FIXED = frozenset("block d_model input inputs kind max_len memory prefix select tables tie vocab_size".split())  # noqa: SIM905
"""Keys that stay as they are: the graph and its widths."""
FIRST = ("init", "attention", "ffn", "position", "scaling", "mask")
"""Keys that are changed before others are."""
SIZES: Mapping[str, list[Any]] = {
    "beta_fast": [8, 32],
    "d_embed": [8],
    "d_ff": [8, 24],
    "d_head": [4, 6],
    "d_nope": [4],
    "d_rope": [4],
    "d_v": [4, 6],
    "dropout": [0, 0.2],
    "eps": [1e-6, 1e-2],
    "factor": [1.0, 4.0],
    "kv_rank": [8],
    "left": [1, 3],  # a query that reads itself alone has no use for heads
    "long_factor": [[2.0, 4.0]],
    "max_distance": [16],
    "n_buckets": [8],
    "n_classes": [3],
    "n_experts": [4],
    "n_experts_per_token": [2, 3],  # among one chosen expert, a softmax leaves a router nothing to learn
    "n_heads": [2, 4],
    "original_max_len": [4, 16],
    "pattern": [["other", "base"], {"0": "other", "rest": "base"}],
    "q_rank": [8],
    "short_factor": [[1.0, 1.5]],
    "size": [2, 3],  # in a window of a single position, scores have no effect
    "std": [0.02, 0.1],
    "theta": [10.0, 10000.0],
    "width": [2, 4],
}
"""Values of numbers and lists that stand for something."""


@st.composite
def specs(draw: st.DrawFn) -> Data:
    """A legal spec."""
    spec: Data = {"tfkit": 1, "name": "random", "d_model": 16, "vocab_size": 29, "max_len": 24}
    spec["graph"] = json.loads(json.dumps(draw(st.sampled_from(GRAPHS))))  # no stack shares a mapping with another
    if "source_embedding" in spec["graph"]:
        spec["inputs"] = ["source", "target"]
    for expected in (*FIRST, *[""] * draw(st.integers(0, 8))):
        changed = copy.deepcopy(spec)
        locations = list(_locations(changed))
        mapping, key, schema = draw(
            st.sampled_from([location for location in locations if location[1] == expected] or locations)
        )
        mapping[key] = _value(draw, schema, key)
        spec = changed if _is_legal(changed) else spec
    return spec


def _is_legal(spec: Data) -> bool:
    """True if a spec is loaded and its reduced model built, without a warning of the first loss, which is a fault."""
    try:
        with warnings.catch_warnings(category=tfkit.FirstLossWarning, action="error"):
            tfkit.build(reduced_model(tfkit.load(spec, plugins=PLUGINS), PLUGINS).graph)
    except (tfkit.SpecError, tfkit.FirstLossWarning):
        return False
    return True


def _locations(spec: Data) -> Iterator[tuple[Data, str, Schema]]:
    """Every mapping of a spec with each of its keys, there or not, and the schema of its value."""
    yield spec, "init", DEFS["init"]
    for node in spec["graph"].values():
        yield from _inside(node, DEFS[f"block.{node['block']}"])


def _inside(mapping: Data, schema: Schema) -> Iterator[tuple[Data, str, Schema]]:
    keys: Mapping[str, Schema] = schema["properties"]
    yield from ((mapping, key, keys[key]) for key in sorted(keys.keys() - FIXED))
    for key, value in mapping.items():
        if isinstance(value, dict) and key not in ("variants", "pattern"):
            yield from _inside(value, _of_mapping(keys[key], value))


def _of_mapping(schema: Schema, value: Data) -> Schema:
    """The schema of a mapping's keys, behind references and kinds."""
    if "properties" in schema and "allOf" not in schema:
        return schema
    if "allOf" in schema:
        schema = next(
            item["then"] for item in schema["allOf"] if item["if"]["properties"]["kind"]["const"] == value["kind"]
        )
    elif "$ref" in schema:
        schema = DEFS[schema["$ref"].rpartition("/")[2]]
    elif "required" in schema["if"]:
        schema = schema["then" if "kind" in value else "else"]
    else:
        schema = schema["then"]
    return _of_mapping(schema, value)


def _value(draw: st.DrawFn, schema: Schema, key: str) -> Any:
    """A value that a schema allows."""
    if key in SIZES:
        return draw(st.sampled_from(SIZES[key]))
    target = schema.get("$ref", "").rpartition("/")[2]
    if target not in ("", "arithmetic"):
        return _value(draw, DEFS[target], key)
    for form, make in FORMS.items():
        if form in schema:
            return make(draw, schema, key)
    kinds = schema["type"]
    if "boolean" in kinds:
        return draw(st.booleans())
    if "integer" in kinds:
        return draw(st.integers(schema.get("minimum", 1), 3))
    return draw(st.sampled_from([0.5, 1.0, 2.0]))


def _kind(draw: st.DrawFn, schema: Schema, key: str) -> Any:
    """A value of one of the kinds; the case beside them is that of changes that name none."""
    return _value(draw, draw(st.sampled_from([rule["then"] for rule in schema["allOf"] if "then" in rule])), key)


def _mapping(draw: st.DrawFn, schema: Schema, key: str) -> Data:
    """A mapping with the keys that it needs, and a few others."""
    needed = schema.get("required", [])
    free = sorted(schema["properties"].keys() - FIXED - {*needed})
    optional = draw(st.lists(st.sampled_from(free), max_size=2, unique=True)) if free else []
    kind = [name for name in ("kind",) if name in schema["properties"]]
    return {name: _value(draw, schema["properties"][name], name) for name in dict.fromkeys([*kind, *needed, *optional])}


def changes(draw: st.DrawFn) -> list[Any]:
    """Changes to each slot that has kinds, by the variant of a layer."""
    slots = [schema for name, schema in DEFS.items() if name.startswith("changes.") and "allOf" in schema]
    return [_value(draw, schema, "") for schema in slots if any("then" in option for option in schema["allOf"])]


def _named(draw: st.DrawFn, schema: Schema, key: str) -> Data:
    return {"other": _value(draw, schema["additionalProperties"], key)}


def _branch(draw: st.DrawFn, schema: Schema, key: str) -> Any:
    return _value(draw, schema[draw(st.sampled_from(["then", "then", "then", "else"]))], key)


FORMS = {
    "const": lambda draw, schema, key: schema["const"],
    "enum": lambda draw, schema, key: draw(st.sampled_from(schema["enum"])),
    "allOf": _kind,
    "if": _branch,
    "anyOf": lambda draw, schema, key: _value(draw, schema["anyOf"][-1], key),  # the first is arithmetic, or nothing
    "items": lambda draw, schema, key: [_value(draw, schema["items"], key) for _ in range(draw(st.integers(1, 3)))],
    "properties": _mapping,
    "additionalProperties": _named,
}
"""The forms of a schema, the most telling first."""
