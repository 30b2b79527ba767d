"""Options, arrangements of layers, graphs and long distances that no pair of kinds covers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml

import tfkit
from tfkit.testing import example_inputs

from .agreement import check_agreement

PLUGINS = tfkit.load_plugins(entry_points=False)
FFN = {"kind": "swiglu", "d_ff": 16}
TEXT = "{tfkit: 1, name: option, d_model: 24, vocab_size: 17, max_len: 200}"
Part = dict[str, Any]


def heads(text: str = "", kind: str = "mha") -> Part:
    attention: Part = yaml.safe_load(f"{{kind: {kind}, n_heads: 6, {text}}}")
    return {"attention": attention}


def rope(scaling: str) -> Part:
    return heads(f"d_head: 16, position: {{kind: rope, theta: 100, scaling: {{{scaling}}}}}")


STACKS: dict[str, Part] = {
    "heads that are no power of two": heads("position: alibi"),
    "steep and scaled slopes": heads("position: {kind: alibi, scaled: true, max_slope_exponent: 5}"),
    "buckets, encoder that looks ahead a little": heads("position: t5, mask: {right: 2}"),
    "rows of distances": heads("position: {kind: disentangled, max_distance: 7}"),
    "rows of distances, shared heads of keys": heads(
        "n_kv_heads: 2, position: {kind: disentangled, max_distance: 7}", kind="gqa"
    ),
    "rows of buckets, encoder": heads("position: {kind: disentangled, max_distance: 12, n_buckets: 5, shared: true}"),
    "dynamic, short": rope("kind: dynamic, factor: 3, original_max_len: 150"),
    "dynamic, long": rope("kind: dynamic, factor: 3, original_max_len: 8"),
    "ntk": rope("kind: ntk, factor: 3"),
    "llama3": rope("kind: llama3, factor: 8, original_max_len: 60"),
    "llama3, own bounds": rope(
        "kind: llama3, factor: 8, original_max_len: 60, low_freq_factor: 2, high_freq_factor: 3"
    ),
    "yarn": rope("kind: yarn, factor: 8, original_max_len: 60, beta_fast: 8, beta_slow: 2"),
    "yarn, not truncated": rope("kind: yarn, factor: 8, original_max_len: 60, beta_fast: 8, truncate: false"),
    "yarn, temperature": rope("kind: yarn, factor: 8, original_max_len: 60, temperature: 1.3"),
    "yarn, mscale": rope("kind: yarn, factor: 8, original_max_len: 60, mscale: 0.7"),
    "yarn, both mscales": rope("kind: yarn, factor: 8, original_max_len: 60, mscale: 0.7, mscale_all_dim: 1.2"),
    "yarn that shrinks": rope("kind: yarn, factor: 0.5, original_max_len: 60"),
    "gates of heads, norms of heads": heads(
        "n_kv_heads: 2, qk_norm: layernorm, qk_norm_weight: per_head, gate: {activation: softplus, per: head}, "
        "bias: {q: true, o: true}",
        kind="gqa",
    ),
    "values that are the keys": heads(
        "n_kv_heads: 2, values: keys, qk_norm: rmsnorm, value_norm: {kind: rmsnorm, scale: false}, position: rope, "
        "bias: {k: true}",
        kind="gqa",
    ),
    "values that are the keys, in one matrix": heads("values: keys, clip: 0.5, qk_norm_rotated: layernorm, bias: true"),
    "norms of values, of all heads": heads(
        "qk_norm_full: {kind: rmsnorm, offset: 1}, inner_norm: layernorm, value_norm: {kind: layernorm, offset: 1}"
    ),
    "eps": {**heads(), "norm": {"kind": "rmsnorm", "eps": 0.3}},
    "temperature": heads("temperature: {beta: 0.3, original_max_len: 4, offset: 1}"),
    "learned residuals": {**heads(), "residual": {"scale": 0.5, "learned": "vector", "learned_onto": "scalar"}},
    "onto the norm": {**heads(), "residual": {"scale": 0.5, "learned": "scalar", "onto": "normed", "scale_onto": 1.5}},
    "norms of their own": {**heads(), "placement": "parallel", "input_norm": "rmsnorm", "final_norm": "rmsnorm"},
    "post-LN with a final norm": {**heads(), "placement": "post", "final_norm": True},
    "sublayers": {
        **heads("position: t5"),
        **yaml.safe_load("""
            input_norm: true
            final_norm: false
            sublayers:
            - {sublayer: ffn, norm_after: true, reads: input}
            - {sublayer: attention, norm_in: false, norm_out: rmsnorm}
            - {sublayer: ffn, residual: {scale: 2, learned: vector}}
            - {sublayer: attention, reads: previous}
        """),
    },
    "a pattern that repeats": {
        **heads("position: t5"),
        "layers": {
            "variants": {"wide": {"ffn": {"d_ff": 20}}, "local": heads("mask: {left: 2, right: 0}")},
            "pattern": ["local*2", "base", "wide"],
        },
        "n_layers": 5,
    },
    "a pattern by number": {
        **heads("position: {kind: t5, shared: false}"),
        "layers": {
            "variants": {"post": {"placement": "post"}, "local": heads("mask: {left: 2, right: 0}")},
            "pattern": {"0-1": "local", "-1": "post", "rest": "base"},
        },
        "n_layers": 5,
    },
    "layers that share weights": {
        **heads("position: t5"),
        "layers": {"groups": 2, "variants": {"wide": {"ffn": {"d_ff": 20}}}, "pattern": ["wide", "base"]},
        "n_layers": 6,
    },
    "a loop over layers": {
        **heads("position: t5"),
        "layers": {
            "groups": 2,
            "order": "looped",
            "variants": {"wide": {"ffn": {"d_ff": 20}}},
            "pattern": ["wide", "base"],
        },
        "n_layers": 6,
    },
    "layers in a listed order": {
        **heads("position: t5"),
        "layers": {
            "order": [1, 0, 0, 2, 1],
            "variants": {"wide": {"ffn": {"d_ff": 20}}},
            "pattern": ["wide", "base"],
        },
        "n_layers": 5,
    },
}
GRAPHS = {
    "a prefix": """
        inputs: {tokens: tokens, prefix: lengths}
        graph:
          embedding: {block: embedding, input: tokens, position: learned}
          decoder:
            block: decoder
            prefix: prefix
            n_layers: 2
            attention: {kind: mha, n_heads: 2, position: t5}
            ffn: {kind: relu, d_ff: 8}
            layers: {variants: {local: {attention: {mask: {left: 1, right: 0}}}}, pattern: [local, base]}
    """,
    "a prefix, with rows for later keys": """
        inputs: {tokens: tokens, prefix: lengths}
        graph:
          embedding: {block: embedding, input: tokens}
          decoder:
            block: decoder
            prefix: prefix
            n_layers: 1
            attention: {kind: mha, n_heads: 2, position: {kind: disentangled, max_distance: 5}}
            ffn: {kind: relu, d_ff: 8}
    """,
    "an embedding in another order, all of a head": """
        graph:
          embedding: {block: embedding, d_embed: 10, project_bias: false, position: sinusoidal, scale: sqrt_d_model,
                      norm: layernorm, stages: [position, scale, norm, project]}
          logits: {block: lm_head, tie: embedding, d_embed: 10, bias: true, scale: 0.3, softcap: 2}
    """,
    "positions after the projection, a transform": """
        graph:
          embedding: {block: embedding, d_embed: 10, position: {kind: learned, offset: 1}, scale: 3,
                      stages: [project, position, scale]}
          logits: {block: lm_head, d_embed: 10, scale: 0.3, transform: {activation: tanh, bias: false}}
    """,
    "vectors and classes": """
        graph:
          embedding: {block: embedding, position: learned}
          first: {block: pooler, activation: tanh}
          last: {block: pooler, input: embedding, select: last}
          mean: {block: pooler, input: embedding, select: mean}
          classes: {block: classifier, n_classes: 3}
          of_tokens: {block: classifier, n_classes: 3, input: embedding}
          single: {block: classifier, n_classes: 1, squeeze: true, input: last}
          of_each: {block: classifier, n_classes: 1, squeeze: true, input: embedding}
        outputs: [first, last, mean, classes, of_tokens, single, of_each]
    """,
    "joined values, memories, further tables": """
        inputs: {tokens: tokens, image: {type: features, width: 5}, types: {type: tokens, optional: true}}
        graph:
          embedding: {block: embedding, input: tokens, tables: {types: 3}, position: learned}
          image_layer: {block: linear, input: image, activation: xielu}
          joined: {block: concat, inputs: [image_layer, embedding]}
          normed: {block: norm, norm: rmsnorm}
          sum: {block: add, inputs: [joined, normed]}
          encoder: {block: encoder, n_layers: 1, ffn: {kind: relu, d_ff: 8},
                    attention: {kind: mha, n_heads: 2, position: rope, mask: {left: 3, right: 1}}}
          wide: {block: concat, inputs: [encoder, sum], along: width}
          narrow: {block: linear, d_model: 7, bias: false}
          reader: {block: encoder, input: embedding, memory: image_layer, n_layers: 1,
                   attention: {kind: mha, n_heads: 2, temperature: {beta: 1, original_max_len: 3}},
                   ffn: {kind: relu, d_ff: 8}}
          decoder: {block: decoder, input: embedding, memory: encoder, n_layers: 2, placement: parallel,
                    attention: {kind: mha, n_heads: 2, position: rope, qk_norm: rmsnorm},
                    cross_attention: {kind: gqa, n_heads: 4, n_kv_heads: 2}, ffn: {kind: relu, d_ff: 8}}
        outputs: [narrow, reader, decoder, encoder]
    """,
}


def load(spec: Part) -> tfkit.Graph:
    return tfkit.load({**yaml.safe_load(TEXT), **spec}, plugins=PLUGINS)


def stacked(stack: Part, block: str = "decoder") -> tfkit.Graph:
    nodes = {"embedding": {"block": "embedding"}, "stack": {"block": block, "n_layers": 1, "ffn": FFN, **stack}}
    return load({"graph": nodes})


@pytest.mark.parametrize("name", STACKS)
def test_an_option_means_what_the_reference_says(name: str) -> None:
    graph = stacked(STACKS[name], "encoder" if "encoder" in name else "decoder")
    check_agreement(graph, *(example_inputs(graph, length=19, padding=side) for side in ("left", "right")))


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_means_what_the_reference_says(name: str) -> None:
    graph = load(yaml.safe_load(GRAPHS[name]))
    check_agreement(graph, *(example_inputs(graph, length=9, padding=side) for side in ("left", "right", "rows")))


@pytest.mark.parametrize("activation", ["gelu", "silu", "xielu"])
def test_an_activation_means_the_same_near_zero(activation: str) -> None:
    layer = {"block": "linear", "input": "image", "d_model": 24, "bias": False, "activation": activation}
    inputs = {"image": {"type": "features", "width": 5}}
    graph = tfkit.load({"tfkit": 1, "name": "small", "inputs": inputs, "graph": {"layer": layer}}, plugins=PLUGINS)
    check_agreement(graph, {"image": example_inputs(graph)["image"] * 1e-6})


@pytest.mark.parametrize("block", ["encoder", "decoder"])
@pytest.mark.parametrize("sizes", ["n_buckets: 32, max_distance: 100", "n_buckets: 12, max_distance: 20"])
def test_every_distance_has_its_bucket(sizes: str, block: str) -> None:
    """No distance is exactly the edge of a bucket, where the last bit of a logarithm would decide."""
    graph = stacked(heads(f"position: {{kind: t5, {sizes}}}"), block)
    check_agreement(graph, example_inputs(graph, batch=1, length=140))


def test_far_positions_are_exact() -> None:
    """Above 256, not every position is a number of bfloat16."""
    layers = {"block": "decoder", "n_layers": 1, "ffn": FFN, **heads("position: rope")}
    graph = load({"max_len": 300, "graph": {"embedding": {"block": "embedding"}, "stack": layers}})
    check_agreement(graph, example_inputs(graph, batch=1, length=270))


def test_a_query_without_a_key_reads_zeros() -> None:
    graph = load(yaml.safe_load(GRAPHS["joined values, memories, further tables"]))
    inputs = example_inputs(graph, length=9, padding="right")
    inputs["image_mask"][1] = False
    check_agreement(graph, inputs)


@pytest.mark.parametrize("position", ["rope", "alibi", "t5"])
@pytest.mark.parametrize("block", ["encoder", "decoder"])
def test_documents_of_a_row_do_not_see_each_other(position: str, block: str) -> None:
    mask = f"mask: {{left: 2, right: {int(block == 'encoder')}}}"
    graph = stacked(heads(f"position: {position}, temperature: {{beta: 1, original_max_len: 2}}, {mask}"), block)
    documents = torch.tensor([[1, 1, 1, 2, 2, 3, 3, 3, 3], [1, 1, 1, 1, 1, 1, 2, 0, 0]])
    pairs = (documents[:, :, None] == documents[:, None, :]) & (documents > 0)[:, None, :]
    check_agreement(graph, {**example_inputs(graph, batch=2, length=9), "tokens_mask": pairs})
