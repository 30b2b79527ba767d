"""Additive attention has every property that tfkit guarantees, and is the formula of the paper."""

import itertools

import torch
from tfkit_additive import Additive, AdditiveConfig

from tfkit.testing import check_component


def filled(core: Additive) -> Additive:
    torch.manual_seed(0)
    core.reset_parameters()
    return core


def test_it_has_every_property() -> None:
    check_component(AdditiveConfig)


def test_it_is_the_formula_of_the_paper() -> None:
    core = filled(Additive(n_heads=2, d_head=3, dropout=0.0))
    q, k, v = torch.randn(2, 2, 4, 3), torch.randn(2, 2, 5, 3), torch.randn(2, 2, 5, 3)
    actual = core(q, k, v, None)
    for b, h, i in itertools.product(range(2), range(2), range(4)):
        scores = [sum(core.weight[h] * torch.tanh(q[b, h, i] + k[b, h, j])) for j in range(5)]
        weights = torch.softmax(torch.stack(scores), dim=0)
        torch.testing.assert_close(actual[b, h, i], sum(weights[j] * v[b, h, j] for j in range(5)))
