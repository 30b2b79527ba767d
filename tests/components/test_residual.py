"""The value to which an output is added: published models that differ in it, and a model without a norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.bloom.modeling_bloom import BloomBlock, build_alibi_tensor
from transformers.models.doge.modeling_doge import DogeDecoderLayer
from transformers.models.modernbert.modeling_modernbert import ModernBertModel

import tfkit
from tfkit.testing import check_model

from ..sampling import slow

HEAD = "tfkit: 1\nname: test\nd_model: 16\ninputs: {x: {type: features, width: 16}}\n"


def build(stack: str) -> Any:
    spec = f"{HEAD}graph:\n  stack: {{input: x, final_norm: false, {stack}}}\n"
    return tfkit.build(tfkit.loads(spec)).eval()


def scramble(model: nn.Module) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)


def copy(theirs: nn.Module, ours: nn.Module, names: dict[str, str]) -> None:
    """Their parameters under our names; every one is used."""
    options = dict(theirs.named_parameters())
    result: dict[str, Tensor] = {}
    for name in ours.state_dict():
        module, _, leaf = name.rpartition(".")
        result[name] = options.pop(f"{names[module]}.{leaf}" if module in names else names[name]).data
    assert not options, list(options)
    ours.load_state_dict(result)


def gradients(theirs: Tensor, ours: Tensor, x: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    expected, actual = (torch.autograd.grad(y.square().sum(), x)[0] for y in (theirs, ours))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_onto_normed_is_the_layer_of_bloom() -> None:
    """With one head, so that the rows of queries, keys and values stand in the same order."""
    config = transformers.BloomConfig(hidden_size=16, n_head=1, apply_residual_connection_post_layernorm=True)
    config._attn_implementation = "eager"
    theirs = BloomBlock(config, layer_idx=0).eval()
    scramble(theirs)
    ours = build(
        "block: decoder, n_layers: 1, attention: {kind: mha, n_heads: 1, position: alibi},"
        "ffn: {kind: gelu, approximate: tanh, d_ff: 64}, residual: {onto: normed}"
    )
    layer = ours.stack.layers[0]
    copy(
        theirs,
        layer,
        {
            "attention_norm_in": "input_layernorm",
            "attention.project.qkv": "self_attention.query_key_value",
            "attention.output": "self_attention.dense",
            "ffn_norm_in": "post_attention_layernorm",
            "ffn.up": "mlp.dense_h_to_4h",
            "ffn.down": "mlp.dense_4h_to_h",
        },
    )
    x = torch.randn(3, 7, 16, requires_grad=True)
    alibi = build_alibi_tensor(torch.ones(3, 7), 1, torch.float32)
    mask = torch.full((7, 7), -torch.inf).triu(1)[None, None]
    gradients(theirs(x, alibi, mask)[0], ours(x), x)


def test_a_learned_factor_of_what_it_is_added_to_is_that_of_doge() -> None:
    """The residual alone: the attention, which is another, gives zeros."""
    config = transformers.DogeConfig(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=2,
        hidden_dropout=0.0,
        hidden_act="silu",
        pad_token_id=0,
    )
    theirs = DogeDecoderLayer(config, layer_idx=0).eval()
    scramble(theirs)
    theirs.self_attn = Nothing()  # type: ignore[assignment]
    ours = build(
        "block: encoder, n_layers: 1, attention: {kind: mha, n_heads: 2, bias: false}, norm: rmsnorm,"
        "ffn: {kind: swiglu, d_ff: 24, bias: false}, residual: {learned_onto: vector}"
    )
    layer = ours.stack.layers[0]
    scramble(layer)
    mlp = theirs.mlp
    with torch.no_grad():
        layer.attention.output.weight.zero_()
        for mine, other in (
            (layer.attention_residual_scale_onto.weight, theirs.input_residual),
            (layer.ffn_norm_in.weight, theirs.post_attention_layernorm.weight),
            (layer.ffn_residual_scale_onto.weight, theirs.post_attention_residual),
            (layer.ffn.gate_up.weight, torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))),
            (layer.ffn.down.weight, mlp.down_proj.weight),
        ):
            mine.copy_(other)
    x = torch.randn(3, 7, 16, requires_grad=True)
    gradients(theirs(x), ours(x), x)


class Nothing(nn.Module):
    def forward(self, hidden_states: Tensor, **options: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


MODERNBERT = """
    tfkit: 1
    name: test
    d_model: 16
    vocab_size: 61
    graph:
      embedding: {block: embedding, norm: &norm {kind: layernorm, bias: false}}
      encoder:
        block: encoder
        n_layers: 3
        norm: *norm
        attention: {kind: mha, n_heads: 2, bias: false, position: {kind: rope, theta: 160000}}
        ffn: {kind: geglu, d_ff: 24, bias: false}
        layers:
          variants:
            first: {sublayers: [{sublayer: attention, norm_in: false}, ffn]}
            local: {attention: {mask: {left: 2, right: 2}, position: {theta: 10000}}}
          pattern: [first, local*2]
"""


def test_a_layer_without_its_first_norm_is_that_of_modernbert() -> None:
    config = transformers.ModernBertConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        local_attention=4,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        attn_implementation="eager",
    )
    theirs = ModernBertModel(config).eval()
    scramble(theirs)
    ours = tfkit.build(tfkit.loads(MODERNBERT)).eval()
    names = {"embedding.tokens": "embeddings.tok_embeddings", "embedding.norm": "embeddings.norm"}
    names["encoder.final_norm"] = "final_norm"
    for i in range(3):
        parts = {"attention_norm_in": "attn_norm", "attention.project.qkv": "attn.Wqkv", "attention.output": "attn.Wo"}
        parts |= {"ffn_norm_in": "mlp_norm", "ffn.gate_up": "mlp.Wi", "ffn.down": "mlp.Wo"}
        names |= {f"encoder.layers.{i}.{mine}": f"layers.{i}.{other}" for mine, other in parts.items()}
    copy(theirs, ours, names)
    ids = torch.randint(1, 61, (3, 9))
    torch.testing.assert_close(ours(ids), theirs(ids).last_hidden_state, rtol=1e-5, atol=1e-5)
    assert theirs.layers[0].attn_norm.__class__ is nn.Identity


@pytest.mark.parametrize("residual", [slow("{onto: normed}"), "{onto: normed, learned_onto: scalar, learned: vector}"])
def test_it_trains_is_scripted_and_is_read_in_pieces(residual: str) -> None:
    text = (
        HEAD.replace("inputs: {x: {type: features, width: 16}}", "vocab_size: 61\nmax_len: 32")
        + """
graph:
  embedding: {block: embedding}
  decoder: {block: decoder, n_layers: 2, attention: {kind: mha, n_heads: 2, position: rope}, ffn: {kind: relu, d_ff: 8}}
  logits: {block: lm_head}
"""
    )
    check_model(tfkit.loads(text, sets=[f"decoder.residual={residual}"]), only=["gradients", "script", "cached"])


@torch.no_grad()
def test_the_sublayer_is_multiplied_by_the_factor() -> None:
    half = "block: encoder, n_layers: 1, sublayers: [ffn], ffn: {kind: relu, d_ff: 24}, placement: pre"
    x = torch.randn(2, 3, 16)
    first, other = build(half), build(f"{half}, residual: {{scale: 0.25}}")
    other.load_state_dict(first.state_dict())
    torch.testing.assert_close(other(x) - x, 0.25 * (first(x) - x))


@pytest.mark.parametrize("first", [True, False])
def test_a_residual_of_all_sublayers_needs_a_single_norm(first: bool) -> None:
    steps = f"[{{sublayer: attention, norm_in: {first}}}, {{sublayer: ffn, norm_in: {not first}}}]".lower()
    layer = f"block: encoder, n_layers: 1, attention: {{n_heads: 2}}, ffn: {{kind: relu, d_ff: 8}}, sublayers: {steps}"
    (stack,) = tfkit.loads(
        f"{HEAD}graph:\n  stack: {{input: x, final_norm: false, {layer}, residual: {{onto: normed}}}}\n"
    ).nodes
    assert [step.norm_in is not None for step in stack.stack.layers[0].steps] == [first, not first]  # type: ignore[union-attr]
