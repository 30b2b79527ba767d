"""The steps of attention, compared with the modules of published models, with and without padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch
import transformers
import yaml
from torch import Tensor, nn

import tfkit

from ..sampling import slow
from .attentions import spec
from .test_attention_steps import angles

LENGTH = 9


@dataclass(frozen=True)
class Published:
    """An attention of `transformers`, and ours that should be the same."""

    cls: str
    config: Mapping[str, Any]
    attention: str
    weights: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """Where ours, apart from the projections, come from; several are stacked."""
    counts_padding: bool = False


SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": False}
GQA = "kind: gqa, n_heads: 4, n_kv_heads: 2, bias: false"
QK = {"q_norm.weight": "q_norm.weight", "k_norm.weight": "k_norm.weight"}
GATE = {"gate.linear.weight": "gate_proj.weight"}
STABLE = {"q_norm.weight": tuple(f"q_layernorm.norms.{i}.weight" for i in range(4))}
STABLE |= {"k_norm.weight": tuple(f"k_layernorm.norms.{i}.weight" for i in range(2))}
YARN = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.7, "original_max_position_embeddings": 3}
COHERE_NORM = "qk_norm: {kind: layernorm, bias: false}, qk_norm_weight: per_head"
PUBLISHED = {
    "clip": Published("Olmo", {**SIZES, "clip_qkv": 0.4}, f"{GQA}, position: rope, clip: 0.4"),
    "norm_by_head": Published(
        "Cohere",
        {**SIZES, "use_qk_norm": True},
        f"{GQA}, position: {{kind: rope, style: interleaved}}, {COHERE_NORM}",
        QK,
    ),
    "norm_by_head_in_several_tensors": Published(
        "StableLm",
        {**SIZES, "qk_layernorm": True, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
        f"{GQA}, position: rope, {COHERE_NORM}",
        STABLE,
    ),
    "inner_norm": Published(
        "BitNet",
        {**SIZES, "rms_norm_eps": 1e-6},
        f"{GQA}, position: rope, inner_norm: rmsnorm",
        {"inner_norm.weight": "attn_sub_norm.weight"},
    ),
    "sinks": Published(
        "GptOss",
        {**SIZES, "head_dim": 8},
        f"{GQA}, position: rope, sinks: true",
        {"core.softmax.sinks": "sinks"},
    ),
    "temperature": Published(
        "Ministral3",
        {**SIZES, "head_dim": 8, "rope_parameters": YARN},
        f"{GQA}, position: rope, temperature: {{beta: 0.7, original_max_len: 3}}",
    ),
    "temperature_from_one": Published(
        "Llama4Text",
        {**SIZES, "head_dim": 8, "no_rope_layers": [0], "num_hidden_layers": 1, "attn_scale": 0.7, "floor_scale": 3},
        f"{GQA}, temperature: {{beta: 0.7, original_max_len: 3, offset: 1}}",
        counts_padding=True,
    ),
    "gate_by_channel": Published(
        "Afmoe",
        {**SIZES, "head_dim": 8, "num_hidden_layers": 1, "layer_types": ["sliding_attention"], "rms_norm_eps": 1e-6},
        f"{GQA}, position: rope, qk_norm: rmsnorm, gate: sigmoid",
        {**QK, **GATE},
    ),
    "gate_by_head": Published(
        "Laguna",
        {**SIZES, "head_dim": 8, "num_hidden_layers": 1, "gating": "per-head", "rms_norm_eps": 1e-6},
        f"{GQA}, position: rope, qk_norm: rmsnorm, gate: {{activation: softplus, per: head}}",
        {**QK, "gate.linear.weight": "g_proj.weight"},
    ),
}


def reference(case: Published) -> nn.Module:
    config = getattr(transformers, f"{case.cls}Config")(**case.config)
    code = import_module(type(config).__module__.replace("configuration_", "modeling_"))
    cls = getattr(code, f"{case.cls}Attention")
    config._attn_implementation = "eager"
    further = {"num_heads": 4} if case.cls == "Laguna" else {}
    torch.manual_seed(0)
    module = cls(config, layer_idx=0, **further).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def port(theirs: nn.Module, case: Published, backend: Any) -> tuple[nn.Module, nn.Module]:
    """Our decoder, and the attention of its only layer, with their weights."""
    actual = dict(theirs.state_dict())
    weights = {
        ours: actual.pop(name) if isinstance(name, str) else torch.stack([actual.pop(value) for value in name])
        for ours, name in case.weights.items()
    }
    weights["project.qkv.weight"] = torch.cat([actual.pop(f"{x}_proj.weight") for x in "qkv"])
    weights["output.weight"] = actual.pop("o_proj.weight")
    assert not actual
    part = yaml.safe_load(f"{{{case.attention}}}")
    model = tfkit.build(spec("decoder", part), attention_backend=backend).eval()
    stack = model.get_submodule("stack")
    attention = stack.get_submodule("layers.0.attention")
    attention.load_state_dict(weights)
    return stack, attention


def tables(case: Published, positions: Tensor) -> tuple[Tensor, Tensor]:
    """What they take."""
    cos, sin = angles(positions, interleaved=case.cls == "Cohere")
    return (cos[..., :4], sin[..., :4]) if case.cls == "GptOss" else (cos, sin)


@pytest.mark.parametrize("side", ["none", slow("right"), "left"])
@pytest.mark.parametrize("backend", ["sdpa", slow("eager")])
@pytest.mark.parametrize("name", PUBLISHED)
@torch.no_grad()
def test_a_step_is_what_a_published_model_does(name: str, backend: str, side: str) -> None:
    case = PUBLISHED[name]
    lengths, columns = torch.tensor([[LENGTH - 2], [LENGTH], [4]]), torch.arange(LENGTH)
    tokens = {"none": columns < LENGTH + lengths, "right": columns < lengths, "left": columns >= LENGTH - lengths}[side]
    positions = (tokens.cumsum(dim=1) - 1).clamp(min=0)
    x = torch.randn(3, LENGTH, 32, generator=torch.Generator().manual_seed(1))
    visible = (columns[:, None] >= columns) & tokens[:, None]
    hidden = torch.zeros(3, 1, LENGTH, LENGTH).masked_fill(~visible[:, None], torch.finfo(torch.float32).min)
    theirs = reference(case)
    options = {"position_ids": positions} if case.cls == "Ministral3" else {}
    table = tables(case, positions)
    want = theirs(hidden_states=x, position_embeddings=table, attention_mask=hidden, **options)[0]
    stack, attention = port(theirs, case, backend)
    actual = attention(x, stack.contexts(x, None if side == "none" else tokens, None, None, None)[0])  # type: ignore[operator]
    if not (case.counts_padding and side == "left"):
        torch.testing.assert_close(actual[tokens], want[tokens], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_a_norm_with_weights_that_are_distances_from_one(kind: str) -> None:
    """Nemotron's layer norm; Gemma's has no mean to subtract."""
    graph = spec("decoder", {"inner_norm": {"kind": kind, "offset": 1}})
    ours = tfkit.build(graph).get_submodule("stack.layers.0.attention.inner_norm")
    code = import_module(
        "transformers.models." + ("nemotron.modeling_nemotron" if kind == "layernorm" else "gemma.modeling_gemma")
    )
    theirs = code.NemotronLayerNorm1P(32) if kind == "layernorm" else code.GemmaRMSNorm(32)
    assert not ours.weight.any()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 5, 32)
    torch.testing.assert_close(ours(x), theirs(x))
