"""`merge`, `extended` and `assign`: values keep the locations of their texts."""

from __future__ import annotations

from typing import Any

import pytest

from tfkit.errors import SpecError
from tfkit.spec.merge import MODEL_KEYS, apply_set, merge, merge_documents, nested_patch, without_keys
from tfkit.spec.provenance import SET
from tfkit.spec.source import parse, plain_data
from tfkit.spec.tree import Mapping, Scalar

FIELDS = frozenset({"d_model", "bias", "graph", "outputs", "checkpoint"})


def tree(text: str, name: str = "base.yaml") -> Mapping:
    return parse(text, name)


def merged(base: str, patch: str) -> Any:
    return plain_data(merge(tree(base), tree(patch, "patch.yaml")))


@pytest.mark.parametrize(
    ("base", "patch", "actual"),
    [
        ("a: 1\nb: 2", "b: 3\nc: 4", {"a": 1, "b": 3, "c": 4}),
        ("a: {b: {c: 1, d: 2}}", "a: {b: {d: 3}}", {"a": {"b": {"c": 1, "d": 3}}}),
        ("a: [1, 2, 3]", "a: [4]", {"a": [4]}),
        ("a: {b: 1}", "a: 2", {"a": 2}),
        ("a: {b: 1}", "a: null", {"a": None}),
        ("a: null", "a: {b: 1}", {"a": {"b": 1}}),
    ],
    ids=["keys", "deep", "a list is replaced", "a mapping is replaced", "null is a value", "null is filled"],
)
def test_mappings_merge_and_all_else_is_replaced(base: str, patch: str, actual: object) -> None:
    assert merged(base, patch) == actual


@pytest.mark.parametrize(
    ("base", "patch", "actual"),
    [
        ("norm: {kind: rmsnorm, eps: 1}", "norm: {eps: 2}", {"kind": "rmsnorm", "eps": 2}),
        ("norm: {kind: rmsnorm, eps: 1}", "norm: {kind: rmsnorm, scale: false}", None),
        ("norm: {kind: rmsnorm, eps: 1}", "norm: {kind: layernorm}", {"kind": "layernorm"}),
        ("norm: {kind: rmsnorm, eps: 1}", "norm: layernorm", "layernorm"),
        ("norm: rmsnorm", "norm: {eps: 2}", {"kind": "rmsnorm", "eps": 2}),
        ("norm: {eps: 1}", "norm: {kind: rmsnorm}", {"kind": "rmsnorm"}),
    ],
)
def test_another_kind_starts_anew(base: str, patch: str, actual: object) -> None:
    assert merged(base, patch)["norm"] == (actual or {"kind": "rmsnorm", "eps": 1, "scale": False})


def test_a_node_of_another_block_starts_anew() -> None:
    base = "graph: {a: {block: decoder, n_layers: 2}, b: {block: norm}}"
    assert merged(base, "graph: {a: {block: encoder}, b: {norm: rmsnorm}}") == {
        "graph": {"a": {"block": "encoder"}, "b": {"block": "norm", "norm": "rmsnorm"}}
    }


def test_a_pattern_of_layers_is_replaced_as_a_whole() -> None:
    base = "layers: {variants: {a: {d_ff: 1}}, pattern: {0-1: a, rest: base}}"
    actual = merged(base, "layers: {variants: {a: {bias: true}}, pattern: {rest: a}}")
    assert actual == {"layers": {"variants": {"a": {"d_ff": 1, "bias": True}}, "pattern": {"rest": "a"}}}


def test_null_takes_away_what_a_spec_names_itself() -> None:
    base = "graph: {a: {block: norm}, b: {block: norm}}\ninputs: {x: tokens}\noutputs: [a]"
    assert merged(base, "graph: {a: null, c: null}\ninputs: {x: null}") == {
        "graph": {"b": {"block": "norm"}, "c": None},
        "inputs": {},
        "outputs": ["a"],
    }


def test_null_at_the_top_takes_away_only_for_what_extends() -> None:
    base, patch = tree("bias: true\nd_model: 8"), tree("bias: null\ninit: null")
    assert plain_data(merge_documents(base, patch)) == {"d_model": 8, "init": None}
    assert plain_data(merge(base, patch)) == {"bias": None, "d_model": 8, "init": None}


def test_values_keep_their_places_and_keys_those_of_the_last_who_said_them() -> None:
    actual = merge(tree("a: 1\nb: {c: 2, d: 3}"), tree("b: {d: 4}", "patch.yaml"))
    inner = actual.items["b"]
    assert isinstance(inner, Mapping)
    sources = {name: (inner.items[name].span.source.name, inner.keys[name].source.name) for name in ("c", "d")}
    assert sources == {"c": ("base.yaml", "base.yaml"), "d": ("patch.yaml", "patch.yaml")}
    assert actual.items["a"].span.source.name == "base.yaml"
    assert actual.keys["b"].source.name == "patch.yaml"


def test_nothing_is_changed_in_place() -> None:
    base, patch = tree("a: {b: 1}\ngraph: {n: {block: norm}}"), tree("a: {b: 2}\ngraph: {n: null}")
    merge(base, patch)
    assert plain_data(base) == {"a": {"b": 1}, "graph": {"n": {"block": "norm"}}}
    assert plain_data(patch) == {"a": {"b": 2}, "graph": {"n": None}}


def test_small_parts() -> None:
    root = tree("a: 1\nb: 2")
    assert plain_data(without_keys(root, {"a", "z"})) == {"b": 2}
    assert plain_data(nested_patch(["x", "y"], root)) == {"x": {"y": {"a": 1, "b": 2}}}
    words = {("graph", "a"): "block", ("inputs", "a"): "type", ("graph", "a", "norm"): "kind"}
    words |= {("checkpoint",): "extends", ("checkpoint", "tensors"): "kind"}
    assert {path: MODEL_KEYS.word_key(path) for path in words} == words


# ---- one `--set` ----

BASE = """
d_model: 8
bias: true
outputs: [a, b]
graph:
  decoder: {block: decoder, attention: {n_heads: 2}, norm: rmsnorm, sublayers: [attention, {sublayer: ffn}]}
  head: {block: lm_head}
"""


def assigned(argument: str, *path: str) -> Any:
    """The value at a path of the base, changed by one argument."""
    value: Any = plain_data(apply_set(tree(BASE), argument, FIELDS))
    for key in path:
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


@pytest.mark.parametrize(
    ("argument", "path", "value"),
    [
        ("d_model=16", "d_model", 16),
        ("decoder.attention.n_heads=4", "graph.decoder.attention.n_heads", 4),
        ("graph.decoder.attention.n_heads=4", "graph.decoder.attention.n_heads", 4),
        ("decoder.norm.eps=1e-3", "graph.decoder.norm", {"kind": "rmsnorm", "eps": 1e-3}),
        ("decoder.ffn={kind: relu, d_ff: 3}", "graph.decoder.ffn", {"kind": "relu", "d_ff": 3}),
        ("decoder.attention=null", "graph.decoder.attention", None),
        ("decoder.sublayers.1.norm_in=true", "graph.decoder.sublayers.1", {"sublayer": "ffn", "norm_in": True}),
        ("outputs.0=c", "outputs", ["c", "b"]),
        ("decoder.layers.groups=2", "graph.decoder.layers", {"groups": 2}),
        (" bias =false", "bias", False),
    ],
)
def test_a_value_is_set(argument: str, path: str, value: object) -> None:
    assert assigned(argument, *path.split(".")) == value


@pytest.mark.parametrize(("argument", "gone"), [("bias=null", ["bias"]), ("head=null", ["graph", "head"])])
def test_null_takes_away_at_the_top_and_a_node(argument: str, gone: list[str]) -> None:
    assert gone[-1] not in assigned(argument, *gone[:-1])


def test_nothing_after_the_sign_takes_nothing_away() -> None:
    assert assigned("bias=", "bias") is None


def test_the_place_is_that_of_the_argument() -> None:
    actual = apply_set(tree(BASE), "decoder.attention.n_heads=4", FIELDS)
    part = actual.items["graph"].items["decoder"].items["attention"]  # type: ignore[union-attr]
    assert isinstance(part, Mapping)
    value, key = part.items["n_heads"], part.keys["n_heads"]
    assert isinstance(value, Scalar)
    assert (value.span.source.name, value.span.column) == (SET, 27)
    assert (key.source.name, key.column) == (SET, 19)


@pytest.mark.parametrize(
    ("argument", "message", "column"),
    [
        ("d_model", "a change must have the form path=value", 1),
        ("=3", "a change must have the form path=value", 1),
        ("decoder..x=3", "a change must have the form path=value", 1),
        ("decodr.n_layers=3", "the spec has no node or key `decodr`", 1),
        ("d_model.x=3", "`d_model` is a number, which has no key `x`", 9),
        ("outputs.2=c", "`outputs` has no item `2`", 9),
        ("decoder.sublayers.-1=ffn", "`sublayers` has no item `-1`", 19),
    ],
)
def test_what_cannot_be_set_is_told_where_it_stands(argument: str, message: str, column: int) -> None:
    with pytest.raises(SpecError) as caught:
        apply_set(tree(BASE), argument, FIELDS)
    (only,) = caught.value.diagnostics
    assert only.message == message
    assert only.span is not None
    assert (only.span.source.name, only.span.column) == (SET, column)
