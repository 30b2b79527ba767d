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
    ConcreteValue,
    Items,
    Modules,
    RecordValue,
    join,
    may_be_none,
    truth_value,
)

FIRST, SECOND = nn.ReLU(), nn.Tanh()


class Pair(NamedTuple):
    a: int
    b: int


@pytest.mark.parametrize(
    ("a", "b", "actual"),
    [
        (ConcreteValue(3), ConcreteValue(3), ConcreteValue(3)),
        (ConcreteValue(3, literal=True), ConcreteValue(3), ConcreteValue(3)),
        (ConcreteValue(3), ConcreteValue(4), SOME_VALUE),
        (ConcreteValue(1), ConcreteValue(True), SOME_VALUE),
        (ConcreteValue(1), ConcreteValue(1.0), SOME_VALUE),
        (ConcreteValue(3), NONE, ANY_VALUE),
        (NONE, NONE, NONE),
        (SOME_VALUE, NONE, ANY_VALUE),
        (SOME_VALUE, ConcreteValue(3), SOME_VALUE),
        (ANY_VALUE, SOME_VALUE, ANY_VALUE),
        (Modules((FIRST,)), Modules((SECOND, FIRST)), Modules((FIRST, SECOND))),
        (Modules((FIRST,)), NONE, ANY_VALUE),
        (
            RecordValue(Pair, (ConcreteValue(1), SOME_VALUE)),
            RecordValue(Pair, (ConcreteValue(1), NONE)),
            RecordValue(Pair, (ConcreteValue(1), ANY_VALUE)),
        ),
        (RecordValue(Pair, (SOME_VALUE, SOME_VALUE)), RecordValue(None, (SOME_VALUE, SOME_VALUE)), SOME_VALUE),
        (RecordValue(None, (SOME_VALUE, NONE)), SOME_VALUE, Items(ANY_VALUE)),
        (Items(ConcreteValue(1)), Items(ConcreteValue(2)), Items(SOME_VALUE)),
        (Items(None), Items(ConcreteValue(2)), Items(ConcreteValue(2))),
        (Items(SOME_VALUE), SOME_VALUE, SOME_VALUE),
    ],
)
def test_of_two_values_what_both_have_is_known(a: AbstractValue, b: AbstractValue, actual: AbstractValue) -> None:
    assert join(a, b) == actual
    if not isinstance(actual, Modules):  # which keep the order in which they are met
        assert join(b, a) == actual


def test_data_is_equal_by_value_and_all_else_by_identity() -> None:
    assert ConcreteValue([1, (2, "a")]) == ConcreteValue([1, (2, "a")])
    assert ConcreteValue([1]) != ConcreteValue((1,))
    assert ConcreteValue(range(3)) == ConcreteValue(range(3))
    assert ConcreteValue(torch.ones(2)) != ConcreteValue(torch.ones(2))
    assert ConcreteValue(FIRST) == ConcreteValue(FIRST)
    assert ConcreteValue(3) != ConcreteValue(3, literal=True)


@pytest.mark.parametrize(
    ("value", "actual"),
    [
        (ConcreteValue(0), False),
        (ConcreteValue(2), True),
        (NONE, False),
        (ConcreteValue([]), False),
        (ConcreteValue(torch.ones(2)), None),
        (SOME_VALUE, None),
        (ANY_VALUE, None),
        (Modules((FIRST,)), None),
    ],
)
def test_truth(value: AbstractValue, actual: bool | None) -> None:
    assert truth_value(value) is actual


def test_what_may_be_none() -> None:
    assert [
        may_be_none(value) for value in (ANY_VALUE, NONE, SOME_VALUE, ConcreteValue(0), Modules((FIRST,)), Items(None))
    ] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
