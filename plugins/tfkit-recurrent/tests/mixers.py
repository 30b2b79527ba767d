"""A single mixer or FFN, built as a model builds it, and the class of transformers that it stands for.

All weights are random.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import tfkit
from tfkit.nn import Cache, Context

PLUGINS = tfkit.load_plugins(plugin_dirs=[Path(__file__).parents[1]], entry_points=False)
WIDTH = 24
Tensors = Mapping[str, Tensor]


def slot_of(fields: Mapping[str, Any]) -> str:
    """Return the slot of a kind with these fields."""
    return "ffn" if fields["kind"] == "channel_mix" else "mixer"


def built(fields: Mapping[str, Any]) -> tuple[Any, nn.Module]:
    """Return the config and the module of a mixer or an FFN."""
    slot = slot_of(fields)
    spec = {
        "tfkit": 1,
        "name": "test",
        "d_model": WIDTH,
        "inputs": {"x": {"type": "features", "width": WIDTH}},
        "graph": {
            "decoder": {
                "block": "decoder",
                "n_layers": 1,
                "attention": None,
                "final_norm": False,
                slot: dict(fields),
            }
        },
    }
    model = tfkit.build(tfkit.load(spec, plugins=PLUGINS))
    path = f"decoder.layers.0.{slot}"
    return model.meta["components"][path], model.get_submodule(path).eval()


def states(config: Any, batch: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the states of a mixer before the first token."""
    return [
        torch.zeros(batch, *state.shape(0), dtype=torch.promote_types(dtype, torch.float32) if state.wide else dtype)
        for state in config.cached
    ]


def context(
    tensors: list[Tensor] | None = None, padding: Tensor | None = None, documents: Tensor | None = None
) -> Context:
    """Return the context of a layer with states, padding and documents."""
    cache = None if tensors is None else Cache(tensors, torch.zeros(0, dtype=torch.long), 0, 0)
    return Context(None, None, None, cache, padding=padding, documents=documents)


@dataclass(frozen=True)
class Pair:
    """A class of transformers, and the mixer that computes the same.

    Attributes:
        module: of the class in transformers.
        block: name of the class.
        config: name of its config class, and fields of it.
        fields: of our mixer.
        tensors: turns their tensors into ours.
        layer: number of the layer; None if their constructor takes none.
        arguments: further arguments of their forward.
        options: further arguments of their constructor.
    """

    module: str
    block: str
    config: tuple[str, Mapping[str, Any]]
    fields: Mapping[str, Any]
    tensors: Callable[[Tensors], dict[str, Tensor]]
    layer: int | None = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def theirs(self) -> nn.Module:
        """Build their class, every weight random."""
        name, fields = self.config
        config = getattr(transformers, name)(hidden_size=WIDTH, **fields)
        module = importlib.import_module(f"transformers.models.{self.module}.modeling_{self.module}")
        torch.manual_seed(0)
        numbers = [] if self.layer is None else [self.layer]
        block: nn.Module = getattr(module, self.block)(config, *numbers, **self.options).eval()
        if self.module == "falcon_h1":
            block.mup_vector = module.compute_mup_vector(config)
        with torch.no_grad():
            for name, parameter in block.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.4)
        return block

    def ours(self, theirs: nn.Module) -> tuple[Any, nn.Module]:
        """Build our mixer with their weights."""
        config, mixer = built(self.fields)
        mixer.load_state_dict(self.tensors(theirs.state_dict()), strict=True)
        return config, mixer

    def output(self, theirs: nn.Module, x: Tensor) -> Tensor:
        """Return what their class computes."""
        with torch.no_grad():
            y = theirs(x, **self.arguments)
        return y[0] if isinstance(y, tuple) else y


def renamed(tensors: Tensors, **names: str) -> dict[str, Tensor]:
    """Rename tensors by parts of their names; a tensor `mup_vector` is left out."""
    result = {}
    for name, tensor in tensors.items():
        renamed_name = name
        for old, new in names.items():
            renamed_name = renamed_name.replace(old, new)
        result[renamed_name] = tensor
    result.pop("mup_vector", None)
    return result


def short_conv(tensors: Tensors) -> dict[str, Tensor]:
    return renamed(tensors, in_proj="input", out_proj="output")


def mamba(tensors: Tensors) -> dict[str, Tensor]:
    result = renamed(
        {**tensors, "step_bias": tensors["dt_proj.bias"], "a_log": tensors["A_log"].flatten()},
        in_proj="input",
        x_proj="rates",
        out_proj="output",
        conv1d="conv",
        dt_proj="step_up",
        dt_layernorm="step_norm",
        b_layernorm="b_norm",
        c_layernorm="c_norm",
    )
    result["skip"] = result.pop("D")
    del result["A_log"], result["step_up.bias"]
    return result


def mamba2(tensors: Tensors) -> dict[str, Tensor]:
    result = renamed(tensors, in_proj="input", out_proj="output", conv1d="conv", dt_bias="step_bias", A_log="a_log")
    result["skip"] = result.pop("D")
    if "norm.weight" in result:
        result["norm.weight"] = result["norm.weight"].view(3, -1)
    return result


def qwen3_5(tensors: Tensors) -> dict[str, Tensor]:
    rates = torch.cat((tensors["in_proj_b.weight"], tensors["in_proj_a.weight"]))
    remaining = {name: tensor for name, tensor in tensors.items() if not name.startswith(("in_proj_a", "in_proj_b"))}
    names = {"in_proj_qkv": "project", "in_proj_z": "gate", "out_proj": "output", "conv1d": "conv"}
    return renamed({**remaining, "rates.weight": rates}, **names, A_log="a_log", dt_bias="step_bias")


def qwen3_next(tensors: Tensors) -> dict[str, Tensor]:
    heads = tensors["in_proj_qkvz.weight"].view(3, -1, WIDTH)
    q, k, v, gate = (part.flatten(0, 1) for part in heads.split([4, 4, 10, 10], dim=1))
    beta, step = (part.flatten(0, 1) for part in tensors["in_proj_ba.weight"].view(3, 4, WIDTH).split(2, dim=1))
    remaining = {name: tensor for name, tensor in tensors.items() if not name.startswith("in_proj")}
    weights = {"project.weight": torch.cat((q, k, v)), "gate.weight": gate, "rates.weight": torch.cat((beta, step))}
    return renamed({**remaining, **weights}, out_proj="output", conv1d="conv", A_log="a_log", dt_bias="step_bias")


def olmo_hybrid(tensors: Tensors) -> dict[str, Tensor]:
    project = torch.cat([tensors[f"{name}_proj.weight"] for name in "qkv"])
    rates = torch.cat([tensors[f"{name}_proj.weight"] for name in "ba"])
    remaining = {name: tensor for name, tensor in tensors.items() if name[:6] not in [f"{x}_proj" for x in "qkvab"]}
    names = {"g_proj": "gate", "o_proj": "output", "o_norm": "norm", "conv1d": "conv"}
    return renamed(
        {**remaining, "project.weight": project, "rates.weight": rates}, **names, A_log="a_log", dt_bias="step_bias"
    )


def kimi(tensors: Tensors) -> dict[str, Tensor]:
    project = torch.cat([tensors[f"{name}_proj.weight"] for name in "qkv"])
    remaining = {name: tensor for name, tensor in tensors.items() if name[:6] not in [f"{x}_proj" for x in "qkv"]}
    result = renamed(
        {**remaining, "project.weight": project, "a_log": tensors["forget_gate.A_log"].flatten()},
        conv1d="conv",
        **{"forget_gate.f_a_proj": "decay_down", "forget_gate.f_b_proj": "decay_up"},
        **{"forget_gate.dt_bias": "step_bias"},
        b_proj="beta",
        g_a_proj="gate_down",
        g_beta="gate_up",
        o_norm="norm",
        o_proj="output",
    )
    del result["forget_gate.A_log"]
    return result


def bailing(tensors: Tensors) -> dict[str, Tensor]:
    project = torch.cat([tensors[f"{name}_proj.weight"] for name in "qkv"])
    remaining = {name: tensor for name, tensor in tensors.items() if name[:6] not in [f"{x}_proj" for x in "qkv"]}
    names = {"conv1d": "conv", "b_proj": "beta", "g_proj": "gate_up", "o_norm": "norm", "o_proj": "output"}
    names |= {"forget_gate.f_proj": "decay_up", "forget_gate.dt_bias": "step_bias", "forget_gate.A_log": "a_log"}
    return renamed({**remaining, "project.weight": project}, **names)


def minimax(tensors: Tensors) -> dict[str, Tensor]:
    project = tensors["qkv_proj.weight"].view(4, 3, 6, WIDTH).transpose(0, 1).reshape(-1, WIDTH)
    remaining = {name: tensor for name, tensor in tensors.items() if "decay" not in name and "qkv" not in name}
    result = renamed({**remaining, "project.weight": project}, output_gate="gate", out_proj="output")
    result["slopes"] = result.pop("slope_rate").flatten()
    return result


def griffin(tensors: Tensors) -> dict[str, Tensor]:
    gates = [tensors[f"rg_lru.{name}_gate_weight"] for name in ("input", "recurrent")]
    biases = [tensors[f"rg_lru.{name}_gate_bias"] for name in ("input", "recurrent")]
    ends = ("weight", "bias")
    return {
        **{f"input.{end}": torch.cat((tensors[f"linear_x.{end}"], tensors[f"linear_y.{end}"])) for end in ends},
        **{f"conv.{end}": tensors[f"conv_1d.{end}"] for end in ends},
        **{f"output.{end}": tensors[f"linear_out.{end}"] for end in ends},
        "gates.weight": torch.cat(gates, dim=2).mT,
        "gates.bias": torch.cat(biases, dim=1),
        "decay": tensors["rg_lru.recurrent_param"],
    }


def rwkv(tensors: Tensors) -> dict[str, Tensor]:
    flat = {name: tensor.flatten() if "time_mix" in name else tensor for name, tensor in tensors.items()}
    mixes = {f"time_mix_{name}": f"{name}_mix" for name in ("key", "value", "receptance")}
    return renamed(flat, **mixes, time_decay="decay", time_first="bonus")


def xlstm(tensors: Tensors) -> dict[str, Tensor]:
    gates = [tensors[f"{name}gate_preact.weight"] for name in "if"]
    return {
        "project.weight": torch.cat([tensors[f"{name}.weight"] for name in "qkv"]),
        "rates.weight": torch.cat(gates),
        "input_bias": tensors["igate_preact.bias"],
        "forget_bias": tensors["fgate_preact.bias"],
        "gate.weight": tensors["ogate_preact.weight"],
        "norm.weight": tensors["multihead_norm.weight"].view(3, -1),
        "output.weight": tensors["out_proj.weight"],
    }


GELU = {"kind": "gelu", "approximate": "tanh"}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
ONE_LAYER = {"num_hidden_layers": 1}
STATE = {"state_size": 6, "conv_kernel": 3, "use_bias": True, **ONE_LAYER}
MAMBA = {"kind": "mamba", "d_inner": 48, "d_state": 6, "step_rank": 5, "size": 3, "bias": True}
MAMBA2 = {"kind": "mamba2", "n_heads": 12, "d_head": 4, "n_groups": 3, "d_state": 6, "size": 3, "bias": True}
EPS = {"kind": "rmsnorm", "eps": 0.01}
FALCON = {
    **HEADS,
    **ONE_LAYER,
    "mamba_d_state": 6,
    "mamba_d_ssm": 48,
    "mamba_d_conv": 3,
    "mamba_n_heads": 12,
    "mamba_d_head": 4,
    "mamba_n_groups": 3,
    "mamba_proj_bias": True,
    "projectors_bias": False,
    "ssm_in_multiplier": 0.7,
    "ssm_multipliers": [0.5, 1.2, 0.8, 0.9, 1.1],
    "rms_norm_eps": 0.01,
}
FACTORS = {"gate": 0.5, "x": 1.2, "b": 0.8, "c": 0.9, "step": 1.1}
SCALED = {**MAMBA2, "output_bias": False, "input_scale": 0.7, "factors": FACTORS}
LINEAR = {
    **ONE_LAYER,
    "layer_types": ["linear_attention"],
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 3,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "rms_norm_eps": 0.01,
}
DELTA = {"kind": "gated_delta", "n_heads": 6, "n_key_heads": 3, "d_key": 4, "d_value": 5, "size": 3}
KDA = {"kind": "kda", "n_heads": 3, "d_head": 5, "size": 3, "output_norm": EPS}
BAILING = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 5,
    "short_conv_kernel_size": 3,
    "kda_lower_bound": -3.0,
}
OLMO = {**LINEAR, **HEADS, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def lfm2(size: int) -> Pair:
    config = {**ONE_LAYER, **HEADS, "conv_bias": True, "conv_L_cache": size, "layer_types": ["conv"]}
    fields = {"kind": "short_conv", "size": size, "bias": True}
    return Pair("lfm2", "Lfm2ShortConv", ("Lfm2Config", config), fields, short_conv)


def falcon_h1(fields: Mapping[str, Any], **more: Any) -> Pair:
    return Pair("falcon_h1", "FalconH1Mixer", ("FalconH1Config", {**FALCON, **more}), {**SCALED, **fields}, mamba2)


PAIRS: dict[str, Pair] = {
    "short_conv": lfm2(4),
    "short_conv of one token": lfm2(1),
    "mamba": Pair("mamba", "MambaMixer", ("MambaConfig", {**STATE, "time_step_rank": 5}), MAMBA, mamba),
    "mamba with weightless norms": Pair(
        "falcon_mamba",
        "FalconMambaMixer",
        ("FalconMambaConfig", {**STATE, "time_step_rank": 5, "mixer_rms_eps": 0.01}),
        {**MAMBA, "inner_norm": {**EPS, "scale": False}},
        mamba,
        options={"initialize_mixer_weights": False},
    ),
    "mamba with norms": Pair(
        "jamba",
        "JambaMambaMixer",
        (
            "JambaConfig",
            {
                **ONE_LAYER,
                **HEADS,
                "mamba_d_state": 6,
                "mamba_d_conv": 3,
                "mamba_dt_rank": 5,
                "mamba_proj_bias": True,
                "rms_norm_eps": 0.01,
            },
        ),
        {**MAMBA, "inner_norm": EPS},
        mamba,
    ),
    "mamba2": Pair(
        "mamba2",
        "Mamba2Mixer",
        (
            "Mamba2Config",
            {
                **STATE,
                "num_heads": 12,
                "head_dim": 4,
                "n_groups": 3,
                "time_step_limit": (0.1, 1.5),
                "layer_norm_epsilon": 0.01,
                "chunk_size": 16,
            },
        ),
        {**MAMBA2, "step_min": 0.1, "step_max": 1.5, "output_norm": EPS},
        mamba2,
    ),
    "mamba2 gated after its norm": falcon_h1(
        {"output_norm": EPS, "gate": "after_norm"}, mamba_rms_norm=True, mamba_norm_before_gate=True
    ),
    "mamba2 gated before its norm": falcon_h1({"output_norm": EPS}, mamba_rms_norm=True, mamba_norm_before_gate=False),
    "mamba2 without a norm": falcon_h1({"output_norm": None}, mamba_rms_norm=False),
    "gated_delta": Pair(
        "qwen3_5", "Qwen3_5GatedDeltaNet", ("Qwen3_5TextConfig", LINEAR), {**DELTA, "output_norm": EPS}, qwen3_5
    ),
    "gated_delta, packed": Pair(
        "qwen3_next", "Qwen3NextGatedDeltaNet", ("Qwen3NextConfig", LINEAR), {**DELTA, "output_norm": EPS}, qwen3_next
    ),
    "gated_delta, negative": Pair(
        "olmo_hybrid",
        "OlmoHybridGatedDeltaNet",
        ("OlmoHybridConfig", OLMO),
        {**DELTA, "output_norm": {"kind": "rmsnorm", "eps": 1e-5}, "negative": True},
        olmo_hybrid,
    ),
    "kda": Pair(
        "bailing_hybrid",
        "BailingHybridDeltaAttention",
        ("BailingHybridConfig", {**LINEAR, **BAILING}),
        {**KDA, "low_rank": False, "max_rate": 3.0},
        bailing,
    ),
    "kda, low rank": Pair(
        "kimi_linear",
        "KimiLinearDeltaAttention",
        (
            "KimiLinearConfig",
            {**LINEAR, "num_attention_heads": 4, "num_key_value_heads": 4, "linear_num_heads": 3, "linear_head_dim": 5},
        ),
        KDA,
        kimi,
    ),
    "kda, without a bound": Pair(
        "bailing_hybrid",
        "BailingHybridDeltaAttention",
        ("BailingHybridConfig", {**LINEAR, **BAILING, "kda_safe_gate": False}),
        {**KDA, "low_rank": False},
        bailing,
    ),
    "lightning": Pair(
        "minimax",
        "MiniMaxLightningAttention",
        (
            "MiniMaxConfig",
            {
                "num_attention_heads": 4,
                "head_dim": 6,
                "num_hidden_layers": 3,
                "layer_types": ["linear_attention"] * 3,
                "block_size": 16,
            },
        ),
        {"kind": "lightning", "n_heads": 4, "d_head": 6},
        minimax,
        layer=1,
        arguments={"position_embeddings": None, "attention_mask": None},
    ),
    "rg_lru": Pair(
        "recurrent_gemma",
        "RecurrentGemmaRecurrentBlock",
        ("RecurrentGemmaConfig", {**ONE_LAYER, "num_attention_heads": 3, "lru_width": 30, "conv1d_width": 3}),
        {
            "kind": "rg_lru",
            "d_inner": 30,
            "n_blocks": 3,
            "size": 3,
            "activation": GELU,
        },
        griffin,
        arguments={"position_ids": torch.arange(90)[None], "attention_mask": None, "use_cache": False},
    ),
    "rwkv4": Pair(
        "rwkv",
        "RwkvSelfAttention",
        ("RwkvConfig", {**ONE_LAYER, "attention_hidden_size": 30}),
        {"kind": "rwkv4", "d_inner": 30},
        rwkv,
    ),
    "mlstm": Pair(
        "xlstm",
        "xLSTMLayer",
        (
            "xLSTMConfig",
            {
                **ONE_LAYER,
                "num_heads": 3,
                "v_dim_factor": 1.25,
                "gate_soft_cap": 6.0,
                "eps": 0.01,
                "norm_eps": 0.01,
                "chunk_size": 16,
            },
        ),
        {
            "kind": "mlstm",
            "n_heads": 3,
            "d_key": 4,
            "d_value": 10,
            "gate_softcap": 6.0,
            "eps": 0.01,
            "output_norm": {"kind": "layernorm", "eps": 0.01, "bias": False},
        },
        xlstm,
        layer=None,
    ),
    "channel_mix": Pair(
        "rwkv",
        "RwkvFeedForward",
        ("RwkvConfig", {**ONE_LAYER, "intermediate_size": 50}),
        {"kind": "channel_mix", "d_ff": 50},
        rwkv,
    ),
}
