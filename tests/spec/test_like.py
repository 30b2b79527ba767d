"""`like: NODE`: a node takes the keys of a node as defaults, but not its wires."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
import yaml

import tfkit
from tfkit.plugin.manager import Plugins
from tfkit.spec.schema import json_schema

from .texts import failure

ENCODER = {
    "block": "encoder",
    "input": "source_embedding",
    "n_layers": 3,
    "placement": "post",
    "attention": {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2, "bias": False},
    "ffn": {"kind": "relu", "d_ff": "3 * d_model"},
    "layers": {"variants": {"a": {"dropout": 0.2}}, "pattern": ["a", "base*2"]},
}
DECODER = {"like": "encoder", "block": "decoder", "input": "target_embedding", "memory": "encoder"}
TEXT = """\
tfkit: 1
name: m
d_model: 24
vocab_size: 11
max_len: 9
inputs: [source, target]
graph:
  source_embedding: {block: embedding, input: source, position: learned}
  encoder:
    block: encoder
    n_layers: 3
    attention: {n_heads: 4}
    ffn: {kind: relu, d_ff: 48}
  target_embedding: {like: source_embedding, input: target}
  decoder:
    like: encoder
    block: decoder
    memory: encoder
  logits: lm_head
"""


def spec(decoder: Mapping[str, Any] = DECODER, **nodes: Any) -> dict[str, Any]:
    embedding = {"block": "embedding", "input": "source", "scale": 3.0}
    graph = {
        "source_embedding": embedding,
        "encoder": ENCODER,
        "target_embedding": {"like": "source_embedding", "input": "target", "tie": "source_embedding"},
        "decoder": decoder,
        "logits": "lm_head",
    }
    top = {"tfkit": 1, "name": "m", "d_model": 24, "vocab_size": 11, "max_len": 9, "inputs": ["source", "target"]}
    return {**top, "graph": {**graph, **nodes}}


def nodes_of(data: Any, plugins: Plugins, **options: Any) -> dict[str, Any]:
    graph = tfkit.load(data, plugins=plugins, **options)
    return {node.name: (node.config, node.wires) for node in graph.nodes}


@pytest.mark.parametrize(
    ("decoder", "written"),
    [
        ({}, {}),
        ({"ffn": {"d_ff": 56}}, {"ffn": {"kind": "relu", "d_ff": 56}}),
        ({"ffn": {"kind": "gelu", "d_ff": 56}}, {"ffn": {"kind": "gelu", "d_ff": 56}}),
        ({"attention": {"n_heads": 6}}, {"attention": {**ENCODER["attention"], "n_heads": 6}}),  # type: ignore[dict-item]
        ({"ffn": None}, {"ffn": None}),
        ({"layers": {"pattern": ["base*2", "a"]}}, {"layers": {**ENCODER["layers"], "pattern": ["base*2", "a"]}}),  # type: ignore[dict-item]
    ],
    ids=["all keys", "deep", "a different kind", "a key of a slot", "null", "a list is replaced"],
)
def test_a_node_equals_the_node_with_the_keys_written(
    decoder: dict[str, Any], written: dict[str, Any], plugins: Plugins
) -> None:
    plain = {**{key: value for key, value in DECODER.items() if key != "like"}, **decoder}
    embedding = {"block": "embedding", "input": "target", "scale": 3.0, "tie": "source_embedding"}
    expected = spec({**ENCODER, **plain, **written}, target_embedding=embedding)
    assert nodes_of(spec({**DECODER, **decoder}), plugins) == nodes_of(expected, plugins)


def test_it_follows_changes_of_its_base(plugins: Plugins) -> None:
    changes = ["encoder.n_layers=6", "encoder.ffn.d_ff=40", "decoder.attention.n_heads=6"]
    decoder, _ = nodes_of(spec(), plugins, sets=[*changes, "encoder.layers=null", "decoder.layers=null"])["decoder"]
    assert (decoder.n_layers, decoder.ffn.d_ff, decoder.attention.n_heads) == (6, 40, 6)
    assert decoder.attention.n_kv_heads == 2
    extended = {"extends": "vaswani_base", "graph": {"encoder": {"n_layers": 5, "ffn": {"d_ff": 640}}}}
    decoder, _ = nodes_of(extended, plugins)["decoder"]
    assert (decoder.n_layers, decoder.ffn.d_ff, decoder.memory) == (5, 640, "encoder")


def test_null_ends_it(plugins: Plugins) -> None:
    decoder = {"n_layers": 2, "attention": {"n_heads": 3}, "ffn": {"d_ff": 8, "kind": "gelu"}}
    config, _ = nodes_of(spec({**DECODER, **decoder}), plugins, sets=["decoder.like=null"])["decoder"]
    assert (config.placement, config.layers, config.attention.kind) == ("pre", None, "mha")


def test_chains_and_words(plugins: Plugins) -> None:
    """A node that is like a node with `like`, in any order; and a base that is only the word of a block."""
    more = {
        "last": {"like": "decoder", "input": "decoder", "memory": "encoder", "ffn": {"d_ff": 16}},
        "decoder": {**DECODER, "n_layers": 3, "dropout": 0.3},
        "logits": {"like": "head", "input": "last", "bias": True},
        "head": "lm_head",
    }
    nodes = nodes_of({**spec(**more), "outputs": ["logits", "head"]}, plugins)
    last, wires = nodes["last"]
    assert (last.block, last.dropout, last.ffn.d_ff, last.placement) == ("decoder", 0.3, 16, "post")
    assert wires == {"input": "decoder", "memory": "encoder"}
    assert (nodes["logits"][0].block, nodes["logits"][0].bias, nodes["head"][0].bias) == ("lm_head", True, False)


def test_wires_are_not_taken(plugins: Plugins) -> None:
    """Without `input` a node takes the node above it; any further wire must be written."""
    later = {"like": "encoder", "block": "decoder", "memory": "encoder"}
    assert nodes_of(spec(later), plugins)["decoder"][1] == {"input": "target_embedding", "memory": "encoder"}
    error = failure(lambda: tfkit.load(spec(last={"like": "decoder", "input": "decoder"}), plugins=plugins))
    (diagnostic,) = error.diagnostics
    assert diagnostic.message == "missing key `memory`: `last` does not take the wires of `decoder`"
    assert diagnostic.path == "graph.last.memory"
    assert diagnostic.help == "write `memory: NODE`, or `memory: null`"
    alone = {"like": "decoder", "input": "decoder", "memory": None}
    nodes = nodes_of({**spec(last=alone), "outputs": ["last", "logits"]}, plugins)
    assert nodes["last"][1] == {"input": "decoder"}
    encoder = {"like": "decoder", "block": "encoder", "input": "decoder"}  # an encoder may also have a memory
    assert "memory" in str(failure(lambda: tfkit.load(spec(last=encoder), plugins=plugins)))


def test_an_error_in_a_key_is_where_the_key_is_written(plugins: Plugins) -> None:
    text = TEXT.replace("block: decoder\n    memory: encoder", "block: lm_head")
    error = failure(lambda: tfkit.loads(text, plugins=plugins))
    assert [(d.span.line, d.span.column, d.path) for d in error.diagnostics if d.span] == [
        (11, 5, "graph.decoder.n_layers"),
        (12, 5, "graph.decoder.attention"),
        (13, 5, "graph.decoder.ffn"),
    ]
    note = "`decoder` takes `ffn` from `encoder`"
    assert note in error.diagnostics[-1].notes
    assert error.diagnostics[-1].message == "unknown key `ffn`"


def test_an_error_in_a_key_of_the_node_has_no_base(plugins: Plugins) -> None:
    text = TEXT.replace("block: decoder\n", "block: decoder\n    attention: {n_heads: 4, biass: true}\n")
    (diagnostic,) = failure(lambda: tfkit.loads(text, plugins=plugins)).diagnostics
    assert diagnostic.path == "graph.decoder.attention.biass"
    assert not any("takes" in note for note in diagnostic.notes)


def test_a_mistake_in_the_base_is_one_error(plugins: Plugins) -> None:
    error = failure(lambda: tfkit.loads(TEXT.replace("relu", "rleu"), plugins=plugins))
    assert [(d.path, d.notes[-1].startswith("known kinds")) for d in error.diagnostics] == [
        ("graph.encoder.ffn.kind", True)
    ]


@pytest.mark.parametrize(
    ("before", "after", "line", "message"),
    [
        ("like: encoder", "like: encodr", 16, "`like` must be the name of a node; got `encodr`"),
        ("like: encoder", "like: source", 16, "`like` must be the name of a node; got `source`"),
        ("like: encoder", "like: [encoder]", 16, "`like` must be the name of a node; got a list"),
        ("like: encoder", "like: 3", 16, "`like` must be the name of a node; got 3"),
        ("like: encoder", "like: decoder", 16, "`like` must lead to a node without `like`, in at most 16 steps"),
        (
            "  encoder:\n",
            "  encoder:\n    like: decoder\n",
            10,
            "`like` must lead to a node without `like`, in at most 16 steps",
        ),
    ],
)
def test_a_wrong_name(before: str, after: str, line: int, message: str, plugins: Plugins) -> None:
    """One error, without errors of the keys that are then missing."""
    error = failure(lambda: tfkit.loads(TEXT.replace(before, after), plugins=plugins))
    assert [(d.span and d.span.line, d.message) for d in error.diagnostics] == [(line, message)]
    assert "encodr" not in after or error.diagnostics[0].help == "a node with a similar name exists: `encoder`"


def test_a_chain_has_an_end(plugins: Plugins) -> None:
    chain = {f"n{index}": {"like": f"n{index - 1}" if index else "encoder", "input": "logits"} for index in range(16)}
    error = failure(lambda: tfkit.load(spec(**chain, n16={"like": "n15"}), plugins=plugins))
    assert [(d.path, d.message.partition(",")[0]) for d in error.diagnostics] == [
        ("graph.n0.like", "`like` must lead to a node without `like`")
    ]


def test_nodes_are_not_expanded_beyond_the_size_of_a_file(plugins: Plugins) -> None:
    factors = {"short_factor": [1] * 4096, "long_factor": [2] * 4096, "factor": 2, "original_max_len": 4}
    rope = {"kind": "rope", "scaling": {"kind": "longrope", **factors}}
    big = {"block": "encoder", "n_layers": 1, "attention": {"n_heads": 1, "d_head": 8192, "position": rope}}
    error = failure(
        lambda: tfkit.load(spec(big=big, **{f"n{i}": {"like": "big"} for i in range(900)}), plugins=plugins)
    )
    assert [(d.span and d.span.location, d.message) for d in error.diagnostics] == [
        ("graph.n5", "nodes must have at most 50,000 keys and values in total")
    ]


def test_the_schema(plugins: Plugins) -> None:
    validator = jsonschema.Draft202012Validator(json_schema(plugins))
    assert validator.is_valid(yaml.safe_load(TEXT))
    assert validator.is_valid({"extends": "vaswani_base", "graph": {"more": {"like": "encoder", "n_layers": 2}}})
    for before, after in (
        ("like: encoder", "like: 3"),
        ("memory: encoder", "memry: encoder"),
        ("    like: enc", "    lik: enc"),
    ):
        assert not validator.is_valid(yaml.safe_load(TEXT.replace(before, after)))
