"""Each kind equals the class that it is named after, with random weights, and has every property of a component."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import pytest
import torch
from diffusers.models.normalization import AdaLayerNormZero
from tfkit_streams.reference import KINDS
from torch import Tensor, nn
from transformers.models.deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek
from transformers.models.hy_v4 import HYV4Config
from transformers.models.hy_v4 import modeling_hy_v4 as hunyuan
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

import tfkit
from tfkit.testing import check_component

PLUGINS = tfkit.load_plugins()
WIDTH, TOLERANCE = 16, 1e-6
SPEC = """
tfkit: 1
name: small
d_model: 16
vocab_size: 23
max_len: 64
graph:
  embedding: {block: embedding}
  decoder:
    block: decoder
    n_layers: 3
    attention: {kind: mha, n_heads: 2, position: rope}
    ffn: {kind: swiglu, d_ff: 24}
  logits: {block: lm_head}
"""
FIELDS = {
    "manifold": {"residual": {"kind": "manifold", "streams": 3, "iterations": 4}},
    "independent": {"residual": {"kind": "independent", "streams": 3}},
    "gated": {"residual": {"kind": "gated", "streams": 3, "rank": 4}},
    "depth": {"residual": "depth"},
    "modulated": {"condition": "time", "norm": "adaptive", "residual": "modulated"},
}


def graph_of(fields: Mapping[str, Any], condition: int | None = None) -> tfkit.Graph:
    """Load the small model with these fields of its decoder, and an input for a condition of that width."""
    sets: dict[str, Any] = {f"decoder.{name}": value for name, value in fields.items()}
    if condition is not None:
        inputs = {"tokens": "tokens", "time": {"type": "vector", "width": condition}}
        sets |= {"inputs": inputs, "embedding.input": "tokens", "d_condition": condition}
    return tfkit.loads(SPEC, plugins=PLUGINS, sets=sets)


def redrawn(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            generator = torch.Generator().manual_seed(index)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return module.eval()


def copied(module: nn.Module, **weights: Tensor) -> None:
    with torch.no_grad():
        for name, weight in weights.items():
            parameter = module.get_parameter(name.replace("__", "."))
            parameter.copy_(weight.reshape(parameter.shape))


def context(condition: Tensor | None = None) -> tfkit.Context:
    return tfkit.Context(None, None, None, condition=condition)


def equal(result: Tensor, expected: Tensor) -> None:
    assert result.shape == expected.shape
    assert (result - expected).abs().max() <= TOLERANCE
    assert result.abs().max() > 0.1


def modules(model: torch.fx.GraphModule) -> list[nn.Module]:
    """Return the modules `read`, `write` and `leave` of a model."""
    layer = model.get_submodule("decoder.layers.1")
    return [layer.ffn_residual_read, layer.ffn_residual_write, model.get_submodule("decoder.leave")]


def test_manifold_is_the_hyper_connection_of_deepseek_v4() -> None:
    config = DeepseekV4Config(hidden_size=WIDTH, hc_mult=3, hc_sinkhorn_iters=4, hc_eps=1e-3, rms_norm_eps=1e-4)
    theirs, head = redrawn(deepseek.DeepseekV4HyperConnection(config)), redrawn(deepseek.DeepseekV4HyperHead(config))
    fields = FIELDS["manifold"]["residual"] | {"eps": 1e-3, "norm_eps": 1e-4}
    read, write, leave = modules(tfkit.build(graph_of({"residual": fields})))
    copied(read, project__weight=theirs.fn, base=theirs.base, scale=theirs.scale)
    copied(leave, project__weight=head.hc_fn, base=head.hc_base, scale=head.hc_scale)
    streams, y = torch.randn(2, 5, 3, WIDTH), torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        post, comb, collapsed = theirs(streams)
        x, carried = read(streams, context())
        equal(x, collapsed)
        mixed = torch.einsum("btik,btim->btkm", comb, streams)  # as their layer multiplies: by the transposed matrix
        equal(write(streams, y, carried), post[..., None] * y[:, :, None] + mixed)
        equal(leave(streams), head(streams))


def test_independent_is_the_hyper_connection_of_hy_v4() -> None:
    config = HYV4Config(hidden_size=WIDTH, hc_mult=3, hc_magnitude=1.5, hc_eps=1e-3, rms_norm_eps=1e-4)
    theirs, head = redrawn(hunyuan.HYV4HyperConnection(config)), redrawn(hunyuan.HYV4HyperHead(config))
    fields = FIELDS["independent"]["residual"] | {"magnitude": 1.5, "eps": 1e-3, "norm_eps": 1e-4}
    read, write, leave = modules(tfkit.build(graph_of({"residual": fields})))
    copied(read, project__weight=theirs.fn, base=theirs.base, scale=theirs.scale)
    copied(leave, project__weight=head.hc_fn, base=head.hc_base, scale=head.hc_scale)
    streams, y = torch.randn(2, 5, 3, WIDTH), torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        post, collapsed = theirs(streams)
        x, carried = read(streams, context())
        equal(x, collapsed)
        equal(write(streams, y, carried), post[..., None] * y[:, :, None] + streams)
        equal(leave(streams), head(streams))


def test_gated_is_the_gated_residual_of_qwen4() -> None:
    config = Qwen4ExpTextConfig(hidden_size=WIDTH, hc_count=3, hc_lowrank=4, rms_norm_eps=1e-4)
    theirs = redrawn(qwen.Qwen4ExpTextGatedResidual(config))
    last = redrawn(qwen.Qwen4ExpTextGatedResidual(config, use_combine=False))
    read, write, leave = modules(tfkit.build(graph_of({"residual": FIELDS["gated"]["residual"] | {"eps": 1e-4}})))
    for ours, source in ((read, theirs), (leave, last)):
        down, up = source.input_mix_weight_down.weight, source.input_mix_weight_up.weight
        copied(ours, weight=source.hc_norm.weight, down__weight=down, up__weight=up)
    copied(read, inject__weight=theirs.block_inject_weight.weight)
    streams, y = torch.randn(2, 5, 3, WIDTH), torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        mixed, flat, weights = theirs(streams.flatten(2))
        x, carried = read(streams, context())
        equal(x, mixed)
        equal(write(streams, y, carried).flatten(2), flat + (y[:, :, None] * weights[..., None]).flatten(2))
        equal(leave(streams), last(streams.flatten(2)))


def test_modulated_and_adaptive_are_adaln_zero() -> None:
    theirs = redrawn(AdaLayerNormZero(WIDTH))
    layer = tfkit.build(graph_of(FIELDS["modulated"], WIDTH)).get_submodule("decoder.layers.1")
    for index, name in enumerate(("attention", "ffn")):
        (weight, gate), (bias, gate_bias) = [
            parameter.chunk(2)[index].split([2 * WIDTH, WIDTH])
            for parameter in (theirs.linear.weight, theirs.linear.bias)
        ]
        copied(layer.get_submodule(f"{name}_norm_in.modulation"), weight=weight, bias=bias)
        copied(layer.get_submodule(f"{name}_residual_read.gate"), weight=gate, bias=gate_bias)
    x, y, condition = torch.randn(2, 5, WIDTH), torch.randn(2, 5, WIDTH), torch.randn(2, WIDTH)
    with torch.no_grad():
        normed, gate_attention, shift, scale, gate_ffn = theirs(x, emb=condition)
        equal(layer.attention_norm_in(x, context(condition)), normed)
        expected = nn.functional.layer_norm(x, [WIDTH], eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
        equal(layer.ffn_norm_in(x, context(condition)), expected)
        for name, factor in (("attention", gate_attention), ("ffn", gate_ffn)):
            stream, carried = layer.get_submodule(f"{name}_residual_read")(x, context(condition))
            equal(layer.get_submodule(f"{name}_residual_write")(stream, y, carried), x + factor[:, None] * y)


SMALL_FIELDS: dict[str, dict[str, Any]] = {
    "manifold": {"streams": 3, "iterations": 4},
    "independent": {"streams": 3, "magnitude": 1.5},
    "gated": {"streams": 3, "rank": 4},
    "altup": {"streams": 3, "norm": "rmsnorm"},
    "laurel": {"rank": 4, "norm": "rmsnorm"},
    "sparse_glu": {"d_ff": 24, "sparsity": [0.8]},
}
IN_LAYERS = [(slot, kind) for slot, kinds in KINDS.items() if slot not in ("block", "attention") for kind in kinds]
"""The kinds, without blocks, and without an attention that takes a wire: one component cannot also give it."""
TOGETHER = {"altup", "laurel", "sparse_glu"}
"""Kinds that `test_gemma3n.py` compares in one model."""
IN_STEPS = {"depth", "modulated", "feature_gate"}
"""Kinds that take values of other layers, or inputs of the model, also in steps."""
KINDS_IN_LAYERS = [pytest.param(slot, kind, marks=[pytest.mark.slow] * (kind in TOGETHER)) for slot, kind in IN_LAYERS]


@pytest.mark.parametrize(("slot", "kind"), KINDS_IN_LAYERS)
def test_a_kind_is_its_formula(slot: str, kind: str) -> None:
    options: dict[str, Any] = {"fields": SMALL_FIELDS.get(kind), "plugins": PLUGINS}
    check_component(kind, slot=slot, within=["decoder"], only=["meaning", "cached"], **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("slot", "kind"), IN_LAYERS)
def test_a_kind_has_every_property(slot: str, kind: str) -> None:
    """Exported programs for steps take most of the time, and add no operation of a kind: `IN_STEPS` has both."""
    options: dict[str, Any] = {"slot": slot, "fields": SMALL_FIELDS.get(kind), "plugins": PLUGINS}
    if kind in IN_STEPS:
        check_component(kind, within=["decoder"], level="full", **options)
    else:
        check_component(kind, within=["decoder"], **options)
        check_component(kind, within=["decoder"], only=["cached-step", "capture", "eject"], **options)
        check_component(kind, within=["encoder"], only=["export"], **options)


def test_layers_prefer_different_streams() -> None:
    model = tfkit.build(graph_of(FIELDS["manifold"]))
    bases = [model.get_parameter(f"decoder.layers.{layer}.attention_residual_read.base") for layer in range(3)]
    assert [int(base[:3].argmax()) for base in bases] == [0, 1, 2]


def test_a_conditioned_stack_begins_as_the_identity() -> None:
    model = tfkit.build(graph_of(FIELDS["modulated"] | {"final_norm": False}, 12)).eval()
    tokens, times = torch.randint(23, (2, 5)), torch.randn(2, 12)
    assert torch.equal(model(tokens, times), model.logits(model.embedding(tokens)))
    redrawn(model)
    assert (model(tokens, times)[1] - model(tokens, times.roll(1, 0))[1]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm": "adaptive"}, "norm `adaptive` needs a condition, but `decoder` has none"),
        ({"residual": "modulated"}, "residual `modulated` needs a condition, but `decoder` has none"),
        ({"condition": "time"}, "`condition` has no effect: no component takes it"),
        (FIELDS["modulated"] | {"residual": {"kind": "modulated", "d_condition": 5}}, "width 5; got width 12"),
        (FIELDS["modulated"] | {"condition": "tokens"}, "`condition` must be a vector"),
        ({"placement": "parallel", "residual": "depth"}, "residual `depth` requires that"),
        (
            {"residual": "depth", "layers": {"variants": {"plain": {"residual": "add"}}, "pattern": ["base", "plain"]}},
            "all sublayers of a stack must share its residual `depth`",
        ),
    ],
)
def test_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(tfkit.SpecError, match=re.escape(message)):
        graph_of({"condition": None} | fields, 12)


class Read(nn.Module):
    def forward(self, x: Tensor, context: tfkit.Context) -> tuple[Tensor, list[Tensor]]:
        return x, []


class Alone(nn.Module):
    def forward(self, x: Tensor, context: tfkit.Context) -> Tensor:
        return x


class Narrow(nn.Module):
    def forward(self, x: Tensor, context: tfkit.Context) -> tuple[Tensor, list[Tensor]]:
        return x[..., :1], []


class Write(nn.Module):
    def forward(self, x: Tensor, y: Tensor, carried: list[Tensor]) -> Tensor:
        return x + y


class Wide(nn.Module):
    def forward(self, x: Tensor, y: Tensor, carried: list[Tensor]) -> Tensor:
        return (x + y).double()


@pytest.mark.parametrize(
    ("read", "write", "message"),
    [
        (Alone, Write, "must return a tuple from `read`"),
        (Narrow, Write, "returns [2, 3, 1] instead of [2, 3, 16]"),
        (Read, Wide, "returns float64 from `write` for float32"),
    ],
)
def test_a_residual_returns_what_it_must(read: type[nn.Module], write: type[nn.Module], message: str) -> None:
    class FaultyConfig(tfkit.StreamConfig):
        """Add."""

        kind: Literal["faulty"] = "faulty"

        def build(self, make: tfkit.Make, part: tfkit.StreamPart, width: int) -> nn.Module:
            return read() if part == "read" else write()

    with pytest.raises(AssertionError, match=re.escape(message)):
        check_component(FaultyConfig, plugins=PLUGINS, within=["decoder"], only=["forward"])
