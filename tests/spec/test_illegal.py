"""Every invalid combination is rejected, with a reason, when the spec is read, before a tensor exists."""

from __future__ import annotations

import pytest

import tfkit
from tfkit.component import AttentionPositionConfig, InputPositionConfig

PLUGINS = tfkit.load_plugins(entry_points=False)
POSITIONS = PLUGINS.registry.kinds("position")

BASE = """
    tfkit: 1
    name: base
    d_model: 32
    vocab_size: 17
    max_len: 16
    inputs:
      tokens: tokens
      source: {type: features, width: 12}
      n: lengths
    graph:
      embedding: {block: embedding, input: tokens}
      encoder: {block: encoder, n_layers: 2, attention: {kind: mha, n_heads: 4}, ffn: {kind: gelu, d_ff: 24}}
      decoder:
        block: decoder
        input: embedding
        memory: source
        n_layers: 2
        attention: {kind: mha, n_heads: 4}
        ffn: {kind: gelu, d_ff: 24}
      prefix: {block: decoder, prefix: n, n_layers: 2, attention: {kind: mha, n_heads: 4}}
      logits: {block: lm_head, tie: embedding}
    outputs: [encoder, logits]
"""
ROPE = "graph.decoder.attention.position={kind: rope, "

ILLEGAL = {
    # positions and the heads that they turn or bias
    "rope, odd heads": (["graph.decoder.attention.d_head=7", "graph.decoder.attention.position=rope"], "must be even"),
    "rope wider than the head": ([ROPE + "width: 10}"], "at most the width of a head (8)"),
    "rope of odd width": ([ROPE + "width: 3}"], "must be even"),
    "dynamic rope of one pair": (
        [ROPE + "width: 2, scaling: {kind: dynamic, factor: 2, original_max_len: 8}}"],
        "width",
    ),
    "yarn without a series of frequencies": (
        [ROPE + "theta: 1, scaling: {kind: yarn, factor: 2, original_max_len: 8}}"],
        "theta",
    ),
    "yarn betas": (
        [ROPE + "scaling: {kind: yarn, factor: 2, original_max_len: 8, beta_fast: 1, beta_slow: 2}}"],
        "beta_slow",
    ),
    "llama3 factors": (
        [ROPE + "scaling: {kind: llama3, factor: 2, original_max_len: 8, low_freq_factor: 5}}"],
        "low_freq_factor",
    ),
    "t5 buckets": (["graph.decoder.attention.position={kind: t5, n_buckets: 6}"], "multiple of 4"),
    "t5 distance": (["graph.decoder.attention.position={kind: t5, max_distance: 16}"], "max_distance"),
    "sinusoidal, odd width": (
        ["graph.embedding.position=sinusoidal", "graph.embedding.d_embed=7", "graph.logits.d_embed=7"],
        "even",
    ),
    # attention
    "heads and width": (["graph.decoder.attention.n_heads=5"], "multiple of n_heads (5)"),
    "groups": (["graph.decoder.attention={kind: gqa, n_heads: 4, n_kv_heads: 3}"], "multiple of n_kv_heads (3)"),
    "more groups than heads": (
        ["graph.decoder.attention={kind: gqa, n_heads: 4, n_kv_heads: 8}"],
        "multiple of n_kv_heads (8)",
    ),
    "groups of mha": (["graph.decoder.attention.n_kv_heads=2"], "n_kv_heads"),
    "groups of mqa": (["graph.decoder.attention={kind: mqa, n_heads: 4, n_kv_heads: 2}"], "n_kv_heads"),
    # what a stack reads
    "a decoder that looks ahead": (
        ["graph.decoder.attention.mask={left: 2, right: 1}"],
        "must not attend to later keys",
    ),
    "a decoder without a limit": (["graph.decoder.attention.mask={}"], "must not attend to later keys"),
    "a variant that looks ahead": (
        ["graph.decoder.layers={variants: {wide: {attention: {mask: {right: 3}}}}, pattern: [base, wide]}"],
        "must not attend to later keys",
    ),
    "cross-attention, no memory": (
        ["graph.prefix.cross_attention={kind: mha, n_heads: 4}"],
        "cross-attention needs a memory",
    ),
    "a step of cross-attention, no memory": (
        ["graph.prefix.sublayers=[attention, cross_attention]"],
        "cross-attention needs a memory",
    ),
    "a memory that no step reads": (["graph.decoder.sublayers=[attention, ffn]"], "`memory` has no effect"),
    "a memory, no attention to take after": (["graph.decoder.attention=null"], "attention"),
    "a mask on cross-attention": (
        ["graph.decoder.cross_attention={kind: mha, n_heads: 4, mask: {left: 2}}"],
        "cross-attention attends to the full memory",
    ),
    "memory and prefix": (["graph.decoder.prefix=n"], "cannot have both a memory and a prefix"),
    "a prefix of tokens": (["graph.prefix.prefix=tokens"], "must be lengths"),
    "an encoder with a memory of tokens": (["graph.encoder.memory=tokens"], "`memory` must be a sequence"),
    "an encoder with a prefix": (["graph.encoder.prefix=n"], "prefix"),
    "an encoder with cross-attention": (
        ["graph.encoder.cross_attention={kind: mha, n_heads: 4}"],
        "cross",
    ),
    # layers
    "no sublayers": (["graph.encoder.attention=null", "graph.encoder.ffn=null"], "a layer must have a sublayer"),
    "an empty program": (
        ["graph.encoder.attention=null", "graph.encoder.ffn=null", "graph.encoder.sublayers=[]"],
        "a layer must have a sublayer",
    ),
    "a step without its part": (["graph.prefix.sublayers=[attention, ffn]"], "no `ffn`"),
    "a part without its step": (["graph.encoder.sublayers=[attention]"], "`ffn` has no effect"),
    "an input norm that nothing reads": (["graph.encoder.input_norm=true"], "`input_norm` has no effect"),
    "parallel, and steps that do not read it": (
        [
            "graph.encoder.placement=parallel",
            "graph.encoder.sublayers=[{sublayer: attention, reads: previous}, {sublayer: ffn, reads: previous}]",
            "graph.encoder.input_norm=true",
        ],
        "`input_norm` has no effect",
    ),
    "a variant of another width": (
        ["graph.encoder.layers={variants: {wide: {d_model: 64}}, pattern: [base, wide]}"],
        "must have the width of its stack",
    ),
    "groups that do not divide": (
        ["graph.encoder.n_layers=3", "graph.encoder.layers={groups: 2}"],
        "multiple of groups (2)",
    ),
    # norms, embeddings, heads
    "a bias without a scale": (["graph.encoder.norm={kind: layernorm, scale: false}"], "bias"),
    "tables of nothing": (["graph.embedding.tables={}"], "tables"),
    "a tied table of another width": (["graph.embedding.d_embed=8"], "must have 17 rows of width 32"),
    "stages in part": (
        ["graph.embedding.scale=2.0", "graph.embedding.norm=layernorm", "graph.embedding.stages=[norm]"],
        "is missing scale",
    ),
    "a memory of tokens": (["graph.decoder.memory=tokens"], "must be a sequence"),
    "a stack of another width": (["graph.encoder.d_model=64"], "must have the width of d_model"),
}


def test_the_base_is_legal() -> None:
    model = tfkit.build(tfkit.loads(BASE, plugins=PLUGINS), device="meta")
    assert dict(model.named_children()).keys() == {"embedding", "encoder", "decoder", "prefix", "logits"}


@pytest.mark.parametrize("case", ILLEGAL)
def test_it_is_refused_when_it_is_read(case: str) -> None:
    sets, reason = ILLEGAL[case]
    with pytest.raises(tfkit.SpecError) as refused:
        tfkit.loads(BASE, sets=sets, plugins=PLUGINS)
    messages = [diagnostic.message for diagnostic in refused.value.diagnostics]
    assert any(reason in message for message in messages), messages
    assert len(messages) == 1


@pytest.mark.parametrize("kind", POSITIONS)
def test_a_position_in_the_wrong_place_is_refused(kind: str) -> None:
    acts_inside = issubclass(POSITIONS[kind].config, AttentionPositionConfig)
    assert acts_inside != issubclass(POSITIONS[kind].config, InputPositionConfig)
    invalid = "embedding" if acts_inside else "decoder.attention"
    with pytest.raises(tfkit.SpecError, match=f"`{kind}`"):
        tfkit.loads(BASE, sets=[f"graph.{invalid}.position={kind}"], plugins=PLUGINS)


@pytest.mark.parametrize("kind", POSITIONS)
def test_no_position_goes_into_cross_attention(kind: str) -> None:
    sets = ["graph.decoder.cross_attention={kind: mha, n_heads: 4, position: " + kind + "}"]
    with pytest.raises(tfkit.SpecError, match=r"cross-attention has no positions|is added to the embedding"):
        tfkit.loads(BASE, sets=sets, plugins=PLUGINS)
