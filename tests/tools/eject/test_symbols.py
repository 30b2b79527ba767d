"""Numbers that remember how they follow from the spec: the expression and the value say the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

import tfkit
from tfkit.tools.eject.symbols import NamedFloat, NamedInt, named, text_of, with_names

D, H, F = named(12, "d_model"), named(3, "n_heads"), named(0.5, "theta")


@pytest.mark.parametrize(
    ("found", "text", "value"),
    [
        (D, "d_model", 12),
        (D // H, "d_head", 4),
        (H * (D // H), "n_heads * d_head", 12),
        (D + D, "2 * d_model", 24),
        (D + H + D, "2 * d_model + n_heads", 27),
        (D + 1, "d_model + 1", 13),
        (1 + D, "1 + d_model", 13),
        (D + 0, "d_model", 12),
        (D * 1, "d_model", 12),
        (1 * D, "d_model", 12),
        (D - H, "d_model - n_heads", 9),
        (D // 2, "d_model // 2", 6),
        (D / H, "d_model / n_heads", 4.0),
        (D % 5, "d_model % 5", 2),
        (2 * (D - 1), "2 * (d_model - 1)", 22),
        (D**-0.5, "d_model ** -0.5", 12**-0.5),
        ((D // H) ** -0.5, "d_head ** -0.5", 0.5),
        (F * D, "theta * d_model", 6.0),
        (-H, "-n_heads", -3),
    ],
)
def test_arithmetic_keeps_the_expression_and_the_value(found: Any, text: str, value: float) -> None:
    assert text_of(found) == text
    assert found == value
    names = {"d_model": 12, "n_heads": 3, "theta": 0.5, "d_head": 4}
    assert eval(text, {}, names) == value


def test_nothing_is_left_of_a_name_that_does_not_count() -> None:
    assert text_of(D * 0) == "0"
    assert type(D * 0) is int


def test_what_follows_from_others_says_how() -> None:
    assert dict((D // H).derived) == {"d_head": "d_model // n_heads"}
    assert dict((H * (D // H) + 1).derived) == {"d_head": "d_model // n_heads"}
    width = named(4, "width", {"width": "a * b"})
    assert (width, text_of(width), dict(width.derived)) == (4, "width", {"width": "a * b"})
    cross = named(12, "cross_d_model") // named(3, "cross_n_heads")
    assert text_of(cross) == "cross_d_head"


@pytest.mark.parametrize("function", [math.sqrt, float, abs, str, hash, lambda x: [0] * x])
def test_they_are_numbers_for_everybody_else(function: Callable[[Any], Any]) -> None:
    assert function(D) == function(12)


def test_only_numbers_get_names() -> None:
    assert named(True, "a") is True
    assert named(None, "a") is None
    assert named("b", "a") == "b"
    assert isinstance(named(2, "a"), NamedInt)
    assert isinstance(named(2.0, "a"), NamedFloat)
    with pytest.raises(TypeError):
        D + "a"


def test_lists_and_tuples_are_written_out() -> None:
    assert text_of([D, 3, (H,)]) == "[d_model, 3, (n_heads,)]"
    assert text_of((D, "a", None)) == "(d_model, 'a', None)"


SPEC = """
tfkit: 1
name: t
d_model: 16
vocab_size: 11
graph:
  embedding: {block: embedding}
  decoder:
    block: decoder
    n_layers: 3
    attention: {n_heads: 2, mask: {left: 5, right: 0}}
    ffn: {kind: gelu, d_ff: 24}
    layers: {variants: {wide: {ffn: {d_ff: 32}}}, pattern: [base, wide]}
  logits: {block: lm_head}
"""


def test_the_numbers_of_a_graph_get_the_names_of_their_keys() -> None:
    graph, values = with_names(tfkit.loads(SPEC))
    assert values["d_model"] == 16
    assert values["d_ff"] == 24
    assert values["n_heads"] == 2
    assert [value for name, value in values.items() if name.endswith("d_ff")] == [24, 32]
    decoder: Any = graph.node("decoder").config
    assert text_of(decoder.ffn.d_ff) == "d_ff"
    assert text_of(decoder.layers.variants["wide"].ffn.d_ff) not in ("d_ff", "32")
    assert text_of(graph.node("logits").signals["input"].width) == "d_model"


def test_the_graph_itself_is_as_it_was() -> None:
    graph = tfkit.loads(SPEC)
    with_names(graph)
    decoder: Any = graph.node("decoder").config
    assert type(decoder.ffn.d_ff) is int
