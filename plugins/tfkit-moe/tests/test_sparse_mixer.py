"""SparseMixer against transformers: choices, weights and gradients in training, with equal random numbers."""

from __future__ import annotations

import pytest
import torch
from tfkit_moe import SparseMixer
from tfkit_moe.checks import idle_routers
from torch import Tensor
from transformers.models.phimoe.modeling_phimoe import sparsemixer

import tfkit
from tfkit.testing import check_model

from .layer import PLUGINS, spec

JITTER = 0.3
LOGITS = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))


def with_gradient(weights: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The weights, and the gradient of a sum of them."""
    direction = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1))
    return weights, torch.autograd.grad((weights * direction).sum(), logits)[0]


@pytest.mark.parametrize("training", [False, True])
def test_it_chooses_weighs_and_learns_as_in_transformers(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (LOGITS.clone().requires_grad_() for _ in range(2))
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda x: x)  # theirs draws the numbers of the second expert twice
    torch.manual_seed(2)
    weights, experts = SparseMixer(2, jitter=JITTER, sampled=True).train(training)(ours)
    torch.manual_seed(2)
    expected, chosen = sparsemixer(theirs, JITTER, training)
    assert torch.equal(experts, chosen)
    best = LOGITS.argmax(dim=1)
    assert ((experts[:, 0] != best).float().mean() > 0.1) == training
    for actual, want in zip(with_gradient(weights, ours), with_gradient(expected, theirs), strict=True):
        torch.testing.assert_close(actual, want, rtol=3e-4, atol=1e-6)  # theirs writes a third as 0.3333


def test_training_without_draws_is_evaluation() -> None:
    mixer = SparseMixer(3, jitter=JITTER, sampled=False)
    for trained, evaluated in zip(mixer.train()(LOGITS), mixer.eval()(LOGITS), strict=True):
        assert torch.equal(trained, evaluated)


def test_all_experts_are_near_if_the_jitter_is_1() -> None:
    weights, experts = SparseMixer(1, jitter=1.0, sampled=False)(LOGITS)
    torch.testing.assert_close(weights, torch.softmax(LOGITS, dim=1).gather(1, experts))


@pytest.mark.parametrize("n", [1, 200])
def test_the_first_of_equal_logits_is_chosen(n: int) -> None:
    weights, experts = SparseMixer(2, jitter=0.0, sampled=False)(torch.zeros(n, 4))
    assert experts.tolist() == [[0, 1]] * n
    torch.testing.assert_close(weights, torch.tensor([[1 / 4, 1 / 3]]).expand(n, 2))


@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_it_warns_of_weights_that_are_always_1(jitter: float) -> None:
    router = {"sparse_mixer": {"jitter": jitter}}
    graph = tfkit.loads(spec(n_experts=4, n_experts_per_token=2, d_ff=8, router=router), plugins=PLUGINS)
    model = tfkit.build(graph)
    torch.manual_seed(0)
    model(torch.randn(2, 30, 16)).square().sum().backward()
    gradient = model.get_parameter("encoder.layers.0.ffn.router.weight").grad
    assert gradient is not None
    assert bool(gradient.any()) == bool(jitter)
    assert len(list(idle_routers(graph))) == (not jitter)


def test_without_draws_training_computes_what_evaluation_does() -> None:
    router = {"sparse_mixer": {"jitter": 0.9}}
    graph = tfkit.loads(spec(n_experts=4, n_experts_per_token=2, d_ff=8, router=router), plugins=PLUGINS)
    check_model(graph, plugins=PLUGINS, only=["train-mode"])
