"""Every published block against transformers, with random weights: outputs and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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
