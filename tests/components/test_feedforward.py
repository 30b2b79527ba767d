"""The feed-forward network, compared with published models: inner norms, separate biases, learned activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.apertus.modeling_apertus import ApertusMLP
from transformers.models.bitnet.modeling_bitnet import BitNetMLP
from transformers.models.gte.modeling_gte import GteMLP

import tfkit

SPEC = """
    tfkit: 1
    name: test
    d_model: 16
    inputs: {x: {type: features, width: 16}}
    graph:
      encoder: {block: encoder, n_layers: 1, final_norm: false}
"""


def build(ffn: str) -> Any:
    """The FFN of a small model, every parameter drawn at random."""
    module = tfkit.build(tfkit.loads(SPEC, sets=[f"graph.encoder.ffn={ffn}"])).encoder.layers[0].ffn
    return drawn(module)


def drawn(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.5)
    return module


def equal(theirs: nn.Module, ours: nn.Module, names: Mapping[str, tuple[str, ...]]) -> None:
    """Outputs and all gradients agree, and no parameter is left over."""
    options = dict(drawn(theirs).named_parameters())
    assert set(options) == {name for actual in names.values() for name in actual}
    ours.load_state_dict({name: torch.cat([options[value].data for value in actual]) for name, actual in names.items()})
    x = torch.randn(3, 7, 16) * 2
    results = []
    for module in (theirs, ours):
        value = x.clone().requires_grad_()
        y = module(value)
        y.square().sum().backward()
        results.append((y, value.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    for name, actual in names.items():
        expected = torch.cat([grad(options[value]) for value in actual])
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(grad(ours.get_parameter(name)), expected, rtol=1e-4, atol=1e-3)


def grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


GATED = {"gate_up.weight": ("gate_proj.weight", "up_proj.weight"), "down.weight": ("down_proj.weight",)}


def test_a_norm_inside_is_that_of_bitnet() -> None:
    config = transformers.BitNetConfig(hidden_size=16, intermediate_size=24, hidden_act="relu2", rms_norm_eps=1e-5)
    ours = build("{kind: glu, activation: relu2, d_ff: 24, bias: false, inner_norm: {kind: rmsnorm, eps: 1e-5}}")
    equal(BitNetMLP(config), ours, {**GATED, "inner_norm.weight": ("ffn_sub_norm.weight",)})


@pytest.mark.parametrize("kind", ["glu", "mlp"])
def test_units_are_dropped_after_the_norm(kind: str) -> None:
    ours = build(f"{{kind: {kind}, activation: silu, d_ff: 24, dropout: 0.5, inner_norm: rmsnorm}}")
    hidden: list[Tensor] = []
    ours.down.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    x = torch.randn(3, 7, 16)
    ours.eval()(x)
    ours.train()(x)
    normed, dropped = hidden
    real = dropped != 0
    assert 0.3 < real.float().mean() < 0.7
    torch.testing.assert_close(dropped[real], 2 * normed[real])


def test_a_bias_of_the_way_out_alone_is_that_of_gte() -> None:
    config = transformers.GteConfig(hidden_size=16, intermediate_size=24, hidden_act="gelu", hidden_dropout_prob=0.0)
    ours = build("{kind: geglu, d_ff: 24, bias: {down: true}}")
    equal(GteMLP(config), ours, {**GATED, "down.bias": ("down_proj.bias",)})


def test_xielu_is_that_of_apertus() -> None:
    config = transformers.ApertusConfig(hidden_size=16, intermediate_size=24, mlp_bias=False, dtype=torch.float32)
    ours = build("{kind: mlp, activation: xielu, d_ff: 24, bias: false}")
    names = {"up.weight": ("up_proj.weight",), "down.weight": ("down_proj.weight",)}
    alphas = {f"activation.alpha_{sign}": (f"act_fn.alpha_{sign}",) for sign in "pn"}
    equal(ApertusMLP(config), ours, {**names, **alphas})


def test_xielu_starts_as_that_of_apertus() -> None:
    theirs = ApertusMLP(transformers.ApertusConfig(hidden_size=16, intermediate_size=24, dtype=torch.float32)).act_fn
    spec = tfkit.loads(SPEC, sets=["graph.encoder.ffn={kind: mlp, activation: xielu, d_ff: 24}"])
    ours = tfkit.build(spec).encoder.layers[0].ffn.activation
    x = torch.linspace(-200, 200, 4001, requires_grad=True)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    actual, expected = (torch.autograd.grad(module(x).sum(), x)[0] for module in (ours, theirs))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert ours(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("up", [False, True])
def test_a_plain_and_a_gated_network_are_their_formulas(gated: bool, up: bool) -> None:
    kind = "reglu" if gated else "relu"
    ours = build(f"{{kind: {kind}, d_ff: 24, bias: {{up: {str(up).lower()}, down: true}}, inner_norm: layernorm}}")
    way_in = ours.gate_up if gated else ours.up
    assert (way_in.bias is not None) == up
    x = torch.randn(2, 5, 16)
    hidden = F.linear(x, way_in.weight, way_in.bias)
    hidden = hidden[..., :24].relu() * hidden[..., 24:] if gated else hidden.relu()
    normed = F.layer_norm(hidden, [24], ours.inner_norm.weight, ours.inner_norm.bias)
    torch.testing.assert_close(ours(x), F.linear(normed, ours.down.weight, ours.down.bias))


@pytest.mark.parametrize(
    ("kind", "function"),
    [("sigmoid", lambda x: 1 / (1 + (-x).exp())), ("softplus", lambda x: (1 + x.exp()).log())],
)
def test_activations(kind: str, function: Any) -> None:
    ours = build(f"{{kind: mlp, activation: {kind}, d_ff: 24}}")
    x = torch.linspace(-8, 8, 101, dtype=torch.float64)
    torch.testing.assert_close(ours.activation(x), function(x))


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@torch.no_grad()
def test_the_hidden_layer_drops_out_in_training_and_nowhere_else(kind: str) -> None:
    plain, dropping = build(f"{{kind: {kind}, d_ff: 24}}"), build(f"{{kind: {kind}, d_ff: 24, dropout: 0.5}}")
    x = torch.randn(2, 3, 16)
    assert torch.equal(dropping.eval()(x), plain(x))
    assert not torch.allclose(dropping.train()(x), plain(x), atol=1e-3)
