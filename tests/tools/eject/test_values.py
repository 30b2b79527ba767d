"""Knowledge about values, and about values that are one of two alternatives."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from tfkit.tools.eject.values import (
    ANY_VALUE,
    NONE,
    SOME_VALUE,
    AbstractValue,
    Items,
    Known,
    Modules,
    Record,
    join,
    may_be_none,
    truth,
)

FIRST, SECOND = nn.ReLU(), nn.Tanh()


class Pair(NamedTuple):
    a: int
    b: int


@pytest.mark.parametrize(
    ("a", "b", "actual"),
    [
        (Known(3), Known(3), Known(3)),
        (Known(3, literal=True), Known(3), Known(3)),
        (Known(3), Known(4), SOME_VALUE),
        (Known(1), Known(True), SOME_VALUE),
        (Known(1), Known(1.0), SOME_VALUE),
        (Known(3), NONE, ANY_VALUE),
        (NONE, NONE, NONE),
        (SOME_VALUE, NONE, ANY_VALUE),
        (SOME_VALUE, Known(3), SOME_VALUE),
        (ANY_VALUE, SOME_VALUE, ANY_VALUE),
        (Modules((FIRST,)), Modules((SECOND, FIRST)), Modules((FIRST, SECOND))),
        (Modules((FIRST,)), NONE, ANY_VALUE),
        (Record(Pair, (Known(1), SOME_VALUE)), Record(Pair, (Known(1), NONE)), Record(Pair, (Known(1), ANY_VALUE))),
        (Record(Pair, (SOME_VALUE, SOME_VALUE)), Record(None, (SOME_VALUE, SOME_VALUE)), SOME_VALUE),
        (Record(None, (SOME_VALUE, NONE)), SOME_VALUE, Items(ANY_VALUE)),
        (Items(Known(1)), Items(Known(2)), Items(SOME_VALUE)),
        (Items(None), Items(Known(2)), Items(Known(2))),
        (Items(SOME_VALUE), SOME_VALUE, SOME_VALUE),
    ],
)
def test_of_two_values_what_both_have_is_known(a: AbstractValue, b: AbstractValue, actual: AbstractValue) -> None:
    assert join(a, b) == actual
    if not isinstance(actual, Modules):  # which keep the order in which they are met
        assert join(b, a) == actual


def test_data_is_equal_by_value_and_all_else_by_identity() -> None:
    assert Known([1, (2, "a")]) == Known([1, (2, "a")])
    assert Known([1]) != Known((1,))
    assert Known(range(3)) == Known(range(3))
    assert Known(torch.ones(2)) != Known(torch.ones(2))
    assert Known(FIRST) == Known(FIRST)
    assert Known(3) != Known(3, literal=True)


@pytest.mark.parametrize(
    ("value", "actual"),
    [
        (Known(0), False),
        (Known(2), True),
        (NONE, False),
        (Known([]), False),
        (Known(torch.ones(2)), None),
        (SOME_VALUE, None),
        (ANY_VALUE, None),
        (Modules((FIRST,)), None),
    ],
)
def test_truth(value: AbstractValue, actual: bool | None) -> None:
    assert truth(value) is actual


def test_what_may_be_none() -> None:
    assert [
        may_be_none(value) for value in (ANY_VALUE, NONE, SOME_VALUE, Known(0), Modules((FIRST,)), Items(None))
    ] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
