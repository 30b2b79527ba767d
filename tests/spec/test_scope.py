"""Values computed from other values: by name, in the scope of the text, each computed once."""

from __future__ import annotations

import pytest

from tfkit.spec.arithmetic import ExpressionError
from tfkit.spec.resolve import Scope, Scoped, compute_value
from tfkit.spec.source import parse
from tfkit.spec.tree import Mapping


def scope_of(text: str, around: Scope | None = None, path: tuple[str, ...] = ()) -> dict[str, Scoped]:
    """What the values of a mapping can see: one another, and what stands around them."""
    root = parse(text, "spec.yaml")
    assert isinstance(root, Mapping)
    scope: dict[str, Scoped] = dict(around or {})
    scope |= {name: Scoped(node, (*path, name), scope) for name, node in root.items.items()}
    return scope


def value(text: str, scope: Scope, path: tuple[str, ...] = ("here",)) -> tuple[object, set[tuple[str, ...]]]:
    used: set[tuple[str, ...]] = set()
    return compute_value(text, scope, path, used), used


def test_names_are_values_of_the_scope_and_what_is_read_is_noted() -> None:
    scope = scope_of("d_model: 64\nn_heads: 4\nn_layers: 2")
    assert value("d_model // n_heads", scope) == (16, {("d_model",), ("n_heads",)})


def test_a_value_may_be_computed_itself() -> None:
    scope = scope_of("a: 2\nb: a * 3\nc: b + a")
    assert value("c ** 2", scope) == (64, {("a",), ("b",), ("c",)})


def test_a_name_means_what_it_means_where_the_expression_stands() -> None:
    outer = scope_of("width: 10\ndouble: 2 * width")
    inner = scope_of("width: 3", outer, ("part",))
    assert value("double + width", inner)[0] == 23
    assert value("double", inner)[1] == {("double",), ("width",)}


@pytest.mark.parametrize(
    ("text", "circle"),
    [("a: b\nb: a", ("a", "b", "a")), ("a: b + 1\nb: c * 2\nc: a - 1", ("a", "b", "c", "a")), ("a: a + 1", ("a", "a"))],
)
def test_circles_are_told_with_all_their_names(text: str, circle: tuple[str, ...]) -> None:
    with pytest.raises(ExpressionError) as caught:
        value("a", scope_of(text))
    assert sorted(set(caught.value.circle)) == sorted(set(circle))


def test_the_place_itself_is_part_of_a_circle() -> None:
    scope = scope_of("a: b + 1\nb: 2 * a")
    with pytest.raises(ExpressionError) as caught:
        compute_value("2 * a", scope, ("b",), set())
    assert set(caught.value.circle) == {"a", "b"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n: true", "must be a number"),
        ("n: words", "`n` must be a number; got `words`"),
        ("n: '3'", "`n` must be a number; got `3`"),
        ("n: [3]", "must be a number"),
        ("n: null", "must be a number"),
    ],
)
def test_what_is_no_number_is_told(text: str, message: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        value("n + 1", scope_of(text))
    assert message in str(caught.value)


def test_an_unknown_name_is_told_with_those_that_are_numbers() -> None:
    with pytest.raises(ExpressionError) as caught:
        value("d_mode", scope_of("d_model: 4\nwords: x"))
    text = " ".join([str(caught.value), *caught.value.notes, caught.value.help or ""])
    assert "d_model" in text
    assert "words" not in text


def test_a_chain_costs_no_more_than_its_length() -> None:
    """Each value is used twice by the next one: computed anew each time, the last would take 2 ** 60 steps."""
    lines = ["a0: 1", *(f"a{i}: a{i - 1} + a{i - 1}" for i in range(1, 61))]
    assert value("a60", scope_of("\n".join(lines)))[0] == 2**60
