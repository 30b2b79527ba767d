"""Every published block against transformers, with random weights: outputs and gradients."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer

from .families import FAMILIES, D, F, K, N, block_of, translated
from .layer import layer


def error(actual: Tensor, want: Tensor) -> float:
    actual, want = actual.detach(), want.detach()
    return float((actual - want).abs().max() / want.abs().max().clamp(min=1))


@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_the_published_block(name: str) -> None:
    family = FAMILIES[name]
    theirs = block_of(family)
    ours = layer(d_model=D, d_ff=F, n_experts=N, n_experts_per_token=K, **{"bias": False, **family.fields}).eval()
    ours.load_state_dict(translated(family, theirs.state_dict()), strict=True)
    x = torch.randn(3, 7, D, generator=torch.Generator().manual_seed(1))
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    actual, want = ours(mine), theirs(other)
    want = (want[0] if isinstance(want, tuple) else want).reshape(x.shape)
    assert want.std() > 0.1, "the comparison says something"
    assert error(actual, want) <= 1e-6
    direction = torch.randn(want.shape, generator=torch.Generator().manual_seed(2))
    (actual * direction).sum().backward()
    (want * direction).sum().backward()
    assert mine.grad is not None
    assert other.grad is not None
    assert error(mine.grad, other.grad) <= 1e-6
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in theirs.named_parameters()}
    expected = translated(family, gradients)
    for weight, parameter in ours.named_parameters():
        assert (parameter.grad is None) == (weight == "router.correction")
        if parameter.grad is not None:
            assert error(parameter.grad, expected[weight]) <= 1e-6, weight


GEMMA4 = {
    "mlp.down_proj.weight": "shared.down.weight",
    "pre_feedforward_layernorm.weight": "shared.norm_in.weight",
    "post_feedforward_layernorm_1.weight": "shared.norm_out.weight",
    "pre_feedforward_layernorm_2.weight": "norm_in.weight",
    "post_feedforward_layernorm_2.weight": "norm_out.weight",
    "experts.gate_up_proj": "experts.gate_up.weight",
    "experts.down_proj": "experts.down.weight",
    "router.proj.weight": "router.weight",
    "router.scale": "router.norm.weight",
    "router.per_expert_scale": "router.expert_scale",
}


def test_branches_with_norms_are_those_of_gemma4() -> None:
    """The layer of Gemma 4 adds both branches in its forward: no module has them alone."""
    sizes = {
        "hidden_size": D,
        "intermediate_size": 20,
        "moe_intermediate_size": F,
        "num_experts": N,
        "top_k_experts": K,
    }
    options = {"enable_moe_block": True, "hidden_size_per_layer_input": 0, "num_hidden_layers": 1, "rms_norm_eps": 1e-3}
    config = transformers.Gemma4TextConfig(**sizes, **options)
    config._experts_implementation = "eager"
    theirs = Gemma4TextDecoderLayer(config, 0).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.4, generator=generator)
    norm = {"kind": "rmsnorm", "eps": 1e-3}
    ours = layer(
        d_model=D,
        d_ff=F,
        n_experts=N,
        n_experts_per_token=K,
        bias=False,
        activation={"kind": "gelu", "approximate": "tanh"},
        norm_in=norm,
        norm_out=norm,
        router={"norm": norm, "logit_scale": D**-0.5, "renormalize": True, "expert_scale": True},
        shared={"d_ff": 20, "norm_in": norm, "norm_out": norm},
    ).eval()
    tensors = {new: theirs.get_parameter(old) for old, new in GEMMA4.items()}
    gate_up = [theirs.get_parameter(f"mlp.{name}_proj.weight") for name in ("gate", "up")]
    ours.load_state_dict({**tensors, "shared.gate_up.weight": torch.cat(gate_up)}, strict=True)

    x = torch.randn(3, 7, D, generator=generator)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    tokens = other.flatten(0, 1)
    _, weights, chosen = theirs.router(tokens)
    routed = theirs.experts(theirs.pre_feedforward_layernorm_2(tokens), chosen, weights)
    dense = theirs.post_feedforward_layernorm_1(theirs.mlp(theirs.pre_feedforward_layernorm(other)))
    want = dense + theirs.post_feedforward_layernorm_2(routed).view_as(x)
    actual = ours(mine)
    assert error(actual, want) <= 1e-6
    direction = torch.randn(want.shape, generator=generator)
    (actual * direction).sum().backward()
    (want * direction).sum().backward()
    assert error(mine.grad, other.grad) <= 1e-5
    for old, new in GEMMA4.items():
        assert error(ours.get_parameter(new).grad, theirs.get_parameter(old).grad) <= 1e-5, new
