"""Models of nanoGPT, Meta and litgpt, written by hand from their published definitions, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, silu

State = Mapping[str, Tensor]
VOCAB, LENGTH = 23, 9
TOKENS = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(3))


def random_state(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + (len(shape) == 1 and name.endswith("weight"))
        for name, shape in shapes.items()
    }


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [t, heads, d] queries, [t, groups, d] keys and values -> [t, heads * d]."""
    rows = []
    group = q.shape[1] // k.shape[1]
    for t in range(len(q)):
        heads = []
        for head in range(q.shape[1]):
            keys, values = k[: t + 1, head // group], v[: t + 1, head // group]
            weights = torch.softmax(keys @ q[t, head] / math.sqrt(q.shape[2]), 0)
            heads.append(weights @ values)
        rows.append(torch.cat(heads))
    return torch.stack(rows)


# ---- nanoGPT: model.py ----


NANO = {"n_layer": 2, "n_head": 4, "n_embd": 16, "block_size": 12, "vocab_size": VOCAB, "bias": True, "dropout": 0.0}


def nanogpt_state(bias: bool) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (VOCAB, 16), "transformer.wpe.weight": (12, 16)}
    for i in range(2):
        for name, shape in {
            "ln_1": (16,),
            "attn.c_attn": (48, 16),
            "attn.c_proj": (16, 16),
            "ln_2": (16,),
            "mlp.c_fc": (64, 16),
            "mlp.c_proj": (16, 64),
        }.items():
            shapes[f"transformer.h.{i}.{name}.weight"] = shape
            if bias:
                shapes[f"transformer.h.{i}.{name}.bias"] = shape[:1]
    shapes |= {"transformer.ln_f.weight": (16,), **({"transformer.ln_f.bias": (16,)} if bias else {})}
    state = random_state(shapes)
    return {**state, "lm_head.weight": state["transformer.wte.weight"]}


def nanogpt(state: State) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, (16,), state[f"{name}.weight"], state.get(f"{name}.bias"), 1e-5)

    def dense(x: Tensor, name: str) -> Tensor:
        return linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    x = state["transformer.wte.weight"][TOKENS] + state["transformer.wpe.weight"][:LENGTH]
    for i in range(2):
        layer = f"transformer.h.{i}"
        q, k, v = dense(norm(x, f"{layer}.ln_1"), f"{layer}.attn.c_attn").split(16, 1)
        x = x + dense(attend(*(part.view(LENGTH, 4, 4) for part in (q, k, v))), f"{layer}.attn.c_proj")
        x = x + dense(gelu(dense(norm(x, f"{layer}.ln_2"), f"{layer}.mlp.c_fc")), f"{layer}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ state["lm_head.weight"].T


# ---- Meta: llama3/model.py, with complex rotations ----


META = {"dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "vocab_size": VOCAB, "norm_eps": 1e-5}


def meta_state() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (VOCAB, 16), "norm.weight": (16,)}
    for i in range(2):
        for name, shape in {
            "attention_norm": (16,),
            "attention.wq": (16, 16),
            "attention.wk": (8, 16),
            "attention.wv": (8, 16),
            "attention.wo": (16, 16),
            "ffn_norm": (16,),
            "feed_forward.w1": (24, 16),
            "feed_forward.w3": (24, 16),
            "feed_forward.w2": (16, 24),
        }.items():
            shapes[f"layers.{i}.{name}.weight"] = shape
    return random_state({**shapes, "output.weight": (VOCAB, 16)})


def scaled(frequency: float, factor: float) -> float:
    """The scaling of Llama 3.1: long waves are stretched, and those in between partly."""
    wave = 2 * math.pi / frequency
    if wave < 8192 / 4:
        return frequency
    if wave > 8192:
        return frequency / factor
    smooth = (8192 / wave - 1) / (4 - 1)
    return (1 - smooth) * frequency / factor + smooth * frequency


def rotated_pairs(x: Tensor, theta: float, factor: float | None) -> Tensor:
    """Rotate the complex numbers x[2i] + j x[2i + 1] of each head by the angle of the position."""
    turned = x.clone()
    for t in range(len(x)):
        for i in range(x.shape[2] // 2):
            frequency = theta ** (-2 * i / x.shape[2])
            angle = t * (frequency if factor is None else scaled(frequency, factor))
            number = torch.complex(x[t, :, 2 * i], x[t, :, 2 * i + 1]) * complex(math.cos(angle), math.sin(angle))
            turned[t, :, 2 * i], turned[t, :, 2 * i + 1] = number.real, number.imag
    return turned


def meta(state: State, theta: float = 10000.0, factor: float | None = None) -> Tensor:
    x = state["tok_embeddings.weight"][TOKENS]
    for i in range(2):
        weights = {name.removeprefix(f"layers.{i}.").removesuffix(".weight"): value for name, value in state.items()}
        h = rms_norm(x, weights["attention_norm"], 1e-5)
        q, k, v = ((h @ weights[f"attention.w{name}"].T).view(LENGTH, -1, 8) for name in "qkv")
        mixed = attend(rotated_pairs(q, theta, factor), rotated_pairs(k, theta, factor), v)
        x = x + mixed @ weights["attention.wo"].T
        h = rms_norm(x, weights["ffn_norm"], 1e-5)
        gate, up = (h @ weights[f"feed_forward.{name}"].T for name in ("w1", "w3"))
        x = x + (silu(gate) * up) @ weights["feed_forward.w2"].T
    return rms_norm(x, state["norm.weight"], 1e-5) @ state["output.weight"].T


# ---- litgpt: model.py ----


LLAMA: dict[str, Any] = {
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "parallel_residual": False,
    "bias": False,
    "rotary_percentage": 1.0,
    "n_query_groups": 2,
    "intermediate_size": 24,
}
LITGPT: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "attn_bias": True},
    "gpt_neox": {"n_query_groups": 4, "intermediate_size": 64, "rotary_percentage": 0.5},
}
SHARED = {"name": "small", "n_layer": 2, "n_head": 4, "n_embd": 16, "block_size": 12, "padded_vocab_size": VOCAB}


def litgpt_state(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of version 0.5.5, with all queries before all keys and all values."""
    gated, bias = config["mlp_class_name"] == "LLaMAMLP", config["bias"]
    rows, width = (4 + 2 * config["n_query_groups"]) * 4, config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"lm_head.weight": (VOCAB, 16), "transformer.wte.weight": (VOCAB, 16)}
    for i in range(2):
        layer = {"norm_1": (16,), "attn.qkv": (rows, 16), "attn.proj": (16, 16), "norm_2": (16,)}
        layer |= {"mlp.fc_1": (width, 16), "mlp.fc_2": (width, 16)} if gated else {"mlp.fc": (width, 16)}
        layer |= {"mlp.proj": (16, width)}
        for name, shape in layer.items():
            shapes[f"transformer.h.{i}.{name}.weight"] = shape
            if bias or (name == "attn.qkv" and config["attn_bias"]):
                shapes[f"transformer.h.{i}.{name}.bias"] = shape[:1]
    shapes |= {"transformer.ln_f.weight": (16,), **({"transformer.ln_f.bias": (16,)} if bias else {})}
    return random_state(shapes)


def interleaved(state: State, groups: int) -> dict[str, Tensor]:
    """The tensors before version 0.5.5: each group has its queries, its key and its value."""
    older = {}
    for name, tensor in state.items():
        if ".attn.qkv." not in name:
            older[name] = tensor
            continue
        queries, key, value = 4 // groups * 4, 16, 16 + groups * 4
        rows = []
        for group in range(groups):
            rows.append(tensor[group * queries : (group + 1) * queries])
            rows.append(tensor[key + group * 4 : key + (group + 1) * 4])
            rows.append(tensor[value + group * 4 : value + (group + 1) * 4])
        older[name.replace("attn.qkv", "attn.attn")] = torch.cat(rows)
    return older


def rotated_halves(x: Tensor, fraction: float) -> Tensor:
    """Rotate x[i] and x[i + n/2] of the first n numbers of each head."""
    n, turned = int(fraction * x.shape[2]), x.clone()
    for t in range(len(x)):
        for i in range(n // 2):
            angle = t * 10000.0 ** (-2 * i / n)
            first, second = x[t, :, i], x[t, :, i + n // 2]
            turned[t, :, i] = first * math.cos(angle) - second * math.sin(angle)
            turned[t, :, i + n // 2] = second * math.cos(angle) + first * math.sin(angle)
    return turned


def litgpt(state: State, config: Mapping[str, Any]) -> Tensor:
    groups = config["n_query_groups"]

    def norm(x: Tensor, name: str) -> Tensor:
        if config["norm_class_name"] == "RMSNorm":
            return rms_norm(x, state[f"{name}.weight"], 1e-5)
        return layer_norm(x, (16,), state[f"{name}.weight"], state[f"{name}.bias"], 1e-5)

    def dense(x: Tensor, name: str) -> Tensor:
        return linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    x = state["transformer.wte.weight"][TOKENS]
    for i in range(2):
        layer = f"transformer.h.{i}"
        parts = dense(norm(x, f"{layer}.norm_1"), f"{layer}.attn.qkv").split([16, 4 * groups, 4 * groups], 1)
        q, k, v = (part.view(LENGTH, -1, 4) for part in parts)
        q, k = (rotated_halves(heads, config["rotary_percentage"]) for heads in (q, k))
        mixed = dense(attend(q, k, v), f"{layer}.attn.proj")
        h = norm(x if config["parallel_residual"] else x + mixed, f"{layer}.norm_2")
        if config["mlp_class_name"] == "LLaMAMLP":
            h = silu(dense(h, f"{layer}.mlp.fc_1")) * dense(h, f"{layer}.mlp.fc_2")
        else:
            h = gelu(dense(h, f"{layer}.mlp.fc"))
        x = x + mixed + dense(h, f"{layer}.mlp.proj")
    return norm(x, "transformer.ln_f") @ state["lm_head.weight"].T
