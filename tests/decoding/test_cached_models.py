"""Incremental decoding of unpublished models: layers that differ, share weights, repeat, or have several memories."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import yaml

import tfkit
from tfkit.testing import check_cached, check_cached_step, example_inputs

from ..sampling import chosen, spread
from .small import build, spec_of

LENGTH = 13

STACKS: dict[str, dict[str, Any]] = yaml.safe_load("""
local_and_global:
  n_layers: 5
  attention: {kind: gqa, n_heads: 4, n_kv_heads: 2, position: rope}
  layers:
    variants:
      local: {attention: {mask: {left: 2, right: 0}, position: {theta: 100}}}
      global: {attention: {position: {theta: 1000000}}}
    pattern: [local*2, global]
several_windows:
  n_layers: 3
  attention: {n_heads: 4, position: rope}
  layers:
    variants:
      narrow: {attention: {mask: {left: 1, right: 0}}}
      wide: {attention: {mask: {left: 4, right: 0}}}
    pattern: [base, narrow, wide]
several_heads:
  n_layers: 3
  attention: {n_heads: 4}
  layers:
    variants: {other: {attention: {kind: gqa, n_heads: 4, n_kv_heads: 2, d_head: 6}}}
    pattern: [base, other, base]
shared_weights:
  n_layers: 6
  attention: {n_heads: 4, position: rope}
  layers: {groups: 2}
shared_weights_of_two_kinds:
  n_layers: 6
  attention: {n_heads: 4, position: t5}
  layers: {groups: 2, variants: {local: {attention: {mask: {left: 2, right: 0}}}}, pattern: [base, local]}
looped:
  n_layers: 6
  attention: {n_heads: 4, position: t5}
  layers:
    groups: 2
    order: looped
    variants: {local: {attention: {mask: {left: 2, right: 0}}}}
    pattern: [base, local]
layers_without_attention:
  n_layers: 3
  attention: {n_heads: 4, position: rope}
  layers: {variants: {plain: {attention: null}}, pattern: [plain, base, plain]}
no_attention: {}
no_positions:
  attention: {n_heads: 4}
two_attentions:
  attention: {n_heads: 4, position: rope, mask: {left: 2, right: 0}}
  sublayers: [attention, ffn, attention]
causal_encoder:
  block: encoder
  attention: {n_heads: 4, position: t5, mask: {left: 2, right: 0}}
parallel:
  attention: {n_heads: 4, position: rope}
  placement: parallel
parallel_two_norms:
  attention: {n_heads: 4, position: rope}
  placement: parallel_two_norms
near_and_far_buckets:
  attention: {n_heads: 4, position: {kind: t5, n_buckets: 8, max_distance: 10}}
dynamic_scaling:
  attention: {n_heads: 4, position: {kind: rope, scaling: {kind: dynamic, factor: 4.0, original_max_len: 4}}}
softcap_in_a_window:
  attention: {kind: gqa, n_heads: 4, n_kv_heads: 2, softcap: 2.0, mask: {left: 2, right: 0}}
plugin_in_a_window:
  attention: {kind: additive, n_heads: 4, mask: {left: 2, right: 0}}
plugin_with_a_bias:
  attention: {kind: additive, n_heads: 4, position: t5}
""")
STACKS |= {
    norm: {"attention": {"n_heads": 4, norm: "rmsnorm", "position": "rope"}}
    for norm in ("qk_norm", "qk_norm_full", "qk_norm_rotated")
}
STACKS |= {
    f"window_{left + 1}_{position}": {
        "attention": {"kind": "mqa", "n_heads": 4, "position": position, "mask": {"left": left, "right": 0}}
    }
    for left in (0, 1, 4, 100)
    for position in ("rope", "alibi", "t5")
}
WITH_MEMORY: dict[str, dict[str, Any]] = yaml.safe_load("""
sublayers:
  attention: {n_heads: 4, position: rope}
  cross_attention: {kind: mqa, n_heads: 4}
  sublayers: [attention, attention, cross_attention, ffn, cross_attention]
cross_attention_alone:
  cross_attention: {n_heads: 4}
several_heads:
  n_layers: 3
  attention: {n_heads: 4, position: rope}
  cross_attention: {kind: mqa, n_heads: 4}
  layers: {variants: {other: {cross_attention: {kind: mha, n_heads: 2}}}, pattern: [other, base, other]}
shared_weights:
  n_layers: 4
  attention: {n_heads: 4, position: rope}
  layers: {groups: 2}
looped:
  n_layers: 4
  attention: {n_heads: 4, position: rope}
  layers: {groups: 2, order: looped}
parallel:
  attention: {n_heads: 4, position: rope}
  placement: parallel
plugin:
  attention: {kind: additive, n_heads: 4}
qk_norm:
  attention: {kind: gqa, n_heads: 4, n_kv_heads: 2, qk_norm: rmsnorm}
qk_norm_full:
  attention: {kind: gqa, n_heads: 4, n_kv_heads: 2, qk_norm_full: rmsnorm}
qk_norm_rotated:
  attention: {kind: gqa, n_heads: 4, n_kv_heads: 2, qk_norm_rotated: rmsnorm}
""")
WITH_PREFIX: dict[str, dict[str, Any]] = yaml.safe_load("""
rope: {attention: {n_heads: 4, position: rope}}
alibi: {attention: {n_heads: 4, position: alibi}}
window: {attention: {n_heads: 4, position: rope, mask: {left: 2, right: 0}}}
""")
GRAPHS: dict[str, dict[str, Any]] = yaml.safe_load("""
token_types:
  inputs: [tokens, types]
  graph:
    embedding: &types {block: embedding, input: tokens, tables: {types: 3}, position: learned}
    decoder: &decoder
      block: decoder
      n_layers: 2
      attention: {n_heads: 4, position: rope}
      ffn: {kind: gelu, d_ff: 24}
    logits: {block: lm_head}
token_types_in_front:
  inputs: [types, tokens]
  graph: {embedding: *types, decoder: *decoder, logits: {block: lm_head}}
optional_token_types:
  inputs: {types: {type: tokens, optional: true}, tokens: tokens}
  graph: {embedding: *types, decoder: *decoder, logits: {block: lm_head}}
narrow_table:
  graph:
    embedding:
      block: embedding
      d_embed: 8
      position: sinusoidal
      scale: sqrt_d_model
      stages: [scale, project, position]
    decoder: *decoder
    logits: {block: lm_head, d_embed: 8, tie: embedding}
features:
  inputs: {x: {type: features, width: 16}}
  graph:
    decoder: {<<: *decoder, d_model: 16}
    norm: {block: norm, norm: rmsnorm}
sum:
  inputs: [first, second]
  graph:
    a: {block: embedding, input: first, position: learned}
    b: {block: embedding, input: second, position: sinusoidal}
    sum: {block: add, inputs: [a, b]}
    decoder: *decoder
    logits: {block: lm_head}
side_by_side:
  inputs: [first, second]
  graph:
    a: {block: embedding, input: first, position: learned}
    b: {block: embedding, input: second, d_model: 8}
    both: {block: concat, inputs: [a, b], along: width}
    decoder: {<<: *decoder, d_model: 24}
    narrow: {block: linear}
    logits: {block: lm_head}
memory_through_a_linear:
  inputs: {tokens: tokens, source: {type: features, width: 12}}
  graph:
    memory: {block: linear, input: source}
    embedding: {block: embedding, input: tokens}
    decoder: {<<: *decoder, memory: memory}
    logits: {block: lm_head}
memory_is_an_embedding:
  inputs: [source, target]
  graph:
    memory: {block: embedding, input: source, position: learned}
    embedding: {block: embedding, input: target, tie: memory}
    decoder: {<<: *decoder, memory: memory}
    logits: {block: lm_head, tie: memory}
memory_of_two:
  inputs: {tokens: tokens, a: {type: features, width: 16}, b: {type: features, width: 16}}
  graph:
    memory: {block: concat, inputs: [a, b]}
    embedding: {block: embedding, input: tokens}
    decoder: {<<: *decoder, memory: memory}
    logits: {block: lm_head}
memory_of_two_encoded:
  inputs: {tokens: tokens, a: {type: features, width: 16}, b: {type: features, width: 16}}
  graph:
    both: {block: concat, inputs: [a, b]}
    memory: {block: encoder, n_layers: 1, attention: {n_heads: 4, position: rope}}
    embedding: {block: embedding, input: tokens}
    decoder: {<<: *decoder, memory: memory}
    logits: {block: lm_head}
several_outputs:
  inputs: {tokens: tokens, source: {type: features, width: 12}}
  outputs: [first, second, classes, middle]
  graph:
    embedding: {block: embedding, input: tokens}
    begin: {<<: *decoder, memory: source}
    middle: {<<: *decoder, attention: {n_heads: 2, position: t5, mask: {left: 2, right: 0}}}
    end: {<<: *decoder, memory: source}
    first: {block: lm_head, input: end}
    second: {block: lm_head, input: end}
    classes: {block: classifier, input: begin, n_classes: 3}
""")
SOURCE = {"type": "features", "width": 12}
SPECS = {name: spec_of(fields) for name, fields in STACKS.items()}
SPECS |= {
    f"memory_{name}": spec_of({**stack, "memory": "source"}, source=SOURCE) for name, stack in WITH_MEMORY.items()
}
SPECS |= {
    f"prefix_{name}": spec_of({**stack, "prefix": "known"}, known="lengths") for name, stack in WITH_PREFIX.items()
}
for name, graph in GRAPHS.items():
    sizes = {} if name == "features" else {"d_model": 16, "vocab_size": 23, "max_len": 40}
    SPECS[name] = yaml.safe_dump({"tfkit": 1, "name": "m", **sizes, **graph}, sort_keys=False)


COVERED_SPECS = {
    f"window_{left + 1}_{position}" for left, position in ((0, "rope"), (0, "t5"), (4, "alibi"), (4, "t5"))
}
COVERED_SPECS |= {
    "window_2_alibi",
    "window_101_rope",
    "window_101_alibi",
    "qk_norm_full",
    "qk_norm_rotated",
    "memory_qk_norm",
}
COVERED_SPECS |= {
    "memory_qk_norm_full",
    "memory_parallel",
    "parallel",
    "several_windows",
    "shared_weights",
    "token_types",
}
"""What others show too: windows and positions are each in some, steps of attention in test_attention_steps."""


@pytest.mark.parametrize(
    "name",
    chosen(
        SPECS, ["looped", "memory_of_two_encoded", *spread([name for name in SPECS if name not in COVERED_SPECS], 3)]
    ),
)
def test_pieces(name: str) -> None:
    model = build(SPECS[name])
    check_cached(model, example_inputs(model.meta["graph"], length=LENGTH))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SPECS if name not in COVERED_SPECS])
def test_every_step(name: str) -> None:
    model = build(SPECS[name])
    check_cached_step(model, example_inputs(model.meta["graph"], length=LENGTH))


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["local_and_global", "shared_weights_of_two_kinds"])
def test_the_real_compiler(name: str) -> None:
    model = build(SPECS[name])
    ids = example_inputs(model.meta["graph"], length=LENGTH)["tokens"]
    cached = tfkit.CachedModel(model, length=LENGTH, compile=True)
    for rows in (ids, ids.flip(0)):
        cached.start(3)
        actual = torch.cat([cached(piece) for piece in (rows[:, :5], *rows[:, 5:].split(1, dim=1))], dim=1)
        torch.testing.assert_close(actual, model(rows), atol=1e-5, rtol=1e-5)
