"""Growths of an axis, and their patterns, compared with indices that a loop computes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch
from torch import Tensor

from tfkit.checkpoint.links import pattern_of
from tfkit.tools.grow.axes import Axis, AxisFactor, NestedGrowth, axis_of, composed, new_size, pattern_text, plain_axis
from tfkit.tools.grow.rules import TensorMap

HEADS = axis_of(AxisFactor(3, 3), AxisFactor(1, 2), AxisFactor(4, 4))
UNITS = axis_of(AxisFactor(12, 17, "?"))
INSIDE = axis_of(AxisFactor(3, 3), AxisFactor(4, 6, "0"))
STRIDE = axis_of(AxisFactor(12, 12), AxisFactor(1, 3, "0"))
MEAN = axis_of(AxisFactor(2, 2), AxisFactor(3, 1), AxisFactor(2, 2))
JOINED = (*axis_of(AxisFactor(2, 2), AxisFactor(1, 3), AxisFactor(4, 4)), *plain_axis(4))


def values_by_hand(axis: Axis, old: list[float], initial: list[float]) -> list[float]:
    """Return the values of a grown axis, one index after the other."""
    values, start = [], 0
    for segment in axis:
        sizes = [factor.old for factor in segment]
        for index in product(*(range(factor.new) for factor in segment)):
            fills = [factor.fill for factor, i in zip(segment, index, strict=True) if factor.fill and i >= factor.old]
            if "0" in fills:
                values.append(0.0)
            elif fills:
                values.append(initial[len(values)])
            else:
                choices = [
                    range(factor.old) if factor.new == 1 < factor.old else [0 if factor.old == 1 else i]
                    for factor, i in zip(segment, index, strict=True)
                ]
                offsets = [_flat_index(choice, sizes) for choice in product(*choices)]
                values.append(sum(old[start + offset] for offset in offsets) / len(offsets))
        start += prod(sizes)
    return values


def _flat_index(index: tuple[int, ...], sizes: list[int]) -> int:
    flat = 0
    for i, size in zip(index, sizes, strict=True):
        flat = flat * size + i
    return flat


def arranged(axis: Axis, old: Tensor, initial: Tensor, divisor: float = 1.0) -> Tensor:
    """Apply the pattern of a growth to the first axis of a matrix."""
    text = pattern_text((axis, plain_axis(old.size(1))), divisor=divisor)
    assert text is not None
    pattern, sizes = pattern_of(text, 2, "x", {}, resizing=True)
    return pattern.apply([old], sizes, [tuple(initial.shape)], [initial])[0]


@pytest.mark.parametrize("axis", [HEADS, UNITS, INSIDE, STRIDE, MEAN, JOINED])
def test_a_pattern_arranges_as_a_loop(axis: Axis) -> None:
    old, initial = (torch.randn(size, 5, dtype=torch.float64) for size in (12, new_size(axis)))
    actual = arranged(axis, old, initial, divisor=2.5)
    for column in range(5):
        scaled = [float(value) / 2.5 for value in old[:, column]]
        expected = values_by_hand(axis, scaled, initial[:, column].tolist())
        torch.testing.assert_close(actual[:, column].tolist(), expected, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize(
    "second",
    [
        axis_of(AxisFactor(6, 6), AxisFactor(1, 3), AxisFactor(4, 4)),
        axis_of(AxisFactor(3, 3), AxisFactor(1, 2), AxisFactor(8, 8)),
        axis_of(AxisFactor(6, 6), AxisFactor(4, 7, "0")),
        axis_of(AxisFactor(24, 24), AxisFactor(1, 2, "0")),
    ],
)
def test_two_growths_are_a_single_growth(second: Axis) -> None:
    old = torch.randn(12, 2, dtype=torch.float64)
    between = arranged(HEADS, old, torch.zeros(24, 2, dtype=torch.float64))
    initial = torch.zeros(new_size(second), 2, dtype=torch.float64)
    assert torch.equal(arranged(composed(HEADS, second), old, initial), arranged(second, between, initial))


@pytest.mark.parametrize("name", ["new_gradient", "is_zero"])
@pytest.mark.parametrize("steps", [*product([True, False], repeat=2)])
def test_what_a_step_has_lost_stays_lost(name: str, steps: tuple[bool, bool]) -> None:
    first, second = (replace(TensorMap("w", (HEADS,)), **{name: value}) for value in steps)
    both = replace(first, divisor=4.0).then(replace(second, axes=(plain_axis(24),), divisor=2.5))
    assert getattr(both, name) is any(steps)
    assert both.keeps_gradient is not any(steps)
    assert both.is_zero or both.divisor == 10.0


def test_growths_that_no_pattern_expresses() -> None:
    """New units cannot be appended to heads and their copies, and a pattern has one range of new values on an axis."""
    with pytest.raises(NestedGrowth):
        composed(HEADS, axis_of(AxisFactor(24, 30, "?")))
    with pytest.raises(NestedGrowth):
        pattern_text([composed(INSIDE, axis_of(AxisFactor(3, 5, "?"), AxisFactor(6, 6)))])
