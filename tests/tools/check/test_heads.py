"""The order of heads is seen where one head is treated in another way than the rest."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tfkit.components.attention_core import ScaledDotProduct
from tfkit.tools.check.check import outcomes
from tfkit.tools.check.known import OWN
from tfkit.tools.check.measure import Outcome

from .models import subject

forward = ScaledDotProduct.forward


def first_is_larger(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    found = forward(self, q, k, v, mask).clone()
    found[:, 0] *= 2
    return found


def measured(name: str) -> Outcome:
    (outcome,) = outcomes(subject(name), OWN.chosen(["head-order"]))
    return outcome


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_head_of_its_own_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(name).status == "ok"
    monkeypatch.setattr(ScaledDotProduct, "forward", first_is_larger)
    assert "heads in reverse order change the outputs by" in measured(name).detail


def test_slopes_belong_to_their_heads() -> None:
    assert measured("bloom").status == "does not apply"
