"""Arithmetic over fields of a spec, its inverse, and names in brackets."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfkit
from tfkit.errors import Invalid
from tfkit.spec.arithmetic import Expression
from tfkit.spec.families import expanded_names

SPEC = """
tfkit: 1
name: t
d_model: 32
vocab_size: 10
graph:
  embedding: {block: embedding}
  decoder: {block: decoder, n_layers: 1 + 2, attention: {n_heads: 2}, ffn: {kind: relu, d_ff: 4 * d_model}}
  logits: {block: lm_head}
"""


def decoder(*sets: str) -> Any:
    return tfkit.loads(SPEC, sets=sets).node("decoder").config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("d_model ** -0.5", 32**-0.5),
        ("(n_layers / 36) ** -0.5", (3 / 36) ** -0.5),
        ("1 / d_head", 1 / 16),
        ("7 // 2 - -1 + 9 % 5", 8),
        ("2 ** 3 ** 2 / 512", 1),
        ("1e-3 * d_model", 0.032),
        ("2 ** 64 * 2 ** -64", 1),
    ],
)
def test_the_value_is_that_of_the_expression(text: str, value: float) -> None:
    scale = decoder(f"decoder.attention.scale={text}").attention.scale
    assert scale == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("power", ["65", "-65", "-1e9"])
def test_powers_of_more_than_64_are_rejected(power: str) -> None:
    with pytest.raises(tfkit.SpecError, match="`scale`: a power of more than 64"):
        decoder(f"decoder.attention.scale=2 ** {power}")


def test_whole_numbers_stay_whole() -> None:
    config = decoder()
    assert (config.n_layers, config.ffn.d_ff) == (3, 128)
    assert type(config.ffn.d_ff) is int


def test_a_width_of_heads_that_is_not_given_is_known_all_the_same() -> None:
    sets = ["decoder.attention.position={kind: rope, width: d_head / 2}"]
    assert decoder(*sets).attention.position.width == 8
    assert decoder(*sets, "decoder.attention.d_head=12").attention.position.width == 6


def test_a_name_means_what_it_means_where_the_expression_stands() -> None:
    config = decoder("d_model=4 * 16", "decoder.ffn.d_ff=d_model / 2", "decoder.n_layers=d_model // 8")
    assert (config.d_model, config.ffn.d_ff, config.n_layers) == (64, 32, 8)


# ---- expressions with an inverse ----

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


@settings(deadline=None)
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
    assert expanded_names("[a b].[x y]") == ["a.x", "a.y", "b.x", "b.y"]
    assert expanded_names("plain") == ["plain"]
    for name in ("[a", "a]", "[]"):
        with pytest.raises(Invalid):
            expanded_names(name)
