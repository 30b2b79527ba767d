"""The layout operation, compared with the code of transformers that splits fused weights."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from .both_ways import PER_HEAD, apply


def huggingface(model_type):
    return importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")


def config_of(model_type, name, **fields):
    module = importlib.import_module(f"transformers.models.{model_type}.configuration_{model_type}")
    config = getattr(module, name)(**fields)
    config._attn_implementation = "eager"
    return config


def rows(states):
    """[1, h, t, d] of the identity matrix as input: the projection's rows, head by head."""
    return states[0].transpose(1, 2).flatten(0, 1)


def heads_seen(monkeypatch, model_type, attention, linear, **inputs):
    """The rows of queries, keys and values that the attention computes, and the weight that holds them all."""
    calls = []

    def spy(self, query, key, value, *args, **kwargs):
        calls.extend((query, key, value))
        return query.transpose(1, 2), None

    monkeypatch.setattr(huggingface(model_type), "eager_attention_forward", spy)
    torch.nn.init.normal_(linear.weight)
    if linear.bias is not None:
        torch.nn.init.zeros_(linear.bias)
    with torch.no_grad():
        attention(torch.eye(linear.in_features)[None], attention_mask=None, **inputs)
    return torch.cat([rows(states) for states in calls]), linear.weight.detach()


def no_rotation(width):
    return torch.ones(1, 16, width), torch.zeros(1, 16, width)


def test_gpt_neox(monkeypatch):
    config = config_of("gpt_neox", "GPTNeoXConfig", hidden_size=16, num_attention_heads=4)
    attention = huggingface("gpt_neox").GPTNeoXAttention(config, layer_idx=0)
    inputs = {"position_embeddings": no_rotation(attention.rotary_ndims)}
    expected, fused = heads_seen(monkeypatch, "gpt_neox", attention, attention.query_key_value, **inputs)
    assert torch.equal(apply(PER_HEAD, fused, q=1, k=1, v=1, d=4)[0], expected)


def test_phi3(monkeypatch):
    config = config_of("phi3", "Phi3Config", hidden_size=16, num_attention_heads=4, num_key_value_heads=2)
    attention = huggingface("phi3").Phi3Attention(config, layer_idx=0)
    inputs = {"position_embeddings": no_rotation(4)}
    expected, fused = heads_seen(monkeypatch, "phi3", attention, attention.qkv_proj, **inputs)
    q, k, v = apply("[q k v] i -> q i, k i, v i", fused, q=16, k=8)
    assert torch.equal(torch.cat([q, k, v]), expected)


@pytest.mark.parametrize("multi_query", [False, True])
def test_gpt_bigcode(monkeypatch, multi_query):
    config = config_of("gpt_bigcode", "GPTBigCodeConfig", n_embd=16, n_head=4, multi_query=multi_query)
    attention = huggingface("gpt_bigcode").GPTBigCodeAttention(config, layer_idx=0)
    expected, fused = heads_seen(monkeypatch, "gpt_bigcode", attention, attention.c_attn)
    text, sizes = (
        ("[(h d) k v] i -> [(h d) k v] i", {"k": 4, "v": 4, "h": 4})
        if multi_query
        else (PER_HEAD, {"h": 4, "q": 1, "k": 1, "v": 1})
    )
    assert torch.equal(apply(text, fused, **sizes)[0], expected)


def test_codegen(monkeypatch):
    module = huggingface("codegen")
    config = config_of("codegen", "CodeGenConfig", n_embd=32, n_head=8, n_positions=32, rotary_dim=4)
    config._attn_implementation = "eager"
    attention = module.CodeGenAttention(config, layer_idx=0)
    calls = []

    def spy(_, query, key, value, *args, **kwargs):
        calls.extend((query, key, value))
        return query.transpose(1, 2), None

    monkeypatch.setattr(module, "eager_attention_forward", spy)
    x, positions = torch.eye(32)[None], torch.zeros(1, 32, dtype=torch.long)
    with torch.no_grad():
        attention(x, module.CodeGenRotaryEmbedding(config)(x, positions))
    actual = apply(
        "(m [q v k] d) i -> [(m q d) (m k d) (m v d)] i", attention.qkv_proj.weight.detach(), m=4, q=2, v=2, k=2
    )
    assert torch.equal(actual[0], torch.cat([rows(states) for states in calls]))


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_falcon(n_kv_heads):
    fused = torch.randn((4 + 2 * n_kv_heads) * 3, 5)
    model = SimpleNamespace(new_decoder_architecture=True, num_heads=4, num_kv_heads=n_kv_heads, head_dim=3)
    split = huggingface("falcon").FalconAttention._split_heads(model, fused.T[None])
    q, k, v = (states[0].permute(1, 2, 0) for states in split)  # keys and values repeated for each query of a group
    group = 4 // n_kv_heads
    actual = apply("(g [q k v] d) i -> (g q) d i, (g k) d i, (g v) d i", fused, q=group, k=1, v=1, d=3)
    for expected, states in zip((q, k[::group], v[::group]), actual, strict=True):
        assert torch.equal(states, expected)


def test_bloom_and_the_older_falcon():
    fused = torch.randn(4 * 3 * 2, 5)
    model = SimpleNamespace(num_heads=4, head_dim=2, new_decoder_architecture=False, multi_query=False)
    actual = apply(PER_HEAD, fused, q=1, k=1, v=1, h=4)[0]
    bloom = huggingface("bloom").BloomAttention._reshape(model, fused.T[None])
    assert torch.equal(actual, torch.cat([rows(states) for states in bloom]))
    falcon = huggingface("falcon").FalconAttention._split_heads(model, fused.T[None])
    assert torch.equal(actual, torch.cat([rows(states.transpose(1, 2)) for states in falcon]))


def test_gpt_oss():
    gate_up = torch.randn(2, 5, 8)  # experts, width, gates and ups in turn
    model = SimpleNamespace(limit=100.0, alpha=1.702)
    expected = huggingface("gpt_oss").GptOssExperts._apply_gate(model, gate_up)
    gate, up = apply("e i (f [g u]) -> e i (f g), e i (f u)", gate_up, g=1, u=1)
    assert torch.equal((up + 1) * (gate * torch.sigmoid(gate * 1.702)), expected)


def test_conv1d():
    layer = importlib.import_module("transformers.pytorch_utils").Conv1D(6, 4)
    linear = torch.nn.Linear(4, 6)
    x = torch.randn(3, 4)
    linear.load_state_dict({"weight": apply("i o -> o i", layer.weight.detach())[0], "bias": layer.bias.detach()})
    torch.testing.assert_close(linear(x), layer(x))
