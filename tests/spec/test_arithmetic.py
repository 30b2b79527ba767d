"""Numbers of a spec as arithmetic over its own fields."""

import pytest

import tfkit

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


def decoder(*sets: str):
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
    ],
)
def test_the_value_is_that_of_the_expression(text, value):
    scale = decoder(f"decoder.attention.scale={text}").attention.scale
    assert scale == pytest.approx(value, rel=1e-15)


def test_whole_numbers_stay_whole():
    config = decoder()
    assert (config.n_layers, config.ffn.d_ff) == (3, 128)
    assert type(config.ffn.d_ff) is int


def test_a_width_of_heads_that_is_not_given_is_known_all_the_same():
    sets = ["decoder.attention.position={kind: rope, width: d_head / 2}"]
    assert decoder(*sets).attention.position.width == 8
    assert decoder(*sets, "decoder.attention.d_head=12").attention.position.width == 6


def test_a_name_means_what_it_means_where_the_expression_stands():
    config = decoder("d_model=4 * 16", "decoder.ffn.d_ff=d_model / 2", "decoder.n_layers=d_model // 8")
    assert (config.d_model, config.ffn.d_ff, config.n_layers) == (64, 32, 8)
