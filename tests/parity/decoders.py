"""Shipped specs of decoders alone."""

from __future__ import annotations

from typing import Any

from .family import Family, layers, qkv
from .mapping import Source, WeightMap, by_head, transposed

SIZES = {"d_model": 32, "vocab_size": 61, "decoder.n_layers": 2, "decoder.attention.n_heads": 4}

GPT2 = Family(
    "GPT2LMHeadModel",
    {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 61},
    "gpt2",
    {
        "embedding.tokens": "transformer.wte",
        "embedding.position.table": "transformer.wpe",
        "decoder.final_norm": "transformer.ln_f",
        **layers(
            "decoder",
            "transformer.h",
            {
                "attention_norm_in": "ln_1",
                "attention.project.qkv": transposed("attn.c_attn"),
                "attention.output": transposed("attn.c_proj"),
                "ffn_norm_in": "ln_2",
                "ffn.up": transposed("mlp.c_fc"),
                "ffn.down": transposed("mlp.c_proj"),
            },
        ),
    },
    {**SIZES, "max_len": 16, "decoder.ffn.d_ff": 128},
)

LLAMA_LAYER: dict[str, Source] = {
    "attention_norm_in": "input_layernorm",
    "attention.project.qkv": qkv("self_attn"),
    "attention.output": "self_attn.o_proj",
    "ffn_norm_in": "post_attention_layernorm",
    "ffn.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "ffn.down": "mlp.down_proj",
}
LLAMA_ENDS: dict[str, Source] = {
    "embedding.tokens": "model.embed_tokens",
    "decoder.final_norm": "model.norm",
    "logits.output": "lm_head",
}
LLAMA_WEIGHTS: WeightMap = {**LLAMA_ENDS, **layers("decoder", "model.layers", LLAMA_LAYER)}
LLAMA_CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 61,
}
LLAMA_SETS = {**SIZES, "decoder.ffn.d_ff": 48}
GQA_SETS = {**LLAMA_SETS, "decoder.attention.n_kv_heads": 2}

LLAMA_7B = Family(
    "LlamaForCausalLM",
    {**LLAMA_CONFIG, "num_key_value_heads": 4, "rms_norm_eps": 1e-6},
    "llama_7b",
    LLAMA_WEIGHTS,
    LLAMA_SETS,
)
LLAMA3_8B = Family(
    "LlamaForCausalLM",
    {**LLAMA_CONFIG, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "llama3_8b",
    LLAMA_WEIGHTS,
    GQA_SETS,
)


def llama_scaled(rope_type: str, ours: str, *, max_len: int, **theirs: Any) -> Family:
    """Llama with a rope scaling; `ours` is the mapping in the spec."""
    rope = {"rope_type": rope_type, "rope_theta": 500.0, **theirs}
    config = {**LLAMA_CONFIG, "rms_norm_eps": 1e-5, "max_position_embeddings": max_len, "rope_parameters": rope}
    sets = {**GQA_SETS, "decoder.attention.position": f"{{kind: rope, theta: 500.0, scaling: {ours}}}"}
    return Family("LlamaForCausalLM", config, "llama3_8b", LLAMA_WEIGHTS, sets, length=20)


MISTRAL = Family(
    "MistralForCausalLM",
    {**LLAMA_CONFIG, "rms_norm_eps": 1e-5, "sliding_window": 4},
    "mistral_7b",
    LLAMA_WEIGHTS,
    {**GQA_SETS, "decoder.attention.mask.left": 3},
    length=13,
)

OPT = Family(
    "OPTForCausalLM",
    {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
        "vocab_size": 61,
    },
    "opt_125m",
    {
        "embedding.tokens": "model.decoder.embed_tokens",
        "embedding.position.table": "model.decoder.embed_positions",
        "decoder.final_norm": "model.decoder.final_layer_norm",
        **layers(
            "decoder",
            "model.decoder.layers",
            {
                "attention_norm_in": "self_attn_layer_norm",
                "attention.project.qkv": qkv("self_attn"),
                "attention.output": "self_attn.out_proj",
                "ffn_norm_in": "final_layer_norm",
                "ffn.up": "fc1",
                "ffn.down": "fc2",
            },
        ),
    },
    {**SIZES, "max_len": 16, "decoder.ffn.d_ff": 48},
)

OPT_350M = Family(
    "OPTForCausalLM",
    {**OPT.config, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    """
        extends: opt_125m
        name: opt_350m
        description: Post-LN, and a table narrower than the layers
        graph:
          embedding: {d_embed: 16, project_bias: false, stages: [project, position]}
          decoder: {placement: post}
          logits: {d_embed: 16, project_bias: false}
    """,
    {
        **{name: source for name, source in OPT.weights.items() if not name.startswith("decoder.")},
        "embedding.project": "model.decoder.project_in",
        "logits.project": "model.decoder.project_out",
        **layers(
            "decoder",
            "model.decoder.layers",
            {
                "attention_norm_after": "self_attn_layer_norm",
                "attention.project.qkv": qkv("self_attn"),
                "attention.output": "self_attn.out_proj",
                "ffn_norm_after": "final_layer_norm",
                "ffn.up": "fc1",
                "ffn.down": "fc2",
            },
        ),
    },
    OPT.sets,
)

GPT_J = Family(
    "GPTJForCausalLM",
    {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 16, "n_inner": 48, "vocab_size": 61},
    "gpt_j_6b",
    {
        "embedding.tokens": "transformer.wte",
        "decoder.final_norm": "transformer.ln_f",
        "logits.output": "lm_head",
        **layers(
            "decoder",
            "transformer.h",
            {
                "input_norm": "ln_1",
                "attention.project.qkv": qkv("attn"),
                "attention.output": "attn.out_proj",
                "ffn.up": "mlp.fc_in",
                "ffn.down": "mlp.fc_out",
            },
        ),
    },
    {**SIZES, "decoder.ffn.d_ff": 48, "decoder.attention.position.width": 4},
)

BLOOM = Family(
    "BloomForCausalLM",
    {"hidden_size": 36, "n_layer": 2, "n_head": 6, "vocab_size": 61},
    "bloom_560m",
    {
        "embedding.tokens": "transformer.word_embeddings",
        "embedding.norm": "transformer.word_embeddings_layernorm",
        "decoder.final_norm": "transformer.ln_f",
        **layers(
            "decoder",
            "transformer.h",
            {
                "attention_norm_in": "input_layernorm",
                "attention.project.qkv": by_head("self_attention.query_key_value", 6),
                "attention.output": "self_attention.dense",
                "ffn_norm_in": "post_attention_layernorm",
                "ffn.up": "mlp.dense_h_to_4h",
                "ffn.down": "mlp.dense_4h_to_h",
            },
        ),
    },
    {**SIZES, "d_model": 36, "decoder.attention.n_heads": 6, "decoder.ffn.d_ff": 144},
    position_ids=False,
)

MPT = Family(
    "MptForCausalLM",
    {"d_model": 36, "n_layers": 2, "n_heads": 12, "max_seq_len": 16, "vocab_size": 61},
    "mpt_7b",
    {
        "embedding.tokens": "transformer.wte",
        "decoder.final_norm": "transformer.norm_f",
        **layers(
            "decoder",
            "transformer.blocks",
            {
                "attention_norm_in": "norm_1",
                "attention.project.qkv": "attn.Wqkv",
                "attention.output": "attn.out_proj",
                "ffn_norm_in": "norm_2",
                "ffn.up": "ffn.up_proj",
                "ffn.down": "ffn.down_proj",
            },
        ),
    },
    {**SIZES, "d_model": 36, "decoder.attention.n_heads": 12, "decoder.ffn.d_ff": 144},
    position_ids=False,
)

DECODERS = {
    "gpt2": GPT2,
    "llama_7b": LLAMA_7B,
    "llama3_8b": LLAMA3_8B,
    "llama_linear": llama_scaled("linear", "{kind: linear, factor: 4.0}", max_len=64, factor=4.0),
    "llama_dynamic": llama_scaled(
        "dynamic", "{kind: dynamic, factor: 4.0, original_max_len: 8}", max_len=8, factor=4.0
    ),
    "llama3_scaled": llama_scaled(
        "llama3",
        "{kind: llama3, factor: 8.0, original_max_len: 64, low_freq_factor: 1.0, high_freq_factor: 4.0}",
        max_len=512,
        factor=8.0,
        original_max_position_embeddings=64,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
    "llama_yarn": llama_scaled(
        "yarn",
        "{kind: yarn, factor: 4.0, original_max_len: 64, beta_fast: 8.0, beta_slow: 1.0}",
        max_len=256,
        factor=4.0,
        original_max_position_embeddings=64,
        beta_fast=8.0,
        beta_slow=1.0,
    ),
    "llama_yarn_exact": llama_scaled(
        "yarn",
        "{kind: yarn, factor: 4.0, original_max_len: 64, beta_fast: 8.0, truncate: false, temperature: 1.3}",
        max_len=256,
        factor=4.0,
        original_max_position_embeddings=64,
        beta_fast=8.0,
        truncate=False,
        attention_factor=1.3,
    ),
    "mistral_7b": MISTRAL,
    "opt_125m": OPT,
    "opt_350m": OPT_350M,
    "gpt_j_6b": GPT_J,
    "bloom_560m": BLOOM,
    "mpt_7b": MPT,
}
