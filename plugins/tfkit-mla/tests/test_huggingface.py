"""Latent attention against every implementation of it in transformers: outputs and gradients, weights as they are."""

from __future__ import annotations

import importlib
import math
from itertools import cycle, product, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import tfkit

PLUGINS = tfkit.load_plugins(plugin_dirs=[Path(__file__).parents[1]], entry_points=False)

NAMES = {
    "q": "q_proj",
    "q_down": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "output": "o_proj",
    "gate": "g_proj",
}
SIZES = {
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 8,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "max_position_embeddings": 64,
    "rms_norm_eps": 0.5,  # of the layers, not of the latents
}
FIELDS = {"kind": "mla", "n_heads": 3, "kv_rank": 8, "q_rank": 10, "d_nope": 6, "d_rope": 4, "d_v": 5}
HALVES = {"kind": "rope", "style": "half"}
PAIRS = {"kind": "rope", "style": "interleaved"}

THETA = {"rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 3.0, **THETA}


def yarn(**more: float) -> dict[str, Any]:
    return {**PAIRS, "scaling": {"kind": "yarn", "factor": 8, "original_max_len": 16, "beta_fast": 3, **more}}


def grown(mscale: float) -> float:
    """What DeepSeek multiplies by for a factor of 8."""
    return 0.1 * mscale * math.log(8) + 1


# The model type, what its config says besides SIZES, and what the spec says besides FIELDS.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {}, {"position": PAIRS}),
    "queries at once": ("deepseek_v2", {"q_lora_rank": None}, {"position": PAIRS, "q_rank": None}),
    "biases": ("deepseek_v2", {"attention_bias": True}, {"position": PAIRS, "bias": True}),
    "deepseek_v3": ("deepseek_v3", {}, {"position": PAIRS}),
    "halves": ("deepseek_v3", {"rope_interleave": False}, {"position": HALVES}),
    "yarn": (
        "deepseek_v3",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        {"scale": f"(d_nope + d_rope) ** -0.5 * {grown(1)} ** 2", "position": yarn(temperature=1)},
    ),
    "yarn, two mscales": (
        "deepseek_v3",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
        {
            "scale": f"(d_nope + d_rope) ** -0.5 * {grown(0.5)} ** 2",
            "position": yarn(temperature=grown(1) / grown(0.5)),
        },
    ),
    "yarn, two mscales in its own words": (
        "deepseek_v3",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
        {"position": yarn(mscale=1, mscale_all_dim=0.5)},
    ),
    "yarn, no mscale": ("deepseek_v2", {"rope_parameters": YARN}, {"position": yarn()}),
    "minicpm3": ("minicpm3", {}, {"position": HALVES}),
    "youtu": ("youtu", {}, {"position": PAIRS}),
    "glm4_moe_lite": ("glm4_moe_lite", {}, {"position": PAIRS}),
    "axk1": ("axk1", {}, {"position": PAIRS}),
    "mistral4": (
        "mistral4",
        {
            "rope_parameters": {
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 3,
                "llama_4_scaling_beta": 0.7,
            }
        },
        {
            "position": yarn(mscale=1, mscale_all_dim=1, original_max_len=3),
            "temperature": {"beta": 0.7, "original_max_len": 3},
        },
    ),
    "bailing_hybrid": ("bailing_hybrid", {}, {"position": PAIRS, "gate": {"activation": "sigmoid", "per": "head"}}),
    "longcat_flash": (
        "longcat_flash",
        {"head_dim": 4},
        {
            "scale": "(d_nope + d_rope) ** -0.5 * (d_model / q_rank) ** 0.5",
            "kv_scale": "(d_model / kv_rank) ** 0.5",
            "position": PAIRS,
        },
    ),
}


def peer_of(model_type: str, options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """Attention and rotary embedding of transformers, every parameter at random."""
    home = f"transformers.models.{model_type}"
    configs = importlib.import_module(f"{home}.configuration_{model_type}")
    modules = importlib.import_module(f"{home}.modeling_{model_type}")
    prefix = next(name for name in configs.__all__ if name.endswith("Config")).removesuffix("Config")
    rope = {"rope_type": "default", **THETA}
    config = getattr(configs, f"{prefix}Config")(**{**SIZES, "rope_parameters": rope, **options})
    config._attn_implementation = "eager"
    attention = getattr(modules, f"{prefix}MLA" if model_type == "longcat_flash" else f"{prefix}Attention")(config, 0)
    torch.manual_seed(0)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.4)
    with torch.no_grad():  # small latents, so that the eps of their norms counts
        for parameter in attention.kv_a_proj_with_mqa.parameters():
            parameter[: SIZES["kv_lora_rank"]] *= 0.01
        for parameter in attention.q_a_proj.parameters() if config.q_lora_rank else ():
            parameter.mul_(0.01)
    return attention.eval(), getattr(modules, f"{prefix}RotaryEmbedding")(config)


def decoder_of(fields: dict[str, Any], backend: str) -> nn.Module:
    """A decoder of one layer."""
    stack = {"block": "decoder", "n_layers": 1, "attention": {**FIELDS, **fields}}
    graph = {"embedding": {"block": "embedding"}, "decoder": stack}
    spec = yaml.safe_dump({"tfkit": 1, "name": "m", "d_model": 24, "vocab_size": 11, "graph": graph}, sort_keys=False)
    return tfkit.build(tfkit.loads(spec, plugins=PLUGINS), attention_backend=backend).decoder.eval()


def carry_over(attention: nn.Module, peer: nn.Module) -> None:
    """The weights by name, as a file has them."""
    weights = peer.state_dict()
    mine = {name: weights.pop(f"{NAMES[name.split('.')[0]]}.{name.split('.')[-1]}") for name in attention.state_dict()}
    assert not weights
    attention.load_state_dict(mine)


def visible(padding: Tensor) -> Tensor:
    """What is added to the scores of causal attention, [b, 1, q, k]; a query that may read nothing reads all."""
    readable = torch.ones(padding.size(1), padding.size(1)).tril().bool() & padding[:, None, None, :]
    readable = readable | ~readable.any(dim=-1, keepdim=True)
    return torch.zeros(readable.shape).masked_fill(~readable, -math.inf)


PADDINGS = {
    "none": torch.ones(2, 7, dtype=torch.bool),
    "left": torch.arange(7) >= torch.tensor([[0], [3]]),
    "right": torch.arange(7) < torch.tensor([[7], [3]]),
}
QUICK_CASES = {*zip(CASES, cycle(PADDINGS), repeat("sdpa"))}
ROWS = [
    pytest.param(*row, marks=[] if row in QUICK_CASES else pytest.mark.slow)
    for row in product(CASES, PADDINGS, ["sdpa", "eager"])
]


@pytest.mark.parametrize(("case", "padded", "backend"), ROWS)
def test_outputs_and_gradients(case: str, padded: str, backend: str) -> None:
    (model_type, options, fields), padding = CASES[case], PADDINGS[padded]
    peer, rotary = peer_of(model_type, options)
    decoder = decoder_of(fields, backend)
    attention = decoder.layers[0].attention
    carry_over(attention, peer)
    x = torch.randn(2, 7, 24, requires_grad=True)
    positions = (padding.long().cumsum(dim=1) - 1).clamp(min=0)
    want, _ = peer(x, position_embeddings=rotary(x, positions), position_ids=positions, attention_mask=visible(padding))
    context = decoder.contexts(x, None if padding.all() else padding, None, None, None)[0]
    actual = attention(x, context)
    assert want.abs().max() > 0.5
    assert difference(actual[padding], want[padding]) < 1e-6
    direction = torch.randn(2, 7, 24) * padding[:, :, None]
    mine = gradients(actual, direction, x, attention)
    rest = gradients(want, direction, x, peer)
    assert len(mine) == len(rest)
    for name, gradient in mine.items():
        module, end = name.split(".")[0], name.split(".")[-1]
        assert difference(gradient, rest[f"{NAMES[module]}.{end}" if end != name else name]) < 1e-6, name


def gradients(output: Tensor, direction: Tensor, x: Tensor, module: nn.Module) -> dict[str, Tensor]:
    leaves = {"x": x, **dict(module.named_parameters())}
    return dict(zip(leaves, torch.autograd.grad((output * direction).sum(), list(leaves.values())), strict=True))


def difference(actual: Tensor, want: Tensor) -> float:
    return ((actual - want).abs().max() / want.abs().max()).item()


LAYER = {
    "attention_norm_in": "input_layernorm",
    "ffn_norm_in": "post_attention_layernorm",
    "ffn.down": "mlp.down_proj",
    **{f"attention.{name}": f"self_attn.{other}" for name, other in NAMES.items()},
}
ENDS = {"embedding.tokens": "model.embed_tokens", "decoder.final_norm": "model.norm", "logits.output": "lm_head"}


def published(name: str, weights: dict[str, Tensor]) -> Tensor:
    """The weight of a dense DeepSeek for one of ours."""
    module = name.removesuffix(".weight")
    if not module.startswith("decoder.layers."):
        return weights[f"{ENDS[module]}.weight"]
    _, _, number, part = module.split(".", 3)
    layer = f"model.layers.{number}"
    if part == "ffn.gate_up":
        return torch.cat([weights[f"{layer}.mlp.{half}_proj.weight"] for half in ("gate", "up")])
    return weights[f"{layer}.{LAYER[part]}.weight"]


def test_a_whole_model_and_its_cache() -> None:
    dense = {"first_k_dense_replace": 2, "num_hidden_layers": 2, "vocab_size": 31, "intermediate_size": 20}
    config = DeepseekV3Config(**{**SIZES, **dense, "rms_norm_eps": 1e-5}, num_mtp_layers=0, pad_token_id=0)
    peer = DeepseekV3ForCausalLM(config).eval()
    torch.manual_seed(0)
    for parameter in peer.parameters():
        nn.init.normal_(parameter, std=0.3)
    stack = {"block": "decoder", "n_layers": 2, "norm": {"kind": "rmsnorm", "eps": 1e-5}}
    stack |= {"attention": {**FIELDS, "position": PAIRS}, "ffn": {"kind": "swiglu", "d_ff": 20}}
    graph = {"embedding": {"block": "embedding"}, "decoder": stack, "logits": {"block": "lm_head"}}
    top = {"tfkit": 1, "name": "m", "d_model": 24, "vocab_size": 31, "bias": False}
    spec = yaml.safe_dump({**top, "graph": graph}, sort_keys=False)
    model = tfkit.build(tfkit.loads(spec, plugins=PLUGINS)).eval()
    weights = peer.state_dict()
    model.load_state_dict({name: published(name, weights) for name in model.state_dict()})
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in peer.parameters())
    tokens, padding = torch.randint(31, (2, 7)), PADDINGS["left"]
    cached = tfkit.CachedModel(model, length=7)
    with torch.no_grad():
        want = peer(tokens, attention_mask=padding.long()).logits
        assert difference(model(tokens, padding)[padding], want[padding]) < 1e-6
        ranges = [(0, 4), (4, 5), (5, 6), (6, 7)]
        actual = torch.cat([cached(tokens[:, a:b], padding[:, a:b]) for a, b in ranges], dim=1)
    assert difference(actual[padding], want[padding]) < 1e-5
