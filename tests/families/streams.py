"""Models with layer features and shared keys, from a plugin, at small sizes, with every option."""

from __future__ import annotations

from typing import Any

from .case import Case
from .llama_kin import ROPE

SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4 = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, SLIDING, FULL],
    "vocab_size_per_layer_input": 67,
    "hidden_size_per_layer_input": 6,
    "max_position_embeddings": 32,
}


GEMMA4_WITHOUT_FEATURES = {
    **{field: value for field, value in GEMMA4.items() if field != "vocab_size_per_layer_input"},
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 12}


def scalars(n_layers: int) -> dict[str, str]:
    """Return the buffers of Gemma 4 that scale the output of each layer."""
    return {
        f"model.layers.{i}.layer_scalar": "a learned number, which its class has as a buffer" for i in range(n_layers)
    }


def softer(model: Any) -> None:
    """Make queries short: scores have no factor, and a softmax of large scores amplifies rounding."""
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            parameter.data = 0.2 * parameter.data
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.add_(1.0)


GEMMA3N = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 4,
    "layer_types": [SLIDING, FULL] * 3,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 61,
    "hidden_size_per_layer_input": 6,
    "laurel_rank": 5,
    "max_position_embeddings": 32,
}
STREAMS: dict[str, Case] = {
    "gemma3n_text": Case(
        "gemma3n_text",
        {
            **GEMMA3N,
            "altup_num_inputs": 3,
            "activation_sparsity_pattern": [0.9, 0.0, 0.7, 0.0, 0.6, 0.0],
            "final_logit_softcapping": 5.0,
            "rms_norm_eps": 1e-4,
            "hidden_activation": "relu",
            "attention_bias": True,
            "rope_parameters": {SLIDING: ROPE, FULL: {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
        },
        std=0.15,
        prepare=softer,
    ),
    "gemma3n_text_plain": Case(
        "gemma3n_text",
        {**GEMMA3N, "num_kv_shared_layers": 0, "tie_word_embeddings": False},
        std=0.15,
        prepare=softer,
    ),
    "gemma4_text": Case(
        "gemma4_text",
        {
            **GEMMA4,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 5.0,
            "rms_norm_eps": 1e-4,
            "hidden_activation": "relu",
            "attention_bias": True,
            "rope_parameters": {
                SLIDING: ROPE,
                FULL: {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.4},
            },
        },
        buffers=scalars(7),
        std=0.15,
        prepare=softer,
    ),
    "gemma4_text_plain": Case(
        "gemma4_text", {**GEMMA4, "tie_word_embeddings": False}, buffers=scalars(7), std=0.15, prepare=softer
    ),
    "gemma4_text_one_taker": Case(
        "gemma4_text",
        {**GEMMA4, "num_kv_shared_layers": 1, "global_head_dim": 8},
        buffers=scalars(7),
        std=0.15,
        prepare=softer,
    ),
    "gemma4_text_experts": Case(
        "gemma4_text",
        {
            **GEMMA4_WITHOUT_FEATURES,
            **GEMMA4_EXPERTS,
            "num_global_key_value_heads": 1,
            "rms_norm_eps": 1e-4,
        },
        buffers=scalars(7),
        std=0.15,
        prepare=softer,
    ),
    "gemma4_text_everything": Case(
        "gemma4_text",
        {
            **GEMMA4,
            **GEMMA4_EXPERTS,
            "attention_k_eq_v": True,
            "attention_bias": True,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_activation": "quick_gelu",
        },
        buffers=scalars(7),
        std=0.15,
        prepare=softer,
    ),
    "gemma4_text_layers": Case(
        "gemma4_text",
        {**GEMMA4, "per_layer_config": {i: {"head_dim": 12, "num_key_value_heads": 1} for i in (1, 3, 6)}},
        buffers=scalars(7),
        std=0.15,
        prepare=softer,
    ),
    "gemma4_unified_text": Case(
        "gemma4_unified_text",
        {
            **{field: GEMMA4_WITHOUT_FEATURES[field] for field in GEMMA4_WITHOUT_FEATURES if "input" not in field},
            "num_global_key_value_heads": 4,
            "final_logit_softcapping": 5.0,
            "rms_norm_eps": 1e-4,
        },
        buffers=scalars(7),
        std=0.15,
        prepare=softer,
    ),
    "gemma4_unified_text_shared": Case(
        "gemma4_unified_text",
        {
            **{field: GEMMA4[field] for field in GEMMA4 if "input" not in field},
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "use_bidirectional_attention": None,
        },
        buffers=scalars(7),
        std=0.15,
        prepare=softer,
    ),
}
