"""Masked diffusion: its expectation is the mean over all orders of the tokens of -log p, one token after the other."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit.run.kinds.masked_diffusion import MaskedDiffusionConfig, MaskedDiffusionLoss

PLUGINS = tfkit.load_plugins(entry_points=False)
MASK, ROWS = 5, 60_000


class Table(nn.Module):
    """Logits [b, 4, 6] that depend on all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6**4, 4, 6, generator=torch.Generator().manual_seed(1)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens @ torch.tensor([216, 36, 6, 1])]


class Drawn:
    """Numbers of a generator for `ROWS` rows."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(2)

    def rand(self, *size: int) -> Tensor:
        return torch.rand(ROWS, *size, generator=self.generator)


def any_order(model: nn.Module, ids: list[int], asked: list[int]) -> Tensor:
    """The mean over all orders of -log p of the asked tokens, each given those before it in the order."""
    totals = []
    for order in permutations(asked):
        tokens, total = torch.tensor([MASK if i in asked else token for i, token in enumerate(ids)]), 0.0
        for index in order:
            total = total - F.log_softmax(model(tokens[None])[0, index], -1)[ids[index]]
            tokens[index] = ids[index]
        totals.append(total)
    return torch.stack(totals).mean()


@pytest.mark.parametrize("asked", [[1, 2, 3], [2, 3]])
def test_its_expectation_is_the_mean_over_all_orders(asked: list[int]) -> None:
    ids, model = [3, 1, 4, 2], Table()
    targets = torch.tensor([ids[i] if i in asked else -100 for i in range(1, 4)] + [2])
    loss = MaskedDiffusionLoss(model, "tokens", MASK)
    noise: Any = Drawn()
    result = loss({"tokens": torch.tensor(ids).expand(ROWS, -1)}, targets.expand(ROWS, -1), noise)
    assert result.count == ROWS * len(asked)
    expected = any_order(model, ids, asked)
    assert result.total.item() / ROWS == pytest.approx(expected.item(), rel=0.03)
    (actual,) = torch.autograd.grad(result.total / ROWS, model.table)
    (gradient,) = torch.autograd.grad(expected, model.table)
    assert (actual - gradient).norm() < 0.05 * gradient.norm()
    hidden = result.numbers["hidden"]
    assert float(hidden.total / hidden.count) == pytest.approx(0.5, abs=0.01)


def test_a_causal_model_is_an_error() -> None:
    decoder = {"block": "decoder", "n_layers": 1, "attention": {"n_heads": 2}, "ffn": {"kind": "relu", "d_ff": 8}}
    graph = {"embedding": {"block": "embedding"}, "decoder": decoder, "head": "lm_head"}
    model = tfkit.build({"tfkit": 1, "name": "causal", "d_model": 8, "vocab_size": 7, "graph": graph})
    with pytest.raises(ValueError, match="a model that attends to later tokens"):
        MaskedDiffusionConfig().build(model)


def test_the_mask_token_in_the_data_is_an_error() -> None:
    noise: Any = Drawn()
    with pytest.raises(tfkit.SpecError, match="must not contain the mask token"):
        MaskedDiffusionLoss(Table(), "tokens", MASK)({"tokens": torch.tensor([[1, 5, 2, 3]])}, torch.ones(1, 4), noise)
