"""Experts with a capacity: the tokens that they admit, against a loop, and every property of `tfkit check`."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tfkit_moe import Capacity, MoEConfig
from torch import Tensor

import tfkit
from tfkit.nn import Cache, Context
from tfkit.testing import check_component

from .layer import PLUGINS, spec

CHOSEN = torch.rand(2, 11, 3, generator=torch.Generator().manual_seed(0)).argsort(dim=-1)[..., :2]
"""Two of three experts for 11 tokens of two rows."""
DOCUMENTS = torch.tensor([[0] * 3 + [1] * 7 + [2], [4] * 5 + [0] * 6])


def admitted(chosen: Tensor, capacity: int, documents: Tensor | None = None) -> Tensor:
    """Count the choices in a loop."""
    admission = torch.zeros(chosen.shape)
    for row, tokens in enumerate(chosen):
        counts = Counter[tuple[int, int]]()
        for t, experts in enumerate(tokens):
            document = 0 if documents is None else int(documents[row, t])
            counts.update((document, int(expert)) for expert in experts)
            admission[row, t] = torch.tensor([float(counts[document, int(expert)] <= capacity) for expert in experts])
    return admission


@pytest.mark.parametrize("capacity", [1, 4, 22])
def test_the_first_tokens_that_choose_an_expert_are_admitted(capacity: int) -> None:
    actual = Capacity(capacity, 3)(CHOSEN, Context(None, None, None))
    assert torch.equal(actual, admitted(CHOSEN, capacity))
    assert bool(actual.all()) == (capacity == 22)


def test_each_document_counts_from_0() -> None:
    actual = Capacity(3, 3)(CHOSEN, Context(None, None, None, documents=DOCUMENTS))
    assert torch.equal(actual, admitted(CHOSEN, 3, DOCUMENTS))
    assert not torch.equal(actual, admitted(CHOSEN, 3))


def test_steps_continue_the_counts_of_tokens_without_padding() -> None:
    padding = torch.tensor([[True] * 4, [True, True, False, False]])
    cache = Cache([torch.zeros(2, 1, 1, 3)], torch.arange(4), 0, 0)
    first = Capacity(3, 3)(CHOSEN[:, :4], Context(None, None, None, cache, padding=padding))
    second = Capacity(3, 3)(CHOSEN[:, 4:], Context(None, None, None, cache))
    expected = admitted(CHOSEN[:1], 3)
    assert torch.equal(torch.cat((first, second), dim=1)[:1], expected)
    tokens = torch.cat((CHOSEN[1:, :2], CHOSEN[1:, 4:]), dim=1)
    assert torch.equal(torch.cat((first[1:, :2], second[1:]), dim=1), admitted(tokens, 3))


def test_a_token_that_no_expert_admits_leaves_the_stream_unchanged() -> None:
    fields = {"n_experts": 3, "n_experts_per_token": 1, "d_ff": 8, "activation": "relu", "router": {"capacity": 2}}
    model = tfkit.build(tfkit.loads(spec(**fields), plugins=PLUGINS)).eval()
    outputs: list[Tensor] = []
    model.get_submodule("encoder.layers.0.ffn").register_forward_hook(lambda module, x, y: outputs.append(y))
    model(torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(1)))
    assert 12 - 3 * 2 <= int((outputs[0] == 0).all(dim=-1).sum()) < 12


def test_inputs_of_experts_cannot_be_weighed() -> None:
    fields = {"n_experts": 2, "n_experts_per_token": 1, "d_ff": 8, "activation": "relu"}
    with pytest.raises(tfkit.SpecError, match="`capacity` cannot be combined with `weighs: input`"):
        tfkit.loads(spec(**fields, router={"capacity": 2, "weighs": "input"}), plugins=PLUGINS)


@pytest.mark.slow
@pytest.mark.parametrize("within", ["encoder", "decoder", "memory"])
def test_it_has_every_property(within: str) -> None:
    fields = {"n_experts": 3, "n_experts_per_token": 2, "d_ff": 8, "activation": "silu", "router": {"capacity": 3}}
    check_component(MoEConfig, fields=fields, within=[within])
