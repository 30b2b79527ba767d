"""Small models to profile, and a device with fixed limits, which need not be measured."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import tfkit
from tfkit.tools.common import loading_weights
from tfkit.tools.profile import models
from tfkit.tools.profile.models import profile as profile_one
from tfkit.tools.profile.result import Limits, Profile

DECODER = """\
tfkit: 1
name: small
d_model: 64
vocab_size: 200
max_len: 64
graph:
  embedding: {block: embedding, position: learned}
  decoder: {block: decoder, n_layers: 3, attention: {n_heads: 2}, ffn: {kind: gelu, d_ff: 128}}
  logits: {block: lm_head, tie: embedding}
"""
PAIR = """\
tfkit: 1
name: pair
d_model: 64
vocab_size: 200
inputs: [source, target]
graph:
  source_embedding: {block: embedding, input: source}
  encoder: {block: encoder, n_layers: 2, attention: {n_heads: 2}, ffn: {kind: swiglu, d_ff: 96}, norm: rmsnorm}
  target_embedding: {block: embedding, input: target, tie: source_embedding}
  decoder:
    block: decoder
    memory: encoder
    n_layers: 3
    attention: {n_heads: 2, position: t5}
    ffn: {kind: relu, d_ff: 128}
  logits: {block: lm_head}
"""
SHARED = """\
tfkit: 1
name: shared
d_model: 64
vocab_size: 200
max_len: 64
graph:
  embedding: {block: embedding, d_embed: 16, position: learned}
  encoder:
    block: encoder
    n_layers: 4
    layers: {groups: 1}
    placement: post
    attention: {n_heads: 2}
    ffn: {kind: gelu, d_ff: 128}
  logits: {block: lm_head}
"""
SPECS = {"small": DECODER, "pair": PAIR, "shared": SHARED}


@pytest.fixture(autouse=True, scope="module")
def _what_others_left() -> None:
    """Leave what other tests left out of the garbage collections of profiles, which begin with one."""
    gc.freeze()


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """What the device of these tests can do: 100 GFLOP/s and 10 GB/s."""
    names = Limits("a device", 1e11, 1e10, "measured")
    monkeypatch.setattr(models, "limits_of", lambda device, dtype: names)
    return names


@pytest.fixture
def profile() -> Callable[..., Profile]:
    """`profile("small", mode="decode")`: two steps of two sequences of 16 tokens."""

    def call(name: str, **options: Any) -> Profile:
        defaults = {"device": "cpu", "batch": 2, "length": 16, "steps": 2, "warmup": 1}
        return profile_one(tfkit.loads(SPECS[name]), **(defaults | options))

    return call


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`plant(path, change)` makes `change(output)` of what a module gives, in every model that is profiled."""

    def call(path: str, change: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> None:
        build = loading_weights.build

        def changed(graph: tfkit.Graph, **arguments: Any) -> fx.GraphModule:
            model = build(graph, **arguments, **options)
            module: nn.Module = model.get_submodule(path)
            forward = module.forward
            module.forward = lambda *args, **kwargs: change(forward(*args, **kwargs))
            return model

        monkeypatch.setattr(loading_weights, "build", changed)

    return call
