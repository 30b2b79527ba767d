"""Models with recurrent layers, from a plugin, at small sizes, with every option of their families."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .case import Case
from .experts import EXPERTS_OF, YARN
from .llama_kin import LLAMA, MULTIPLIERS, ROPE, WINDOW

LENGTH = 75
"""Longer than a chunk of any recurrence."""
STATE_SPACE = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 6, "conv_kernel": 3}
RWKV = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 5, "context_length": 160}
HYBRID = {**LLAMA, "num_hidden_layers": 3, "max_position_embeddings": 160}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_d_conv": 3,
    "mamba_proj_bias": True,
}
EQUAL = {"linear_key_head_dim": 20, "linear_value_head_dim": 10}
"""The class of OLMo-Hybrid stores convolutions in three equal parts, whatever their widths."""
KIMI = {
    **LLAMA,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "max_position_embeddings": 160,
    "linear_num_heads": 3,
    "linear_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 12,
}
BAILING = {
    **{name: value for name, value in KIMI.items() if not name.startswith("linear_")},
    "head_dim": 8,
    "short_conv_kernel_size": 3,
}
FALCON_H1 = {
    "ssm_in_multiplier": 0.7,
    "ssm_multipliers": [0.5, 1.2, 0.8, 0.9, 1.1],
    "ssm_out_multiplier": 0.6,
    "attention_out_multiplier": 0.8,
    "key_multiplier": 1.3,
    "mlp_multipliers": [0.7, 1.4],
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
}
LAYERS = ["linear_attention", "full_attention", "linear_attention"]
LARA = {name: value for name, value in HYBRID.items() if name != "intermediate_size"}
LARA |= {**DELTA, **EXPERTS_OF, "num_experts": 6}
DENSE = {"num_local_experts": 0, "shared_intermediate_size": 40}


def slow_decays(model: Any) -> None:
    """Make decays slow: after fast decays, the norm of a head's output amplifies rounding errors."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data = parameter.data - 2.0


def recurrent(model_type: str, config: dict[str, Any], **more: Any) -> Case:
    """Build a case whose padded rows are compared with each row alone, as several classes are wrong there.

    Weights are smaller than in other cases, and `norm_eps` of xLSTM is larger than in published models: the norm of a
    head's output amplifies rounding errors.
    """
    return Case(model_type, config, length=LENGTH, alone=True, prepare=slow_decays, std=0.15, **more)


def correction(*layers: int) -> dict[str, str]:
    """Return the buffers of Kimi's routers that move their choice."""
    return {f"model.layers.{i}.mlp.gate.e_score_correction_bias": "a training loop moves it" for i in layers}


def minimax(config: dict[str, Any], linear: tuple[int, ...]) -> Case:
    """Build a case of MiniMax whose layers of these numbers have lightning attention."""
    rates = {f"model.layers.{i}.self_attn.slope_rate": "a rate of decay, which is not trained" for i in linear}
    fixed = {**HYBRID, "num_hidden_layers": 4, "num_local_experts": 6, "block_size": 16, **config}
    return replace(recurrent("minimax", fixed, buffers=rates), prepare=published_rates)


def published_rates(model: Any) -> None:
    """Fill the rates of decay as the class does: the tables that a file stores next to them are computed from them."""
    for module in model.modules():
        if hasattr(module, "get_slope_rate"):
            module.slope_rate.copy_(module.get_slope_rate())


def save_original_weights(model: Any) -> None:
    """Let the class save the weights of the file: at inference, it divides them in place, and saves the quotients."""
    save_pretrained, body = model.save_pretrained, getattr(model, "rwkv", model)

    def save(folder: Any) -> None:
        body.train()
        body._rescale_layers()
        body.eval()
        save_pretrained(folder)

    model.save_pretrained = save


def rwkv(config: dict[str, Any]) -> Case:
    """Build a case of RWKV without caches of its class, which must be as wide as the model."""
    fixed = {**RWKV, "use_cache": False, **config}
    return replace(recurrent("rwkv", fixed, repair=save_original_weights), std=0.3)


RECURRENT: dict[str, Case] = {
    "lfm2": recurrent(
        "lfm2",
        {
            **HYBRID,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.3,
            "norm_eps": 1e-4,
            "rope_parameters": ROPE,
        },
    ),
    "lfm2_plain": recurrent(
        "lfm2",
        {**HYBRID, "layer_types": ["full_attention", "conv", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "lfm3": recurrent(
        "lfm3",
        {
            **HYBRID,
            **WINDOW,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "sliding_attention", "full_attention", "sliding_attention"],
            "head_dim": 12,
            "attention_bias": True,
            "conv_bias": True,
            "conv_L_cache": 4,
            "norm_eps": 1e-4,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "sliding_attention": ROPE,
                "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.4},
            },
        },
    ),
    "lfm3_bare": recurrent(
        "lfm3",
        {
            **HYBRID,
            "layer_types": ["full_attention", "conv", "conv"],
            "head_dim": 8,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
        },
    ),
    "mamba": recurrent("mamba", {**STATE_SPACE, "use_bias": True, "expand": 3, "time_step_rank": 5}),
    "mamba_untied": recurrent("mamba", {**STATE_SPACE, "use_conv_bias": False, "tie_word_embeddings": False}),
    "falcon_mamba": recurrent("falcon_mamba", {**STATE_SPACE, "use_bias": True, "mixer_rms_eps": 1e-3}),
    "mamba2": recurrent(
        "mamba2",
        {
            **STATE_SPACE,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "use_bias": True,
            "time_step_limit": [0.1, 1.5],
            "layer_norm_epsilon": 1e-4,
        },
    ),
    "mamba2_plain": recurrent(
        "mamba2", {**STATE_SPACE, "num_heads": 8, "head_dim": 8, "n_groups": 1, "use_conv_bias": False}
    ),
    "qwen3_next": recurrent(
        "qwen3_next",
        {
            **HYBRID,
            **DELTA,
            "layer_types": LAYERS,
            "head_dim": 12,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [2],
            "rms_norm_eps": 1e-4,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
        norm_mean=0.0,
    ),
    "bamba": recurrent(
        "bamba",
        {
            **HYBRID,
            **MAMBA2,
            "attn_layer_indices": [1],
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_conv_bias": False,
            "time_step_limit": [0.1, 1.5],
            "rms_norm_eps": 1e-4,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "granitemoehybrid": recurrent(
        "granitemoehybrid",
        {
            **HYBRID,
            **MULTIPLIERS,
            **MAMBA2,
            "layer_types": LAYERS,
            "attention_bias": True,
            "mamba_conv_bias": False,
            "time_step_limit": [0.1, 1.5],
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 20,
            "position_embedding_type": "rope",
            "rope_parameters": ROPE,
            "rms_norm_eps": 1e-4,
        },
    ),
    "granitemoehybrid_dense": recurrent(
        "granitemoehybrid",
        {**HYBRID, **MAMBA2, **DENSE, "mamba_proj_bias": False, "tie_word_embeddings": True, "hidden_act": "gelu"}
        | {"layer_types": LAYERS},
    ),
    "granitemoehybrid_attention": recurrent(
        "granitemoehybrid",
        {**HYBRID, **MULTIPLIERS, **DENSE, "position_embedding_type": "rope", "head_dim": 12, "mamba_n_heads": 1}
        | {"layer_types": ["full_attention"] * 3},
    ),
    "lfm2_moe": recurrent(
        "lfm2_moe",
        {
            **HYBRID,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "full_attention", "conv"],
            "num_dense_layers": 2,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "routed_scaling_factor": 1.5,
            "conv_bias": True,
            "norm_eps": 1e-4,
        },
        buffers={f"model.layers.{i}.feed_forward.expert_bias": "a training loop moves it" for i in (2, 3)},
    ),
    "olmo_hybrid": recurrent(
        "olmo_hybrid",
        {
            **HYBRID,
            **DELTA,
            **EQUAL,
            "layer_types": LAYERS,
            "attention_bias": True,
            "rms_norm_eps": 1e-4,
            "rope_parameters": ROPE,
        },
    ),
    "olmo_hybrid_bare": recurrent(
        "olmo_hybrid",
        {
            **HYBRID,
            **DELTA,
            **EQUAL,
            "layer_types": LAYERS,
            "linear_allow_neg_eigval": False,
        },
    ),
    "qwen3_5_text": recurrent(
        "qwen3_5_text",
        {
            **HYBRID,
            **DELTA,
            "layer_types": LAYERS,
            "head_dim": 12,
            "rms_norm_eps": 1e-4,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
        norm_mean=0.0,
    ),
    "qwen3_5_moe_text": recurrent(
        "qwen3_5_moe_text",
        {
            **HYBRID,
            **DELTA,
            "layer_types": LAYERS,
            "head_dim": 12,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
            "tie_word_embeddings": True,
        },
        norm_mean=0.0,
    ),
    "jamba": recurrent(
        "jamba",
        {
            **HYBRID,
            "num_hidden_layers": 4,
            "mamba_d_state": 6,
            "mamba_d_conv": 3,
            "mamba_dt_rank": 5,
            "mamba_proj_bias": True,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "rms_norm_eps": 1e-4,
        },
    ),
    "nemotron_h": recurrent(
        "nemotron_h",
        {
            **HYBRID,
            "num_hidden_layers": 5,
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe", "linear_attention"],
            "head_dim": 12,
            "mamba_num_heads": 8,
            "mamba_head_dim": 6,
            "n_groups": 2,
            "ssm_state_size": 6,
            "conv_kernel": 3,
            "use_bias": True,
            "time_step_min": 0.2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "moe_shared_expert_intermediate_size": 20,
            "routed_scaling_factor": 1.5,
            "n_group": 4,
            "topk_group": 2,
            "layer_norm_epsilon": 1e-4,
        },
        buffers={"model.layers.3.mixer.gate.e_score_correction_bias": "a training loop moves it, and no gradient"},
    ),
    "recurrent_gemma": recurrent(
        "recurrent_gemma",
        {
            **{key: value for key, value in HYBRID.items() if key != "max_position_embeddings"},
            "num_hidden_layers": 4,
            "lru_width": 36,
            "conv1d_width": 3,
            "attention_window_size": 5,
            "attention_bias": True,
            "logits_soft_cap": 3.0,
            "rms_norm_eps": 1e-4,
            "block_types": ["recurrent", "attention"],
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
        norm_mean=0.0,
    ),
    "kimi_linear": recurrent(
        "kimi_linear",
        {
            **KIMI,
            "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "attention_bias": True,
            "q_lora_rank": 10,
            "num_shared_experts": 2,
            "num_expert_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "rms_norm_eps": 1e-4,
        },
        buffers=correction(2, 3),
    ),
    "kimi_linear_bare": recurrent(
        "kimi_linear",
        {**KIMI, "layer_types": ["linear_attention", "full_attention"] * 2, "moe_renormalize": False},
        buffers=correction(1, 2, 3),
    ),
    "bailing_hybrid": recurrent(
        "bailing_hybrid",
        {
            **BAILING,
            "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "attention_bias": True,
            "q_lora_rank": 10,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "kda_lower_bound": -3.0,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
        },
        buffers=correction(2, 3),
    ),
    "bailing_hybrid_unbounded": recurrent(
        "bailing_hybrid",
        {
            **BAILING,
            "layer_group_size": 2,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "kda_safe_gate": False,
        },
        buffers=correction(1, 2, 3),
    ),
    "falcon_h1": recurrent(
        "falcon_h1",
        {
            **HYBRID,
            **MAMBA2,
            **FALCON_H1,
            "mamba_d_ssm": 64,
            "mamba_rms_norm": True,
            "time_step_limit": [0.1, 1.5],
            "rms_norm_eps": 1e-4,
            "rope_parameters": ROPE,
        },
    ),
    "lara_mini": recurrent(
        "lara_mini",
        {
            **LARA,
            **WINDOW,
            "num_hidden_layers": 4,
            "head_dim": 12,
            "shared_expert_intermediate_size": 20,
            "attention_bias": True,
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-4,
            "rope_parameters": ROPE,
        },
    ),
    "lara_mini_untied": recurrent(
        "lara_mini",
        {**LARA, "layer_types": LAYERS, "tie_word_embeddings": False},
    ),
    "minimax": minimax(
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "head_dim": 12,
            "num_experts_per_tok": 3,
            "sliding_window": 9,
            "full_attn_alpha_factor": 1.7,
            "full_attn_beta_factor": 0.8,
            "linear_attn_alpha_factor": 1.4,
            "linear_attn_beta_factor": 0.6,
            "mlp_alpha_factor": 0.9,
            "mlp_beta_factor": 1.3,
            "rms_norm_eps": 1e-4,
            "rope_parameters": ROPE,
        },
        linear=(0, 2, 3),
    ),
    "minimax_plain": minimax({"block_size": 64, "tie_word_embeddings": True}, linear=(1, 3)),
    "rwkv": rwkv(
        {"rescale_every": 2, "layer_norm_epsilon": 1e-3, "attention_hidden_size": 40, "intermediate_size": 50}
    ),
    "rwkv_tied": rwkv(
        {"rescale_every": 1, "attention_hidden_size": 20, "intermediate_size": 60, "tie_word_embeddings": True}
    ),
    "xlstm": recurrent(
        "xlstm",
        {
            "vocab_size": 61,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "v_dim_factor": 1.5,
            "ffn_proj_factor": 2.3,
            "ffn_round_up_to_multiple_of": 8,
            "gate_soft_cap": 5.0,
            "eps": 0.01,
            "norm_eps": 0.1,
            "output_logit_soft_cap": 3.0,
            "use_cache": False,  # its caches have widths that are multiples of 64
        },
    ),
    "xlstm_plain": replace(
        recurrent(
            "xlstm",
            {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2, "qk_dim_factor": 1.0}
            | {"norm_eps": 0.1},
        ),
        std=0.1,
    ),
    "falcon_h1_without_norm": recurrent(
        "falcon_h1", {**HYBRID, **MAMBA2, "mamba_d_ssm": 64, "projectors_bias": True, "mamba_conv_bias": False}
    ),
}
