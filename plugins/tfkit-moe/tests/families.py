"""Published mixtures of experts: what a spec says for each, and where transformers keeps its weights."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

D, F, N, K = 16, 12, 8, 2
"""Width, width of an expert, experts, experts of a token: of every model here."""

SIZES = {"hidden_size": D, "intermediate_size": F, "moe_intermediate_size": F, "num_experts_per_tok": K}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2}
GROUPS = {"n": 4, "keep": 2, "by": "top2sum"}
CORRECTED = {"score": "sigmoid", "correction_bias": True, "renormalize": True}
DEEPSEEK_V3 = {**CORRECTED, "eps": 1e-20, "scale": 2.5, "groups": GROUPS}
CLAMPED = {"activation": "quick_gelu", "limit": 0.7, "up_offset": 1}


@dataclass(frozen=True)
class Family:
    """A block of transformers, what its config says beside the sizes, and the fields of `ffn` that say the same."""

    module: str
    config: str
    block: str
    options: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    transposed: bool = False
    """The experts' matrices are [e, d_in, d_out]."""
    interleaved: bool = False
    """The rows of gate and up take turns."""


def _deepseek(module: str, config: str, block: str, *, shared: str = "n_shared_experts") -> Family:
    options = {
        "n_routed_experts": N,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    }
    return Family(module, config, block, {**options, shared: 2}, {"router": DEEPSEEK_V3, "shared": {"d_ff": 2 * F}})


FAMILIES = {
    "mixtral": Family(
        "mixtral", "MixtralConfig", "MixtralSparseMoeBlock", {"num_local_experts": N}, {"router": {"renormalize": True}}
    ),
    "phimoe": Family(
        "phimoe",
        "PhimoeConfig",
        "PhimoeSparseMoeBlock",
        {"num_local_experts": N, "router_jitter_noise": 0.3},
        {"router": {"sparse_mixer": {"jitter": 0.3}}},
    ),
    "qwen2_moe": Family(
        "qwen2_moe",
        "Qwen2MoeConfig",
        "Qwen2MoeSparseMoeBlock",
        {"num_experts": N, "shared_expert_intermediate_size": 20},
        {"shared": {"d_ff": 20, "gate": True}},
    ),
    "qwen3_moe": Family(
        "qwen3_moe",
        "Qwen3MoeConfig",
        "Qwen3MoeSparseMoeBlock",
        {"num_experts": N, "norm_topk_prob": True},
        {"router": {"renormalize": True}},
    ),
    "olmoe": Family("olmoe", "OlmoeConfig", "OlmoeSparseMoeBlock", {"num_experts": N}),
    "flex_olmo": Family("flex_olmo", "FlexOlmoConfig", "FlexOlmoSparseMoeBlock", {"num_experts": N}),
    "granitemoe": Family(
        "granitemoe",
        "GraniteMoeConfig",
        "GraniteMoeMoE",
        {"num_local_experts": N},
        {"router": {"order": "topk_then_score"}},
    ),
    "aria_text": Family(
        "aria",
        "AriaTextConfig",
        "AriaTextMoELayer",
        {"moe_num_experts": N, "moe_topk": K, "moe_num_shared_experts": 2},
        {"router": {"order": "topk_then_score"}, "shared": {"d_ff": 2 * F}},
        transposed=True,
    ),
    "hunyuan_v1_moe": Family(
        "hunyuan_v1_moe",
        "HunYuanMoEV1Config",
        "HunYuanMoEV1Moe",
        {"num_experts": N, "moe_topk": K},
        {"router": {"renormalize": True}, "shared": {"d_ff": F}},
    ),
    "ernie4_5_moe": Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeSparseMoeBlock",
        {"moe_k": K, "moe_num_experts": N, "moe_num_shared_experts": 2},
        {"router": {"renormalize": True, "correction_bias": True}, "shared": {"d_ff": 2 * F}},
    ),
    "gpt_oss": Family(
        "gpt_oss",
        "GptOssConfig",
        "GptOssMLP",
        {"num_local_experts": N, "swiglu_limit": 0.7},
        {**CLAMPED, "bias": True, "router": {"order": "topk_then_score", "bias": True}},
        transposed=True,
        interleaved=True,
    ),
    "minimax_m2": Family(
        "minimax_m2", "MiniMaxM2Config", "MiniMaxM2SparseMoeBlock", {"num_local_experts": N}, {"router": CORRECTED}
    ),
    "minimax_m3": Family(
        "minimax_m3_vl",
        "MiniMaxM3VLTextConfig",
        "MiniMaxM3VLSparseMoeBlock",
        {
            "num_local_experts": N,
            "shared_intermediate_size": 20,
            "routed_scaling_factor": 2.5,
            "swiglu_limit": 0.7,
            "swiglu_alpha": 1.702,
        },
        {**CLAMPED, "router": {**CORRECTED, "scale": 2.5}, "shared": {"d_ff": 20}},
    ),
    "flint": Family(
        "flint",
        "FlintConfig",
        "FlintSparseMoeBlock",
        {"num_experts": N, "shared_expert_intermediate_size": 20, "norm_topk_prob": True},
        {"router": {"score": "sigmoid", "renormalize": True}, "shared": {"d_ff": 20}},
    ),
    "kolibri1": Family(
        "kolibri1",
        "Kolibri1Config",
        "Kolibri1SparseMoeBlock",
        {"num_experts": N, "shared_expert_intermediate_size": F, "n_shared_experts": 1, "norm_topk_prob": True},
        {"router": {**CORRECTED, "order": "topk_then_score"}, "shared": {"d_ff": F}},
    ),
    "laguna": Family(
        "laguna",
        "LagunaConfig",
        "LagunaSparseMoeBlock",
        {
            "num_experts": N,
            "shared_expert_intermediate_size": 20,
            "moe_routed_scaling_factor": 2.5,
            "moe_router_logit_softcapping": 2.0,
        },
        {"router": {**CORRECTED, "scale": 2.5, "softcap": 2.0}, "shared": {"d_ff": 20}},
    ),
    "cohere2_moe": Family(
        "cohere2_moe",
        "Cohere2MoeConfig",
        "Cohere2MoeSparseMoeBlock",
        {"num_experts": N, "num_shared_experts": 2, "expert_selection_fn": "sigmoid"},
        {
            "router": {"score": "sigmoid", "order": "topk_then_score", "renormalize": True},
            "shared": {"d_ff": 2 * F, "combine": "average"},
        },
    ),
    "llama4": Family(
        "llama4",
        "Llama4TextConfig",
        "Llama4TextMoe",
        {"num_local_experts": N},
        {"router": {"score": "sigmoid", "order": "topk_then_score", "weighs": "input"}, "shared": {"d_ff": F}},
        transposed=True,
    ),
    "deepseek_v2": Family(
        "deepseek_v2",
        "DeepseekV2Config",
        "DeepseekV2Moe",
        {
            "n_routed_experts": N,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
        {"router": {"scale": 2.5, "groups": {"n": 4, "keep": 2}}, "shared": {"d_ff": 2 * F}},
    ),
    "mistral4": Family(
        "mistral4",
        "Mistral4Config",
        "Mistral4MoE",
        {
            "n_routed_experts": N,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        {"router": {"renormalize": True, "eps": 1e-20, "scale": 2.5, "groups": GROUPS}, "shared": {"d_ff": 2 * F}},
    ),
    "deepseek_v3": _deepseek("deepseek_v3", "DeepseekV3Config", "DeepseekV3MoE"),
    "dots1": _deepseek("dots1", "Dots1Config", "Dots1MoE"),
    "glm4_moe": _deepseek("glm4_moe", "Glm4MoeConfig", "Glm4MoeMoE"),
    "glm4_moe_lite": _deepseek("glm4_moe_lite", "Glm4MoeLiteConfig", "Glm4MoeLiteMoE"),
    "solar_open": _deepseek("solar_open", "SolarOpenConfig", "SolarOpenMoE"),
}


def block_of(family: Family, seed: int = 0) -> nn.Module:
    """The block of transformers, every weight and buffer random."""
    package = f"transformers.models.{family.module}"
    config = getattr(importlib.import_module(package), family.config)(**SIZES, **family.options)
    config._experts_implementation = "eager"
    block: nn.Module = getattr(importlib.import_module(f"{package}.modeling_{family.module}"), family.block)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in block.state_dict().values():
            tensor.normal_(std=0.4, generator=generator)
    return block.eval()


NAMES = {
    r"(gate|router)(\.wg)?\.weight": "router.weight",
    r"router\.bias": "router.bias",
    r".*e_score_correction_bias": "router.correction",
    r"experts\.gate_up_proj": "experts.gate_up.weight",
    r"experts\.gate_up_proj_bias": "experts.gate_up.bias",
    r"experts\.down_proj": "experts.down.weight",
    r"experts\.down_proj_bias": "experts.down.bias",
    r"shared_(experts?|mlp)\.(gate_up_proj|gate_proj)\.weight": "shared.gate_up.weight",
    r"shared_(experts?|mlp)\.down_proj\.weight": "shared.down.weight",
    r"shared_expert_gate\.weight": "shared_gate.weight",
}


def translated(family: Family, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a block, weights or their gradients, under our names and in our layout."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".up_proj." in name:
            continue
        if ".gate_proj." in name:
            value = torch.cat((tensor, tensors[name.replace("gate_proj", "up_proj")]))
        else:
            value = tensor
        (ours,) = [new for old, new in NAMES.items() if re.fullmatch(old, name)]
        if family.transposed and ours.startswith("experts.") and value.dim() == 3:
            value = value.transpose(1, 2)
        if family.interleaved and ours.startswith("experts.gate_up"):
            value = torch.cat((value[:, ::2], value[:, 1::2]), dim=1)
        result[ours] = value.flatten() if ours == "router.correction" else value
    return result
