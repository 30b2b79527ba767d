"""Small models for the tests of tools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tfkit
from tfkit.tools.eject.proof import Alone

DECODER = """\
tfkit: 1
name: small
d_model: 16
vocab_size: 50
max_len: 8
graph:
  embedding: {block: embedding, position: learned}
  decoder: {block: decoder, n_layers: 2, attention: {n_heads: 2}, ffn: {kind: gelu, d_ff: 32}}
  logits: {block: lm_head, tie: embedding}
"""
CAPTIONS = """\
tfkit: 1
name: captions
d_model: 16
vocab_size: 40
max_len: 12
inputs:
  pixels: {type: features, width: 10}
  words: tokens
  types: {type: tokens, optional: true}
  known: lengths
graph:
  patches: {block: linear, input: pixels, d_model: 16}
  encoder: {block: encoder, input: patches, n_layers: 1, attention: {n_heads: 2}}
  embedding: {block: embedding, input: words, tables: {types: 3}}
  both: {block: concat, inputs: [encoder, embedding]}
  decoder: {block: decoder, input: both, prefix: known, n_layers: 1, attention: {n_heads: 2}}
  logits: {block: lm_head}
"""


@pytest.fixture
def small() -> tfkit.Graph:
    """A decoder of two layers, its head tied."""
    return tfkit.loads(DECODER)


@pytest.fixture
def captions() -> tfkit.Graph:
    """A model with inputs of every type."""
    return tfkit.loads(CAPTIONS)


@pytest.fixture(scope="session")
def alone() -> Iterator[Alone]:
    """One process without tfkit for all ejected files."""
    with Alone() as process:
        yield process
