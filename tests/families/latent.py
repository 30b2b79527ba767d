"""Latent attention with a dense FFN or with experts, at small sizes, with every option of the families."""

from __future__ import annotations

from typing import Any

from .case import Case
from .experts import CORRECTION, DEEPSEEK, GROUPS, LATENT, YARN, correction
from .llama_kin import ROPE

DEEPSEEK_LAYERS = {key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"}

INDEX = {"index_n_heads": 17, "index_head_dim": 6, "index_topk": 4}  # with few heads, all ReLUs may be 0, and tie


def deepseek_v3(**more: Any) -> Case:
    """A DeepSeek-V3 with two layers of experts."""
    buffers = correction(CORRECTION, 1, 2)
    return Case("deepseek_v3", {**DEEPSEEK, **GROUPS, **more}, buffers=buffers)


def aligned(model: Any) -> None:
    """Take their parameters out of the file: where it holds them at odd addresses, sums run in another order."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


LATENT_KIN: dict[str, Case] = {
    "deepseek_v2": Case(
        "deepseek_v2",
        {
            **DEEPSEEK,
            **GROUPS,
            "topk_method": "group_limited_greedy",
            "attention_bias": True,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
        },
    ),
    "deepseek_v2_lite": Case("deepseek_v2", {**DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 0}),
    "deepseek_v3": deepseek_v3(
        attention_bias=True, rms_norm_eps=1e-4, rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
    ),
    "deepseek_v3_bare": deepseek_v3(
        n_group=1, topk_group=1, q_lora_rank=None, norm_topk_prob=False, rope_interleave=False
    ),
    "sarvam_mla": Case(
        "sarvam_mla",
        {**DEEPSEEK, **GROUPS, "q_lora_rank": None, "attention_bias": True, "rope_parameters": YARN},
        buffers=correction(CORRECTION, 1, 2),
    ),
    "youtu": Case("youtu", {**LATENT, "attention_bias": True, "rope_parameters": YARN}),
    "youtu_halves": Case("youtu", {**LATENT, "q_lora_rank": None, "rope_interleave": False}),
    "minicpm3": Case(
        "minicpm3",
        {
            **LATENT,
            "attention_bias": True,
            "mlp_bias": True,
            "scale_emb": 3,
            "scale_depth": 1.2,
            "dim_model_base": 8,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "original_max_position_embeddings": 32,
                "short_factor": [1.1, 1.7],
                "long_factor": [1.4, 3.0],
            },
        },
    ),
    "glm4_moe_lite": Case(
        "glm4_moe_lite", {**DEEPSEEK_LAYERS, **GROUPS, "attention_bias": True}, buffers=correction(CORRECTION, 1, 2)
    ),
    "deepseek_v32": Case(
        "deepseek_v32",
        {
            **DEEPSEEK,
            **GROUPS,
            **INDEX,
            "attention_bias": True,
            "rms_norm_eps": 1e-4,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        buffers=correction(CORRECTION, 1, 2),
    ),
    "glm_moe_dsa": Case(
        "glm_moe_dsa",
        {**DEEPSEEK, **GROUPS, **INDEX, "rms_norm_eps": 1e-4, "rope_parameters": ROPE},
        buffers=correction(CORRECTION, 1, 2),
    ),
    "glm_moe_dsa_shared": Case(
        "glm_moe_dsa",
        {**DEEPSEEK, **GROUPS, **INDEX, "rms_norm_eps": 1e-4, "rope_parameters": ROPE, "num_hidden_layers": 5}
        | {"first_k_dense_replace": 2, "indexer_types": ["full", "shared", "shared", "full", "shared"]},
        buffers=correction(CORRECTION, 2, 3, 4),
    ),
    "axk1": Case(
        "axk1",
        {**DEEPSEEK_LAYERS, **GROUPS, "attention_bias": True, "rms_norm_eps": 1e-4},
        buffers=correction(CORRECTION, 1, 2),
    ),
    "mistral4": Case(
        "mistral4",
        {
            **DEEPSEEK,
            **GROUPS,
            "attention_bias": True,
            "rms_norm_eps": 1e-4,
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 3,
                "max_position_embeddings": 64,
                "mscale": 0.7,
                "mscale_all_dim": 0.4,
                "llama_4_scaling_beta": 0.3,
            },
        },
        repair=aligned,
    ),
    "mistral4_bare": Case(
        "mistral4",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "first_k_dense_replace": 0,
            "rope_parameters": {**YARN, "original_max_position_embeddings": 3, "llama_4_scaling_beta": 0.3},
        },
        repair=aligned,
    ),
}
