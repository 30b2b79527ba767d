"""The small models that bugs are planted into."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import tfkit
from tfkit.graph.expand import Graph
from tfkit.tools.check.relative import relative
from tfkit.tools.check.small import with_component
from tfkit.tools.check.subject import Subject

from ...mixers.short_conv import DecayConfig, ShortConvConfig
from .retention import RetentionConfig
from .trained import LLAMA, publish

PLUGINS = tfkit.load_plugins()
for _config in (RetentionConfig, ShortConvConfig, DecayConfig):
    PLUGINS = with_component(PLUGINS, _config)
POOLED = """
tfkit: 1
name: pooled
d_model: 32
vocab_size: 97
max_len: 24
graph:
  embedding: {block: embedding, position: learned}
  encoder: {block: encoder, n_layers: 2, attention: {kind: mha, n_heads: 4}, ffn: {kind: gelu, d_ff: 64}}
  pooler: {block: pooler, select: last, activation: tanh}
  classes: {block: classifier, n_classes: 5}
"""
DECODER = """
tfkit: 1
name: NAME
d_model: 32
vocab_size: 97
max_len: 24
bias: false
norm: rmsnorm
graph:
  embedding: embedding
  decoder:
    block: decoder
    n_layers: 1
    attention: ATTENTION
    ffn: FFN
  logits: lm_head
"""
DECODERS = {
    "capped": ("{kind: mha, n_heads: 4, softcap: 2.0}", "{kind: swiglu, d_ff: 64}"),
    "dynamic": (
        "{kind: mha, n_heads: 4, position: {kind: rope, scaling: {kind: dynamic, factor: 2, original_max_len: 16}}}",
        "{kind: swiglu, d_ff: 64}",
    ),
    "mixture": (
        "{kind: mha, n_heads: 4}",
        "{kind: moe, n_experts: 4, n_experts_per_token: 2, d_ff: 16, router: {renormalize: true, bias: true}}",
    ),
    "scaled": ("{kind: mha, n_heads: 4, scale: 0.2}", "{kind: swiglu, d_ff: 64}"),
    "retention": ("{kind: retention, n_heads: 4, position: alibi}", "{kind: swiglu, d_ff: 64}"),
}
"""Attention and FFN of decoders that no shipped spec has as briefly."""
MIXERS = """
tfkit: 1
name: mixers
d_model: 32
vocab_size: 97
max_len: 24
graph:
  embedding: embedding
  decoder:
    block: decoder
    n_layers: 2
    mixer: short_conv
    ffn: {kind: swiglu, d_ff: 64}
    sublayers: [mixer, ffn, mixer]
    layers: {variants: {slow: {mixer: decay}}, pattern: [base, slow]}
  logits: lm_head
"""
TEXTS = {"mixers": MIXERS, "pooled": POOLED, "trained": LLAMA}
SHIPPED = {
    "bart": "bart_base",
    "bert": "bert_base",
    "bloom": "bloom_560m",
    "gemma2": "gemma2_2b",
    "gpt2": "gpt2",
    "llama": "llama3_8b",
    "longrope": "phi3_mini_128k",
    "mistral": "mistral_7b",
    "modernbert": "modernbert_base",
    "t5": "t5_small",
    "vaswani": "vaswani_base",
    "yarn": "olmo3_7b",
}


def subject(name: str) -> Subject:
    """A small model to check; one of them has trained weights."""
    return Subject(model(name), PLUGINS, weights=Path(folder().name, "model") if name == "trained" else None)


@cache
def folder() -> TemporaryDirectory[str]:
    """A folder with trained weights, as long as the tests run."""
    found = TemporaryDirectory()
    publish(Path(found.name, "model"))
    return found


@cache
def model(name: str) -> Graph:
    """A small model: the smallest relative of a shipped spec, or a text of this file."""
    if name in TEXTS:
        return tfkit.loads(TEXTS[name], plugins=PLUGINS)
    if name in DECODERS:
        attention, ffn = DECODERS[name]
        text = DECODER.replace("NAME", name).replace("ATTENTION", attention).replace("FFN", ffn)
        return tfkit.loads(text, plugins=PLUGINS)
    return relative(tfkit.load(SHIPPED[name], plugins=PLUGINS), PLUGINS).graph
