"""Small models in which bugs are planted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from torch import Tensor, nn

import tfkit
from tfkit.checkpoint.weight_map import tensor_locations_of
from tfkit.errors import Invalid
from tfkit.graph.expand import Graph
from tfkit.tools.check.check import outcomes_of
from tfkit.tools.check.components import with_component
from tfkit.tools.check.measure import Outcome
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.check.properties.all import properties_of
from tfkit.tools.check.reduced import reduced_model

from ...mixers.gated_conv import DecayConfig, GatedConvConfig


class Retention(nn.Module):
    """Attention without softmax, as recurrent layers have it: a state that decays, written as a sum over tokens.

    The decay is the exponential of what ALiBi adds to scores: https://arxiv.org/abs/2307.08621.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        weights = q @ k.mT * self.scale
        return (weights if mask is None else weights * mask.exp()) @ v


class RetentionConfig(tfkit.MultiHeadConfig):
    """Builds it."""

    kind: Literal["retention"] = "retention"  # type: ignore[assignment]

    def build_core(self, make: tfkit.Make, *, causal: bool) -> nn.Module:
        return Retention(self.head_width**-0.5)

    def check(self) -> None:
        super().check()
        if self.sinks:
            raise Invalid("sinks", "retention has no softmax")


LLAMA = """
extends: llama3_8b
name: small
d_model: 64
vocab_size: 97
graph:
  decoder: {n_layers: 5, attention: {n_heads: 4, n_kv_heads: 2}, ffn: {d_ff: 96}}
"""


def publish(folder: Path) -> None:
    """Write a published folder whose weights are balanced."""
    model = tfkit.build(tfkit.loads(LLAMA))
    balanced(model)
    tfkit.save(model, folder, layout="huggingface")


def balanced(model: torch.fx.GraphModule) -> None:
    """Give each unit between two tensors of a layer a size of its own on both sides; units of a gate lean one way."""
    state, actual = model.state_dict(), tensor_locations_of(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for number in range(5):
            part = {
                name.split(".", 3)[3]: tensor.view(state) for name, tensor in actual.items() if f"s.{number}." in name
            }
            up, gate, down = (part[f"ffn.{name}.weight"] for name in ("up", "gate", "down"))
            size = (torch.randn(len(up), generator=generator) * 0.7).exp()
            up.mul_(size[:, None])
            gate.mul_(size[:, None]).add_(gate.std())
            down.mul_(size)
            value, output = part["attention.project.v.weight"], part["attention.output.weight"]
            size = (torch.randn(len(value), generator=generator) * 0.7).exp()
            value.mul_(size[:, None])
            output.mul_(size.view(2, 1, 16).expand(2, 2, 16).flatten())


PROPERTIES = properties_of(tfkit.load_plugins(entry_points=False))
"""The properties of tfkit, without installed plugins."""


def measured(checked: ModelUnderTest, red: str) -> Outcome:
    """The outcome of one property of tfkit."""
    (outcome,) = outcomes_of(checked, PROPERTIES.chosen([red]))
    return outcome


def faults(checked: ModelUnderTest, only: Sequence[str] = ()) -> dict[str, str]:
    """The details of the broken quick properties, of tfkit and of plugins, by name."""
    properties = properties_of(checked.plugins).chosen(only, "quick")
    return {
        outcome.name: outcome.detail
        for outcome in outcomes_of(checked, properties, strict=True)
        if outcome.status == "failed"
    }


PLUGINS = tfkit.load_plugins()
for _config in (RetentionConfig, GatedConvConfig, DecayConfig):
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
    "normed": (
        "{kind: mqa, n_heads: 4, position: rope, qk_norm: rmsnorm, qk_norm_weight: per_head, gate: sigmoid, "
        "inner_norm: rmsnorm}",
        "{kind: swiglu, d_ff: 64}",
    ),
    "rotated": ("{kind: mha, n_heads: 4, position: rope, qk_norm_rotated: rmsnorm}", "{kind: swiglu, d_ff: 64}"),
    "slopes": ("{kind: mha, n_heads: 6, d_head: 8, position: alibi}", "{kind: swiglu, d_ff: 64}"),
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
    mixer: gated_conv
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
    "twins": "sentence_bert_base",
    "vaswani": "vaswani_base",
    "yarn": "olmo3_7b",
}


def subject(name: str) -> ModelUnderTest:
    """A small model to check; one of them has trained weights."""
    return ModelUnderTest(model(name), PLUGINS, weights=Path(folder().name, "model") if name == "trained" else None)


@cache
def folder() -> TemporaryDirectory[str]:
    """A folder with trained weights, as long as the tests run."""
    actual = TemporaryDirectory()
    publish(Path(actual.name, "model"))
    return actual


@cache
def model(name: str) -> Graph:
    """A small model: the reduced model of a shipped spec, or a text of this file."""
    if name in TEXTS:
        return tfkit.loads(TEXTS[name], plugins=PLUGINS)
    if name in DECODERS:
        attention, ffn = DECODERS[name]
        text = DECODER.replace("NAME", name).replace("ATTENTION", attention).replace("FFN", ffn)
        return tfkit.loads(text, plugins=PLUGINS)
    return reduced_model(tfkit.load(SHIPPED[name], plugins=PLUGINS), PLUGINS).graph
