"""The small models that bugs are planted into."""

from __future__ import annotations

from functools import cache

import tfkit
from tfkit.graph.expand import Graph
from tfkit.tools.check.relative import relative

PLUGINS = tfkit.load_plugins(entry_points=False)
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
SHIPPED = {
    "bart": "bart_base",
    "bert": "bert_base",
    "bloom": "bloom_560m",
    "gemma2": "gemma2_2b",
    "gemma3": "gemma3_1b",
    "gpt2": "gpt2",
    "llama": "llama3_8b",
    "longrope": "phi3_mini_128k",
    "mistral": "mistral_7b",
    "modernbert": "modernbert_base",
    "t5": "t5_small",
    "yarn": "olmo3_7b",
}


@cache
def model(name: str) -> Graph:
    """A small model: the smallest relative of a shipped spec, or an encoder with a pooler."""
    if name == "pooled":
        return tfkit.loads(POOLED, plugins=PLUGINS)
    return relative(tfkit.load(SHIPPED[name], plugins=PLUGINS), PLUGINS).graph
