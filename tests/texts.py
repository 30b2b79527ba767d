"""Texts of two small specs, and of two plugins that fail."""

TINY = """\
tfkit: 1
name: tiny
description: A decoder of two layers
d_model: 16
vocab_size: 50
max_len: 8
dropout: 0.1
graph:
  embedding: {block: embedding, position: learned}
  decoder:
    block: decoder
    n_layers: 2
    attention: {kind: gqa, n_heads: 4, n_kv_heads: 2}
    ffn: {kind: gelu, d_ff: 32}
  logits: {block: lm_head, tie: embedding}
"""
PAIR = """\
tfkit: 1
name: pair
d_model: 16
vocab_size: 40
inputs: [source, target]
graph:
  source_embedding: {block: embedding, input: source}
  encoder: {block: encoder, n_layers: 1, attention: {n_heads: 2}, ffn: {kind: swiglu, d_ff: 24}, norm: rmsnorm}
  target_embedding: {block: embedding, input: target, tie: source_embedding}
  decoder:
    block: decoder
    memory: encoder
    n_layers: 3
    placement: post
    attention: {n_heads: 2, position: t5}
    ffn: {kind: relu, d_ff: 32}
    layers:
      variants: {wide: {ffn: {d_ff: 48}}}
      pattern: [base, wide]
  logits: {block: lm_head, bias: true}
"""
BROKEN_PLUGIN = "import there_is_no_such_module\n"
FAILING_PLUGIN = '''
from typing import Literal
import tfkit
from torch import nn

class Fails(nn.Module):
    def forward(self, x):
        return x @ x

class FailsConfig(tfkit.FFNConfig):
    """An FFN whose forward fails."""
    kind: Literal["fails"] = "fails"
    def build(self, make):
        return Fails()

@tfkit.hookimpl
def tfkit_register(register):
    register(FailsConfig)
'''
