"""Every norm, compared with its formula, with an epsilon and an offset of visible size."""

from __future__ import annotations

from typing import Any, Literal, cast

import pytest
import torch
from torch import Tensor, nn

import tfkit
from tfkit.components.norm import LayerNormConfig, RMSNormConfig

SPEC = """
tfkit: 1
name: t
inputs: {x: {type: features, width: 8}}
graph: {n: {block: norm, input: x, norm: %s}}
"""


def build(norm: str) -> nn.Module:
    """A norm with every parameter drawn at random."""
    module = tfkit.build(tfkit.loads(SPEC % norm)).get_submodule("n")
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return module


def formula(x: Tensor, *, eps: float, centred: bool) -> Tensor:
    x = x - x.mean(dim=-1, keepdim=True) if centred else x
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_new_layernorm_with_an_offset_has_zeros(bias: bool) -> None:
    module = LayerNormConfig(offset=1, bias=bias).build(cast(tfkit.Make, None), 8)
    for parameter in module.parameters():
        parameter.fill_(3.0)
    cast(Any, module).reset_parameters()
    assert [float(parameter.abs().max()) for parameter in module.parameters()] == [0.0] * (1 + bias)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@torch.no_grad()
def test_a_norm_is_its_formula(kind: str, offset: int, eps: float) -> None:
    module = build(f"{{kind: {kind}, eps: {eps}, offset: {offset}}}")
    actual = dict(module.named_parameters())
    weight, bias = actual["weight"] + offset, actual.get("bias", torch.zeros(8))
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    want = formula(x, eps=eps, centred=kind == "layernorm") * weight + bias
    torch.testing.assert_close(module(x), want)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("config", [RMSNormConfig, LayerNormConfig])
@torch.no_grad()
def test_a_norm_with_weights_per_head_is_its_formula(
    config: type[RMSNormConfig] | type[LayerNormConfig], offset: Literal[0, 1]
) -> None:
    module = config(eps=0.5, offset=offset).build(cast(tfkit.Make, None), 8, heads=3)
    module.reset_parameters()
    x = torch.randn(2, 3, 5, 8)
    bare = formula(x, eps=0.5, centred=config is LayerNormConfig)
    torch.testing.assert_close(module(x), bare)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    weights = dict(module.named_parameters())
    bias = weights.get("bias", torch.zeros(3, 8))
    torch.testing.assert_close(module(x), bare * (weights["weight"] + offset)[:, None] + bias[:, None])


@pytest.mark.parametrize(("kind", "bias"), [("rmsnorm", ""), ("layernorm", ", bias: false")])
@torch.no_grad()
def test_without_scale_there_is_nothing_to_learn(kind: str, bias: str) -> None:
    module = build(f"{{kind: {kind}, eps: 0.5, scale: false{bias}}}")
    assert list(module.parameters()) == []
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(module(x), formula(x, eps=0.5, centred=kind == "layernorm"))
