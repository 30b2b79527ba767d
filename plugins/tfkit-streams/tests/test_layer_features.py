"""Features of each layer, and keys that layers share, against Gemma 4 in transformers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers

import tfkit

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7, "num_attention_heads": 4}
CONFIG = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"] * 2 + ["full_attention"],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": 61,
    "hidden_size_per_layer_input": 6,
    "final_logit_softcapping": 5.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32,
}
SPEC = """
tfkit: 1
name: gemma4
d_model: 32
vocab_size: 61
max_len: 32
bias: false
norm: {kind: rmsnorm, eps: 1e-5}
d_features: 6

graph:
  embedding: {block: embedding, input: tokens, scale: sqrt_d_model}
  table: {block: embedding, input: tokens, d_model: 42, scale: 6 ** 0.5}
  features: {block: layer_inputs, inputs: [embedding, table]}
  decoder:
    block: decoder
    input: embedding
    layer_features: features
    n_layers: 7
    placement: sandwich
    sublayers: [attention, ffn, {sublayer: mixer, norm_in: false, residual: scaled_sum}]
    layers:
      variants:
        local: {attention: {d_head: 8, mask: {left: 3}, position: {theta: 10000, scaling: null}, kv_name: local}}
        local_shared:
          attention:
            {d_head: 8, mask: {left: 3}, position: {theta: 10000, scaling: null}, kv_name: null, kv_from: local,
              value_norm: null}
          ffn: {d_ff: 96}
        full_shared: {attention: {kv_name: null, kv_from: full, value_norm: null}, ffn: {d_ff: 96}}
      pattern: [local, base, local, base, local_shared*2, full_shared]
    attention:
      kind: gqa
      n_heads: 4
      n_kv_heads: 2
      d_head: 16
      scale: 1.0
      qk_norm: {kind: rmsnorm, eps: 1e-5}
      value_norm: {kind: rmsnorm, eps: 1e-5, scale: false}
      mask: {right: 0}
      position: {kind: rope, theta: 1000000, scaling: {kind: proportional, width: 4}}
      kv_name: full
    ffn: {kind: geglu, d_ff: 48, approximate: tanh}
    mixer: {kind: feature_gate, activation: {kind: gelu, approximate: tanh}}
  logits: {block: lm_head, tie: embedding, softcap: 5.0}
"""
NAMES = {
    "embedding.tokens": "embed_tokens",
    "table.tokens": "embed_tokens_per_layer",
    "features.project": "per_layer_model_projection",
    "features.norm": "per_layer_projection_norm",
    "decoder.final_norm": "norm",
    "attention_norm_in": "input_layernorm",
    "attention_norm_out": "post_attention_layernorm",
    "ffn_norm_in": "pre_feedforward_layernorm",
    "ffn_norm_out": "post_feedforward_layernorm",
    "mixer_norm_out": "post_per_layer_input_norm",
    "mixer.gate": "per_layer_input_gate",
    "mixer.up": "per_layer_projection",
    "attention.output": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.project.q": "self_attn.q_proj",
    "ffn.down": "mlp.down_proj",
}
FUSED = {
    "attention.project.qkv": [f"self_attn.{name}_proj" for name in "qkv"],
    "ffn.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
}


def published() -> Any:
    theirs = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**CONFIG, attn_implementation="eager")).eval()
    generator = torch.Generator().manual_seed(0)
    for name, tensor in theirs.state_dict().items():
        if "inv_freq" not in name and "embed_scale" not in name:
            tensor.normal_(1.0 if "norm" in name or "scalar" in name else 0.0, 0.1, generator=generator)
            if "q_norm" in name:  # scores of unit vectors times 16 would amplify rounding
                tensor.mul_(0.2)
    return theirs


def ported(theirs: Any) -> Any:
    """Return the model of SPEC with the weights of a model of transformers."""
    model, tensors = tfkit.build(tfkit.loads(SPEC)).eval(), theirs.model.state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            layer, _, inner = re.fullmatch(r"(decoder\.(layers\.\d+)\.)?(.*)", name).groups()  # type: ignore[union-attr]
            prefix = layer.removeprefix("decoder.") if layer else ""
            if inner == "mixer_residual_write.scale":
                parameter.copy_(tensors[f"{prefix}layer_scalar"])
                continue
            path = inner.removesuffix(".weight")
            names = FUSED.get(path) or [NAMES[path]]
            parameter.copy_(torch.cat([tensors[f"{prefix}{part}.weight"] for part in names]))
    return model


@torch.no_grad()
def test_a_model_with_shared_keys_and_layer_features_equals_gemma4() -> None:
    theirs = published()
    model, ids = ported(theirs), torch.arange(2 * 14).view(2, 14) * 7 % 61
    mask = torch.ones_like(ids)
    expected = theirs(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-5)
    counted = sum(parameter.numel() for parameter in theirs.parameters()) + len(theirs.model.layers)  # layer_scalar
    assert sum(parameter.numel() for parameter in model.parameters()) == counted
    mask[1, :4] = 0
    real = mask.bool()
    alone = theirs(ids[1:, 4:], use_cache=False).logits
    torch.testing.assert_close(model(ids, real)[1, 4:], alone[0], rtol=0, atol=1e-5)
    for padding, cuts in ((None, [1] * 14), (None, [6, 1, 7]), (real, [7, 1, 6])):
        cached = tfkit.CachedModel(model, length=14)
        chunks = [
            cached(part, None if padding is None else value)
            for part, value in zip(ids.split(cuts, dim=1), real.split(cuts, dim=1), strict=True)
        ]
        logits = torch.cat(chunks, dim=1)
        torch.testing.assert_close(logits[0], expected[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(
            logits[1, 4:], (alone if padding is not None else expected[1:, 4:])[0], rtol=0, atol=1e-5
        )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("d_model: 42, ", "d_model: 36, ", "`layer_features` must have the width 7 \\* 6"),
        ("d_model: 42, ", "d_model: 41, ", "`inputs.1` must have a multiple of d_features"),
        ("    layer_features: features\n", "", "mixer `feature_gate` needs layer features, but `decoder` has none"),
        ("inputs: [embedding, table]", "inputs: [embedding]", "`inputs` must be two sequences"),
    ],
)
def test_layer_features_that_do_not_fit(old: str, new: str, message: str) -> None:
    assert SPEC.count(old) == 1
    with pytest.raises(tfkit.SpecError, match=message):
        tfkit.build(tfkit.loads(SPEC.replace(old, new)), device="meta")


@torch.no_grad()
def test_features_keep_their_position_next_to_a_mixer_with_a_state() -> None:
    local = "attention: {d_head: 8, mask: {left: 3}, position: {theta: 10000, scaling: null}, kv_name: local}"
    variant = f"  conv: {{mixer: {{kind: short_conv, size: 3}}, {local}}}"
    spec = SPEC.replace("pattern: [local,", f"{variant}\n      pattern: [conv,")
    plugins = tfkit.load_plugins()
    model = tfkit.build(tfkit.loads(spec, plugins=plugins)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ids, mask = torch.arange(2 * 9).view(2, 9), torch.ones(2, 9, dtype=torch.bool)
    mask[0, :4] = False
    torch.testing.assert_close(model(ids, mask)[0, 4:], model(ids[:1, 4:])[0], rtol=0, atol=1e-5)
