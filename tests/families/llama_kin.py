"""Llama and families that differ from it in a few lines, at small sizes, with every option."""

from __future__ import annotations

from typing import Any

from .case import Case

LLAMA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ROPE = {"rope_type": "default", "rope_theta": 1000.0}
BIASES = {"attention_bias": True, "mlp_bias": True}
WINDOW = {"sliding_window": 4}
MIXED = {**WINDOW, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 4.0,
}


def llama(scaling: dict[str, Any]) -> Case:
    """A Llama whose rotary positions are stretched from a training of 6 tokens."""
    rope = {**ROPE, "original_max_position_embeddings": 6, **scaling}
    return Case("llama", {**LLAMA, "rope_parameters": rope})


LLAMA_KIN: dict[str, Case] = {
    "llama": Case("llama", {**LLAMA, **BIASES, "head_dim": 12, "rope_parameters": ROPE}),
    "llama_linear": Case("llama", {**LLAMA, "rope_parameters": {**ROPE, "rope_type": "linear", "factor": 3.0}}),
    "llama_llama3": llama(
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama_yarn": llama({"rope_type": "yarn", "factor": 4.0}),
    "llama_yarn_all": llama(
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "mscale": 0.7,
            "mscale_all_dim": 0.4,
            "truncate": False,
        }
    ),
    "llama_yarn_attention_factor": llama({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3}),
    # Beyond the training, the frequencies follow the length of what is read at once.
    "llama_dynamic": Case(
        "llama",
        {**LLAMA, "max_position_embeddings": 6, "rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 2.0}},
    ),
    "exaone": Case("exaone", {**LLAMA, **BIASES, "head_dim": 12, "rope_parameters": ROPE, "rms_norm_eps": 1e-4}),
    "mistral": Case("mistral", {**LLAMA, **WINDOW, "tie_word_embeddings": True}),
    "ministral": Case("ministral", {**LLAMA, **MIXED, "head_dim": 12}),
    "qwen2": Case("qwen2", {**LLAMA, "rope_parameters": ROPE}),
    "qwen2_windows": Case(
        "qwen2", {**LLAMA, **WINDOW, "num_hidden_layers": 3, "use_sliding_window": True, "max_window_layers": 1}
    ),
    "qwen3": Case("qwen3", {**LLAMA, "head_dim": 12, "attention_bias": True, "rms_norm_eps": 1e-4}),
    "qwen3_windows": Case("qwen3", {**LLAMA, **MIXED, "head_dim": 12, "use_sliding_window": True}),
    "gemma": Case("gemma", {**LLAMA, "head_dim": 12, "num_key_value_heads": 1, "attention_bias": True}, norm_mean=0.0),
    "gemma2": Case(
        "gemma2",
        {
            **LLAMA,
            **WINDOW,
            "num_hidden_layers": 3,
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        norm_mean=0.0,
    ),
    "gemma3_text": Case(
        "gemma3_text",
        {
            **LLAMA,
            **WINDOW,
            "num_hidden_layers": 5,
            "layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention"],
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        norm_mean=0.0,
    ),
    "stablelm": Case("stablelm", {**LLAMA, "rope_parameters": ROPE, "tie_word_embeddings": True}),
    "stablelm_parallel": Case(
        "stablelm",
        {
            **LLAMA,
            "partial_rotary_factor": 0.5,
            "use_qkv_bias": True,
            "qk_layernorm": True,
            "use_parallel_residual": True,
        },
    ),
    "starcoder2": Case("starcoder2", {**LLAMA, **WINDOW, "norm_epsilon": 1e-4}),
    "starcoder2_bare": Case("starcoder2", {**LLAMA, "use_bias": False, "tie_word_embeddings": False}),
    "cohere": Case("cohere", {**LLAMA, "logit_scale": 0.3, "attention_bias": True}),
    "cohere_qk_norm": Case("cohere", {**LLAMA, "use_qk_norm": True, "tie_word_embeddings": False}),
    "olmo2": Case("olmo2", {**LLAMA, "attention_bias": True, "rope_parameters": ROPE}),
    "granite": Case("granite", {**LLAMA, **MULTIPLIERS, **BIASES}),
    "smollm3": Case("smollm3", {**LLAMA, "num_hidden_layers": 5, **BIASES}),
    "smollm3_listed": Case("smollm3", {**LLAMA, "num_hidden_layers": 3, "no_rope_layers": [0, 1, 1]}),
    "smollm3_windows": Case(
        "smollm3",
        {
            **LLAMA,
            **WINDOW,
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "no_rope_layers": [1, 0, 1, 0],
            "layer_types": [*["sliding_attention"] * 2, *["full_attention"] * 2],
        },
    ),
    "nemotron": Case("nemotron", {**LLAMA, "head_dim": 12, **BIASES}, norm_mean=0.0),
    "glm": Case("glm", {**LLAMA, "head_dim": 12, "rms_norm_eps": 1e-4}),
    "glm_edge": Case("glm", {**LLAMA, "head_dim": 8, "attention_bias": False, "partial_rotary_factor": 1.0}),
    "glm4": Case("glm4", {**LLAMA, "head_dim": 12, "tie_word_embeddings": True}),
    "phi3": Case("phi3", {**LLAMA, **WINDOW, "partial_rotary_factor": 0.5, "rope_theta": 100.0}),
    "phi3_longrope": Case(
        "phi3",
        {
            **LLAMA,
            "original_max_position_embeddings": 6,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.0, 2.0, 3.0, 4.0],
            },
        },
    ),
    "diffllama": Case(
        "diffllama",
        {
            **LLAMA,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "head_dim": 6,
            "attention_bias": True,
            "rms_norm_eps": 1e-4,
            "rope_parameters": ROPE,
        },
    ),
    "diffllama_tied": Case("diffllama", {**LLAMA, "num_key_value_heads": None, "tie_word_embeddings": True}),
    "cohere2": Case("cohere2", {**LLAMA, **WINDOW, "num_hidden_layers": 5, "attention_bias": True, "logit_scale": 0.3}),
    "cohere2_listed": Case("cohere2", {**LLAMA, **MIXED, "head_dim": 12}),
    "cohere_compass_text": Case(
        "cohere_compass_text",
        {
            **LLAMA,
            **MIXED,
            "attention_bias": True,
            "logit_scale": 0.3,
            "layer_norm_eps": 1e-4,
            "rope_parameters": {"sliding_attention": ROPE, "full_attention": None},
        },
    ),
    "cohere_compass_text_rotated": Case(
        "cohere_compass_text",
        {
            **LLAMA,
            **MIXED,
            "head_dim": 12,
            "tie_word_embeddings": False,
            "rope_parameters": {"sliding_attention": ROPE, "full_attention": {**ROPE, "rope_theta": 50.0}},
        },
    ),
    "olmo": Case("olmo", {**LLAMA, "attention_bias": True, "tie_word_embeddings": True}),
    "olmo_clip": Case("olmo", {**LLAMA, "clip_qkv": 0.5}),
    "olmo3": Case(
        "olmo3",
        {
            **LLAMA,
            **WINDOW,
            "num_hidden_layers": 5,
            "attention_bias": True,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6},
        },
    ),
    "helium": Case("helium", {**LLAMA, "head_dim": 8, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-4}),
    "ernie4_5": Case("ernie4_5", {**LLAMA, "head_dim": 12, "use_bias": True}),
    "seed_oss": Case("seed_oss", {**LLAMA, "head_dim": 12, "mlp_bias": True}),
    "seed_oss_out_bias": Case("seed_oss", {**LLAMA, "attention_bias": False, "attention_out_bias": True}),
    "cwm": Case("cwm", {**LLAMA, **WINDOW, "num_hidden_layers": 5, "head_dim": 12, "mlp_bias": True}),
    "arcee": Case("arcee", {**LLAMA, "head_dim": 12, **BIASES}),
    "exaone4": Case("exaone4", {**LLAMA, **WINDOW, "num_hidden_layers": 5, "head_dim": 12}),
    "exaone4_without_windows": Case(
        "exaone4",
        {**LLAMA, "head_dim": 12, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "hunyuan_v1_dense": Case("hunyuan_v1_dense", {**LLAMA, "head_dim": 12, "attention_bias": True}),
    "hunyuan_v1_dense_alpha": Case(
        "hunyuan_v1_dense",
        {
            **LLAMA,
            "head_dim": 12,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 100.0},
        },
    ),
    "ministral3": Case(
        "ministral3",
        {
            **LLAMA,
            **WINDOW,
            "head_dim": 12,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 3,
                "mscale": 0.7,
                "mscale_all_dim": 0.4,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "apertus": Case("apertus", {**LLAMA, "attention_bias": True}),
    "apertus1p5_text": Case("apertus1p5_text", {**LLAMA, "attention_bias": True, "output_vocab_size": 40}),
    "apertus1p5_text_full": Case("apertus1p5_text", LLAMA),
    "bitnet": Case("bitnet", {**LLAMA, "attention_bias": True}),
    "vaultgemma": Case(
        "vaultgemma",
        {**LLAMA, **MIXED, "head_dim": 12, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0},
        norm_mean=0.0,
    ),
    "hyperclovax": Case("hyperclovax", {**LLAMA, **MULTIPLIERS, "head_dim": 12, "mlp_bias": True}),
    "hyperclovax_pre": Case("hyperclovax", {**LLAMA, "use_post_norm": False}),
    "nanochat": Case("nanochat", {**LLAMA, "attention_bias": True, "final_logit_softcapping": 2.0}),
    "internlm3": Case("internlm3", {**LLAMA, "head_dim": 12, **BIASES}),
    "iquestcoder": Case("iquestcoder", {**LLAMA, "head_dim": 12}),
    "granite_swa": Case(
        "granite_swa",
        {
            **LLAMA,
            **MIXED,
            **MULTIPLIERS,
            **BIASES,
            "num_hidden_layers": 5,
            "layer_types": [*["full_attention", "sliding_attention"] * 2, "full_attention"],
            "layer_rope_theta": [0, 100.0, 1000.0, 0, 1000.0],
        },
    ),
    "granite_swa_of_one_theta": Case(
        "granite_swa", {**LLAMA, **WINDOW, "num_hidden_layers": 5, "rope_theta": 1000.0, "tie_word_embeddings": False}
    ),
}
