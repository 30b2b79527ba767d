"""Mixtures of experts and latent attention, from plugins, at small sizes, with every option of their families."""

from __future__ import annotations

from .case import Case
from .llama_kin import LLAMA, MULTIPLIERS, ROPE, WINDOW

YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LATENT = {
    **LLAMA,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 10,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
DEEPSEEK = {
    **LATENT,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
EXPERTS_OF = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
GROUPS = {"n_group": 4, "topk_group": 2}
DEEPSEEK_WITHOUT_LATENTS = {key: value for key, value in DEEPSEEK.items() if key not in LATENT or key in LLAMA}
DEEPSEEK_WITHOUT_LATENTS |= {"num_key_value_heads": 2}
NAMED = {"num_experts": 8, "num_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
NAMED |= {**LLAMA, "num_hidden_layers": 3}
CORRECTION = "mlp.gate.e_score_correction_bias"


def correction(name: str, *layers: int) -> dict[str, str]:
    """The buffer of each layer's router that moves its choice."""
    return {f"model.layers.{i}.{name}": "a training loop moves it, and no gradient" for i in layers}


EXPERTS: dict[str, Case] = {
    "mixtral": Case(
        "mixtral", {**LLAMA, **WINDOW, "head_dim": 12, "num_local_experts": 12, "rope_parameters": ROPE}
    ),  # more than ten experts: their order is not that of their numbers as text
    "mixtral_tied": Case("mixtral", {**LLAMA, "num_local_experts": 4, "tie_word_embeddings": True}),
    "qwen3_moe": Case(
        "qwen3_moe",
        {
            **LLAMA,
            "head_dim": 12,
            "attention_bias": True,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-4,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe_local": Case(
        "qwen3_moe",
        {
            **LLAMA,
            "head_dim": 12,
            "attention_bias": True,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-4,
            "use_sliding_window": True,
            "sliding_window": 3,
        },
    ),
    "mellum": Case(
        "mellum",
        {
            **LLAMA,
            "num_hidden_layers": 4,
            "head_dim": 12,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["sparse"] * 4,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "olmoe": Case(
        "olmoe", {**LLAMA, "attention_bias": True, "num_experts": 6, "num_experts_per_tok": 3, "rms_norm_eps": 1e-4}
    ),
    "qwen2_moe": Case(
        "qwen2_moe",
        {**LLAMA, **EXPERTS_OF, "num_experts": 6, "shared_expert_intermediate_size": 20, "norm_topk_prob": True},
    ),
    "qwen2_moe_windows": Case(
        "qwen2_moe",
        {
            **LLAMA,
            **EXPERTS_OF,
            **WINDOW,
            "num_hidden_layers": 3,
            "num_experts": 6,
            "shared_expert_intermediate_size": 20,
            "qkv_bias": False,
            "use_sliding_window": True,
            "max_window_layers": 1,
        },
    ),
    "qwen2_moe_dense": Case(
        "qwen2_moe",
        {
            **LLAMA,
            **EXPERTS_OF,
            **WINDOW,
            "num_hidden_layers": 4,
            "num_experts": 6,
            "shared_expert_intermediate_size": 20,
            "use_sliding_window": True,
            "max_window_layers": 1,
            "mlp_only_layers": [1, 2],
        },
    ),
    "granitemoe": Case(
        "granitemoe", {**LLAMA, **MULTIPLIERS, "attention_bias": True, "num_local_experts": 6, "num_experts_per_tok": 3}
    ),
    "dots1": Case(
        "dots1",
        {
            **DEEPSEEK_WITHOUT_LATENTS,
            "attention_bias": True,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-4,
            "sliding_window": None,
        },
        buffers=correction(CORRECTION, 1, 2),
    ),
    "dots1_groups": Case(
        "dots1",
        {**DEEPSEEK_WITHOUT_LATENTS, **GROUPS, "first_k_dense_replace": 0, "sliding_window": None},
        buffers=correction(CORRECTION, 0, 1, 2),
    ),
    "dots1_windows": Case(
        "dots1",
        {**DEEPSEEK_WITHOUT_LATENTS, "sliding_window": 4, "max_window_layers": 1},
        buffers=correction(CORRECTION, 1, 2),
    ),
    "glm4_moe": Case(
        "glm4_moe",
        {
            **DEEPSEEK_WITHOUT_LATENTS,
            **GROUPS,
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "rms_norm_eps": 1e-4,
        },
        buffers=correction(CORRECTION, 1, 2),
    ),
    "glm4_moe_bare": Case(
        "glm4_moe", {**DEEPSEEK_WITHOUT_LATENTS, "norm_topk_prob": False}, buffers=correction(CORRECTION, 1, 2)
    ),
    "sarvam_moe": Case(
        "sarvam_moe",
        {**DEEPSEEK_WITHOUT_LATENTS, **GROUPS, "head_dim": 12, "attention_bias": True, "rms_norm_eps": 1e-4},
        buffers=correction(CORRECTION, 1, 2),
    ),
    "sarvam_moe_bare": Case(
        "sarvam_moe",
        {**DEEPSEEK_WITHOUT_LATENTS, "use_qk_norm": False, "norm_topk_prob": False},
        buffers=correction(CORRECTION, 1, 2),
    ),
    "ernie4_5_moe": Case(
        "ernie4_5_moe",
        {
            **LLAMA,
            "num_hidden_layers": 3,
            "moe_intermediate_size": 12,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "rope_parameters": ROPE,
        },
    ),
    "hunyuan_v1_moe": Case(
        "hunyuan_v1_moe",
        {
            **LLAMA,
            "head_dim": 12,
            "attention_bias": True,
            "num_experts": 6,
            "moe_topk": 3,
            "rms_norm_eps": 1e-4,
            "rope_parameters": {**ROPE, "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
        },
    ),
    "flex_olmo": Case(
        "flex_olmo", {**LLAMA, "attention_bias": True, "num_experts": 6, "num_experts_per_tok": 3, "rms_norm_eps": 1e-4}
    ),
    "minimax_m2": Case(
        "minimax_m2",
        {
            **LLAMA,
            "head_dim": 12,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rotary_dim": 8,
            "rms_norm_eps": 1e-4,
        },
        buffers=correction("mlp.e_score_correction_bias", 0, 1),
    ),
    "granitemoeshared": Case(
        "granitemoeshared",
        {**LLAMA, **MULTIPLIERS, "num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 20},
    ),
    "granitemoeshared_none": Case(
        "granitemoeshared", {**LLAMA, "num_local_experts": 6, "num_experts_per_tok": 3, "tie_word_embeddings": True}
    ),
    "solar_open": Case(
        "solar_open",
        {**DEEPSEEK_WITHOUT_LATENTS, **GROUPS, "head_dim": 12, "attention_bias": True, "first_k_dense_replace": 0},
        buffers=correction(CORRECTION, 0, 1, 2),
    ),
    "hy_v3": Case(
        "hy_v3",
        {
            **NAMED,
            "head_dim": 12,
            "attention_bias": True,
            "router_scaling_factor": 1.5,
            "rms_norm_eps": 1e-4,
        },
        buffers=correction("mlp.e_score_correction_bias", 1, 2),
    ),
    "aria_text": Case(
        "aria_text",
        {
            **LLAMA,
            "head_dim": 12,
            "attention_bias": True,
            "moe_num_experts": 6,
            "moe_topk": 3,
            "moe_num_shared_experts": 2,
        },
    ),
    # Its class needs the base of the rotation in two places, and reads only the place that published files lack.
    "dbrx": Case(
        "dbrx",
        {
            "vocab_size": 61,
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 1000.0},
            "ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": 6, "moe_top_k": 3},
            "rope_parameters": ROPE,
        },
    ),
}
