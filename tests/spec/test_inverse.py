"""Arithmetic over one value that is solved for it, and names in brackets."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfkit.errors import Invalid
from tfkit.spec.arithmetic import Expression
from tfkit.spec.families import expanded

FIELDS = {"width": 8, "heads": 4}
TEXTS = [
    "a.left + 1",
    "3 - a.left",
    "a.scale ** -2",
    "1 / a.scale",
    "a.scale / width ** -0.5",
    "(a.left + 1) * (width + heads)",
    "-a.left / heads",
    "width * a.left - 2",
]


@given(text=st.sampled_from(TEXTS), value=st.floats(0.01, 1e4))
def test_the_inverse_undoes_it(text: str, value: float) -> None:
    solved = Expression.parse(text, FIELDS)
    assert solved.path in ("a.left", "a.scale")
    forward = solved.forward(value, FIELDS.__getitem__)
    assert math.isclose(solved.inverse(forward, FIELDS.__getitem__), value, rel_tol=1e-6)


@pytest.mark.parametrize(("field", "value"), [(128, 64), (129, 64), (2, 1)])
def test_half_is_rounded_down(field: int, value: int) -> None:
    solved = Expression.parse("a.left // 0.5", FIELDS)
    assert solved.inverse(field, FIELDS.__getitem__) == value
    assert solved.forward(value, FIELDS.__getitem__) == 2 * value


def test_a_bare_path_and_a_field_that_begins_like_it() -> None:
    assert Expression.parse("decoder.layers.variants.local.attention.mask.left", FIELDS).is_path
    solved = Expression.parse("width_of * width", FIELDS)
    assert (solved.path, solved.forward(3, FIELDS.__getitem__)) == ("width_of", 24)


@pytest.mark.parametrize("text", ["a % 2", "2 ** a", "a * b", "a + a", "width + 1", "2 // a", "f(a)", "a[0]", "?", ""])
def test_without_an_inverse(text: str) -> None:
    with pytest.raises(Invalid):
        Expression.parse(text, FIELDS)


def test_brackets() -> None:
    assert expanded("[a b].[x y]") == ["a.x", "a.y", "b.x", "b.y"]
    assert expanded("plain") == ["plain"]
    for wrong in ("[a", "a]", "[]"):
        with pytest.raises(Invalid):
            expanded(wrong)
