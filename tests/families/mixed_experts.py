"""Experts in models whose layers differ, some with windows, at small sizes, with every option of their families."""

from __future__ import annotations

from .case import Case
from .experts import CORRECTION, EXPERTS_OF, GROUPS, NAMED, YARN, correction
from .llama_kin import LLAMA, MIXED, MULTIPLIERS, ROPE, WINDOW

AFMOE = {
    **NAMED,
    **WINDOW,
    "num_hidden_layers": 5,
    "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
    "head_dim": 12,
    "attention_bias": True,
    "route_scale": 1.5,
    "mup_enabled": True,
    "rms_norm_eps": 1e-4,
}

LLAMA4 = {
    **LLAMA,
    "num_hidden_layers": 6,
    "head_dim": 12,
    "intermediate_size": 20,
    "intermediate_size_mlp": 44,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_layers": [1, 3, 4],
    "no_rope_layers": [1, 1, 1, 0, 1, 0],
    "attention_chunk_size": 4,
    "floor_scale": 3,
    "attn_scale": 0.4,
    "rms_norm_eps": 1e-4,
}

MIXED_EXPERTS: dict[str, Case] = {
    # Its class counts chunks, and the steps of the temperature, with padding.
    "llama4_text": Case("llama4_text", LLAMA4, alone=True),
    "llama4_text_mixed": Case(
        "llama4_text",
        {
            **LLAMA4,
            "use_qk_norm": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "moe_layers": [0, 1, 2, 3, 5],
            "no_rope_layers": [1, 0, 1, 0, 1, 0],
            "layer_types": [*["chunked_attention"] * 2, *["full_attention"] * 3, "chunked_attention"],
        },
        alone=True,
    ),
    "gpt_oss": Case(
        "gpt_oss",
        {
            **LLAMA,
            **MIXED,
            "head_dim": 12,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "swiglu_limit": 0.7,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "exaone_moe": Case(
        "exaone_moe",
        {**NAMED, **GROUPS, **WINDOW, "num_hidden_layers": 5, "rms_norm_eps": 1e-4},
        buffers=correction(CORRECTION, 1, 2, 3, 4),
    ),
    "exaone_moe_mixed": Case(
        "exaone_moe",
        {
            **NAMED,
            **WINDOW,
            "num_hidden_layers": 5,
            "layer_types": ["full_attention", "full_attention", *["sliding_attention"] * 3],
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"],
        },
        buffers=correction(CORRECTION, 1, 3, 4),
    ),
    "afmoe": Case("afmoe", {**AFMOE, "num_dense_layers": 2}),
    "afmoe_one_dense": Case("afmoe", {**AFMOE, "num_dense_layers": 1}),
    "flint": Case(
        "flint",
        {
            **LLAMA,
            **EXPERTS_OF,
            **WINDOW,
            "num_hidden_layers": 5,
            "layer_types": [*["full_attention"] * 3, "sliding_attention", "sliding_attention"],
            "head_dim": 12,
            "attention_bias": True,
            "num_experts": 6,
            "shared_expert_intermediate_size": 20,
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-4,
        },
    ),
    "flint_dense_windows": Case(
        "flint",
        {
            "mlp_only_layers": [0, 2],
            **LLAMA,
            **EXPERTS_OF,
            **WINDOW,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "num_experts": 6,
            "shared_expert_intermediate_size": 20,
        },
    ),
    "kolibri1": Case(
        "kolibri1",
        {
            **LLAMA,
            **EXPERTS_OF,
            **WINDOW,
            "num_hidden_layers": 5,
            "head_dim": 12,
            "num_experts": 6,
            "shared_expert_intermediate_size": 20,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-4,
        },
        buffers=correction("mlp.gate.e_score_correction_bias", 0, 1, 2, 3, 4),
    ),
    "cohere2_moe": Case(
        "cohere2_moe",
        {
            **LLAMA,
            **WINDOW,
            "num_hidden_layers": 5,
            "head_dim": 12,
            "attention_bias": True,
            "layer_types": [*["full_attention", "sliding_attention"] * 2, "full_attention"],
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"],
            "prefix_dense_intermediate_size": 20,
            "num_experts": 6,
            "num_shared_experts": 2,
            "expert_selection_fn": "sigmoid",
            "rms_norm_eps": 1e-4,
            "logit_scale": 0.3,
        },
    ),
    "cohere2_moe_sum": Case(
        "cohere2_moe",
        {
            **LLAMA,
            **WINDOW,
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "layer_norm_eps": 1e-4,
        },
        std=0.4,
    ),
    "cohere2_moe_bare": Case(
        "cohere2_moe",
        {
            **LLAMA,
            **WINDOW,
            "num_experts": 6,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "logit_scale": 0.5,
        },
    ),
    "granitemoe_swa": Case(
        "granitemoe_swa",
        {
            **LLAMA,
            **MULTIPLIERS,
            **WINDOW,
            "attention_bias": True,
            "num_hidden_layers": 5,
            "layer_rope_theta": [0, 100.0, 0, 100.0, 1000.0],
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 20,
        },
    ),
    "laguna": Case(
        "laguna",
        {
            **LLAMA,
            **EXPERTS_OF,
            **MIXED,
            "num_hidden_layers": 5,
            "layer_types": [*["full_attention", "sliding_attention"] * 2, "full_attention"],
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"],
            "num_attention_heads_per_layer": [2, 6, 4, 8, 4],
            "head_dim": 12,
            "attention_bias": True,
            "num_experts": 6,
            "shared_expert_intermediate_size": 20,
            "moe_routed_scaling_factor": 1.5,
            "moe_router_logit_softcapping": 0.7,
            "rms_norm_eps": 1e-4,
            "rope_parameters": {
                "full_attention": {**YARN, "partial_rotary_factor": 0.5},
                "sliding_attention": {**ROPE, "partial_rotary_factor": 0.5},
            },
        },
    ),
    "laguna_channels": Case(
        "laguna",
        {
            **LLAMA,
            **EXPERTS_OF,
            "num_hidden_layers": 3,
            "head_dim": 12,
            "gating": "per-element",
            "num_experts": 6,
            "shared_expert_intermediate_size": 20,
        },
    ),
}
