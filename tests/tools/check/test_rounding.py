"""Limits of deviations in models that amplify rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tfkit.tools.check.measure import Deviation, relative_distance
from tfkit.tools.check.model_under_test import allow_rounding

from .models import subject


class Conditioned:
    """A model whose outputs change by a fixed error if its weights are rounded."""

    def __init__(self, effect: float) -> None:
        self.effect = effect

    def effect_of_rounding(self, dtype: torch.dtype, error: Callable[[Tensor, Tensor], float]) -> float:
        return self.effect


@pytest.mark.parametrize(
    ("error", "effect", "limit"),
    [
        (2e-5, 7e-6, 2.8e-5),  # twice the effect, for each of two runs
        (2e-5, 1e-6, 1e-5),  # rounding explains less than the usual limit
        (2e-5, 1.0, 4e-5),  # at most four times the usual limit
        (5e-5, 1.0, 1e-5),  # more than this is a failure of any model
        (9e-6, 1.0, 1e-5),  # nothing to explain
    ],
)
def test_the_limit_is_what_the_conditioning_explains(error: float, effect: float, limit: float) -> None:
    model: Any = Conditioned(effect)
    (deviation,) = allow_rounding(model, [Deviation(error, "", 1e-5)], torch.float32, relative_distance)
    assert deviation.limit == pytest.approx(limit)


def test_the_effect_of_rounding_is_proportional_to_the_unit_of_a_type() -> None:
    model = subject("mixers")
    fine, coarse = (model.effect_of_rounding(dtype, relative_distance) for dtype in (torch.float32, torch.bfloat16))
    assert 0.5 < coarse / fine / 2**16 < 2
    assert 1e-8 < fine < 1e-6


def test_the_effect_of_rounding_is_the_largest_of_several_draws() -> None:
    outputs: list[Tensor] = []
    errors = iter([3.0, 7.0, 1.0, 5.0, 2.0])

    def error(actual: Tensor, _expected: Tensor) -> float:
        outputs.append(actual)
        return next(errors)

    assert subject("mixers").effect_of_rounding(torch.bfloat16, error) == 7.0
    assert len({tuple(output.flatten().tolist()) for output in outputs}) == 5
