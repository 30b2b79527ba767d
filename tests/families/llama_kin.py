"""Llama and the many that change a line or two of it: small, with everything switched on that a family can do."""

from __future__ import annotations

from .case import Case

LLAMA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ROPE = {"rope_type": "default", "rope_theta": 1000.0}

LLAMA_KIN: dict[str, Case] = {
    "llama": Case("llama", {**LLAMA, "head_dim": 12, "attention_bias": True, "mlp_bias": True, "rope_parameters": ROPE}),
    "mistral": Case("mistral", {**LLAMA, "sliding_window": 4, "tie_word_embeddings": True}),
    "gemma2": Case(
        "gemma2",
        {
            **LLAMA,
            "num_hidden_layers": 3,
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        norm_mean=0.0,
    ),
}
