"""Value residual: each layer against a formula in torch, multi-head attention as its limit, decoding, and errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tfkit
from tfkit.testing import check_model

PLUGINS = tfkit.load_plugins()
SPEC = """
tfkit: 1
name: small
d_model: 16
vocab_size: 23
max_len: 64
graph:
  embedding: {block: embedding}
  decoder:
    block: decoder
    n_layers: 3
    attention: {kind: value_residual, n_heads: 2, position: rope}
    ffn: {kind: swiglu, d_ff: 24}
    layers: {variants: {first: {attention: {first: true}}}, pattern: [first, base*2]}
  logits: {block: lm_head}
"""
TOKENS = torch.arange(18).view(2, 9) * 7 % 23


def graph_of(**sets: Any) -> tfkit.Graph:
    return tfkit.loads(SPEC, plugins=PLUGINS, sets={f"decoder.{name}": value for name, value in sets.items()})


def built(**sets: Any) -> torch.fx.GraphModule:
    """Build the small model, with weights of the mixes that differ."""
    model = tfkit.build(graph_of(**sets), seed=1).eval()
    with torch.no_grad():
        for number in (1, 2):
            model.get_parameter(f"decoder.layers.{number}.attention.mix").copy_(torch.tensor([0.3 * number, 0.8]))
    return model


def heads(module: nn.Module, x: Tensor) -> Tensor:
    """Return queries, keys and values of an attention without positions, [3, b, h, t, d]."""
    return torch.stack([y.unflatten(2, (2, 8)).transpose(1, 2) for y in module.qkv(x).chunk(3, dim=2)])


@torch.no_grad()
def test_each_layer_mixes_its_values_with_the_values_of_the_first_layer() -> None:
    model = built(**{"attention.position": None})
    calls: dict[int, tuple[Tensor, Any]] = {}
    for number, layer in enumerate(model.decoder.layers):
        layer.attention.register_forward_hook(lambda _, args, y, number=number: calls.update({number: (args[0], y)}))
    model(TOKENS)
    first = heads(model.decoder.layers[0].attention, calls[0][0])[2]
    for number, (x, result) in calls.items():
        attention = model.decoder.layers[number].attention
        q, k, v = heads(attention, x)
        if number:
            v = attention.mix[0] * first + attention.mix[1] * v
        scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
        expected = attention.output((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))
        assert ((result if number else result[0]) - expected).abs().max() <= 1e-6


@torch.no_grad()
def test_without_the_values_of_the_first_layer_it_is_multi_head_attention() -> None:
    model = built()
    weights = {name: value for name, value in model.state_dict().items() if not name.endswith(".mix")}
    for number in (1, 2):
        model.get_parameter(f"decoder.layers.{number}.attention.mix").copy_(torch.tensor([0.0, 1.0]))
    plain = tfkit.build(graph_of(layers=None, attention={"kind": "mha", "n_heads": 2, "position": "rope"})).eval()
    plain.load_state_dict({name.replace("attention.qkv", "attention.project.qkv"): w for name, w in weights.items()})
    torch.testing.assert_close(model(TOKENS), plain(TOKENS))


@torch.no_grad()
def test_a_cache_contains_mixed_values() -> None:
    model = built()
    cached = tfkit.CachedModel(model, length=9)
    actual = torch.cat([cached(TOKENS[:, :4]), cached(TOKENS[:, 4:5]), cached(TOKENS[:, 5:])], dim=1)
    torch.testing.assert_close(actual, model(TOKENS))


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"layers": None}, "`attention` of layer 0 takes `values`, but no earlier layer gives it"),
        ({"layers.pattern": ["first"]}, "`attention` gives `values`, which has no effect: no later layer takes it"),
        ({"layers.variants.first.attention.n_heads": 4}, "`n_heads` must be equal in the layer that gives values"),
    ],
)
def test_errors(sets: dict[str, Any], message: str) -> None:
    with pytest.raises(tfkit.SpecError, match=re.escape(message)):
        graph_of(**sets)


def test_it_is_its_formula() -> None:
    check_model(graph_of(**{"attention.qk_norm": "rmsnorm"}), plugins=PLUGINS, only=["meaning"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fields", [{}, {"position": "alibi", "bias": False}, {"mask": {"left": 4, "right": 0}}])
def test_it_has_every_property(fields: dict[str, Any]) -> None:
    """Exports, which take most of the time, only without fields: positions and masks are not the kind's."""
    graph = graph_of(**{f"attention.{name}": value for name, value in fields.items()})
    if not fields:
        check_model(graph, plugins=PLUGINS, level="full")
    else:
        check_model(graph, plugins=PLUGINS)
        check_model(graph, plugins=PLUGINS, only=["cached-step", "capture", "eject"])
