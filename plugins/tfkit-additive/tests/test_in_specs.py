"""Additive attention in specs: with other fields, masks, cross-attention, dropout, seeds."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tfkit_additive import Additive, AdditiveConfig
from torch import Tensor

import tfkit
from tfkit.testing import check_component

PLUGINS = tfkit.load_plugins(plugin_dirs=[Path(__file__).parents[1]], entry_points=False)


def filled(core: Additive) -> Additive:
    torch.manual_seed(0)
    core.reset_parameters()
    return core


@pytest.mark.parametrize(
    "fields",
    [{"position": "alibi"}, {"position": "t5"}, {"bias": False, "qk_norm": "rmsnorm"}],
)
@pytest.mark.slow
def test_it_keeps_them_with_other_fields(fields: dict[str, Any]) -> None:
    check_component(AdditiveConfig, fields=fields, within=["decoder"])


def naive(core: Additive, q: Tensor, k: Tensor, v: Tensor, readable: Tensor, bias: Tensor) -> Tensor:
    """The same in plain numbers; `readable` [b, h, q, k] says what is read, `bias` is added to the scores."""
    out = torch.zeros_like(q)
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        keys = [j for j in range(k.size(2)) if readable[b, h, i, j]]
        scores = [
            sum(math.tanh(q[b, h, i, d] + k[b, h, j, d]) * core.weight[h, d].item() for d in range(q.size(3)))
            + bias[b, h, i, j].item()
            for j in keys
        ]
        total = sum(math.exp(score) for score in scores)
        for j, score in zip(keys, scores, strict=True):
            out[b, h, i] += math.exp(score) / total * v[b, h, j]
    return out


@pytest.mark.parametrize("n_keys", [4, 6], ids=["self", "cross"])
@pytest.mark.parametrize("how", ["bool", "float"])
def test_masks(n_keys: int, how: str) -> None:
    core = filled(Additive(n_heads=2, d_head=3, dropout=0.0))
    q, k, v = torch.randn(2, 2, 4, 3), torch.randn(2, 2, n_keys, 3), torch.randn(2, 2, n_keys, 3)
    readable = torch.rand(2, 1, 4, n_keys) < 0.6
    readable[1, 0, 2] = False  # a query that may read nothing
    readable = readable.expand(2, 2, 4, n_keys)
    bias = torch.randn(2, 2, 4, n_keys) if how == "float" else torch.zeros(2, 2, 4, n_keys)
    mask = bias.masked_fill(~readable, -math.inf) if how == "float" else readable
    actual = core(q, k, v, mask)
    torch.testing.assert_close(actual, naive(core, q, k, v, readable, bias))
    assert not actual[1, :, 2].any()


def test_dropout_is_for_training_alone() -> None:
    core = filled(Additive(n_heads=2, d_head=3, dropout=0.5))
    q, k, v = torch.randn(3, 1, 2, 4, 3).unbind()
    torch.manual_seed(1)
    assert not torch.equal(core(q, k, v, None), core(q, k, v, None))
    core.eval()
    assert torch.equal(core(q, k, v, None), core(q, k, v, None))


SPEC = """
tfkit: 1
name: m
d_model: 16
vocab_size: 11
inputs: [source, target]
graph:
  memory: {block: embedding, input: source, d_model: 24}
  embedding: {block: embedding, input: target}
  decoder:
    block: decoder
    memory: memory
    n_layers: 1
    attention: {kind: additive, n_heads: 8}
  logits: {block: lm_head}
"""


def test_a_spec_asks_for_it_by_name() -> None:
    model = tfkit.build(tfkit.loads(SPEC, plugins=PLUGINS))
    layer = model.get_submodule("decoder.layers.0")
    for name, width in {"attention": 16, "cross_attention": 24}.items():
        assert type(layer.get_submodule(f"{name}.core")).__name__ == "Additive"
        assert layer.get_submodule(f"{name}.core").weight.shape == (8, 2)
        assert model.meta["components"][f"decoder.layers.0.{name}"].kind_name() == "additive"
        projected = sum(p.numel() for p in layer.get_submodule(f"{name}.project").parameters())
        assert projected == 16 * 17 + 2 * 16 * (width + 1)
    source, target = torch.randint(11, (2, 5)), torch.randint(11, (2, 3))
    assert model(source, target).shape == (2, 3, 11)


def test_the_core_has_the_dropout_of_the_spec() -> None:
    layer = tfkit.build(tfkit.loads(SPEC, plugins=PLUGINS, sets=["dropout=0.3"])).get_submodule("decoder.layers.0")
    assert [layer.get_submodule(f"{name}.core").dropout for name in ("attention", "cross_attention")] == [0.3, 0.3]


def test_its_weights_can_be_seen() -> None:
    model = tfkit.build(tfkit.loads(SPEC, plugins=PLUGINS), attention_backend="flex")
    tokens = torch.randint(11, (2, 5))
    actual = tfkit.attention_weights(model, tokens, tokens[:, :3])
    shapes = {"decoder.layers.0.attention": (2, 8, 3, 3), "decoder.layers.0.cross_attention": (2, 8, 3, 5)}
    assert {name: weights.shape for name, weights in actual.items()} == shapes
    assert not actual["decoder.layers.0.attention"].triu(1).any()
    for weights in actual.values():
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 8, 3))


def test_another_seed_gives_other_weights_within_the_bound() -> None:
    weights = [
        tfkit.build(tfkit.loads(SPEC, plugins=PLUGINS), seed=seed).state_dict()[
            "decoder.layers.0.attention.core.weight"
        ]
        for seed in (0, 0, 1)
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    bound = 2**-0.5  # of the width of a head, not of the number of heads
    assert bound / 2 < weights[0].abs().max() <= bound


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("scale", "0.5", "additive attention has no `scale`"),
        ("softcap", "30", "additive attention has no `softcap`"),
        ("sinks", "true", "additive attention has no `sinks`"),
        ("position", "rope", "cannot use rotary positions"),
        ("n_kv_heads", "2", "unknown key `n_kv_heads`"),
    ],
)
def test_what_makes_no_sense_is_refused(field: str, value: str, reason: str) -> None:
    spec = SPEC.replace("n_heads: 8}", f"n_heads: 8, {field}: {value}}}")
    with pytest.raises(tfkit.SpecError, match=reason) as raised:
        tfkit.loads(spec, plugins=PLUGINS)
    assert f"(graph.decoder.attention.{field}" in str(raised.value)
