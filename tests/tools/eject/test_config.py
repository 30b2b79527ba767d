"""Numbers that carry their expression over the spec: the expression evaluates to the value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import tfkit
from tfkit.nn import Rearrange
from tfkit.tools.eject.config import NamedFloat, NamedInt, named_number, text_of, with_names
from tfkit.tools.eject.patterns import prepare_patterns
from tfkit.tools.eject.torch_modules import merge_equal

D, H, F = named_number(12, "d_model"), named_number(3, "n_heads"), named_number(0.5, "theta")


@pytest.mark.parametrize(
    ("actual", "text", "value"),
    [
        (D, "d_model", 12),
        (D // H, "d_model // n_heads", 4),
        (H * (D // H), "n_heads * (d_model // n_heads)", 12),
        (D // H + D // H, "2 * (d_model // n_heads)", 8),
        (D * H + D * H + 1, "2 * d_model * n_heads + 1", 73),
        (8 * named_number(1, "ratio"), "8", 8),
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
        ((D // H) ** -0.5, "(d_model // n_heads) ** -0.5", 0.5),
        (F * D, "theta * d_model", 6.0),
        (-H, "-n_heads", -3),
    ],
)
def test_arithmetic_keeps_the_expression_and_the_value(actual: Any, text: str, value: float) -> None:
    assert text_of(actual) == text
    assert actual == value
    assert eval(text, {"d_model": 12, "n_heads": 3, "theta": 0.5}) == value


def test_nothing_is_left_of_a_name_that_does_not_count() -> None:
    assert text_of(D * 0) == "0"
    assert type(D * 0) is int


@pytest.mark.parametrize("function", [math.sqrt, float, abs, str, hash, lambda x: [0] * x])
def test_they_are_numbers_for_everybody_else(function: Callable[[Any], Any]) -> None:
    assert function(D) == function(12)


def test_only_numbers_get_names() -> None:
    assert named_number(True, "a") is True
    assert named_number(None, "a") is None
    assert named_number("b", "a") == "b"
    assert isinstance(named_number(2, "a"), NamedInt)
    assert isinstance(named_number(2.0, "a"), NamedFloat)
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
    graph, config = with_names(tfkit.loads(SPEC))
    values = config.numbers
    assert values["d_model"] == 16
    assert values["d_ff"] == 24
    assert values["n_heads"] == 2
    assert [value for name, value in values.items() if name.endswith("d_ff")] == [24, 32]
    decoder: Any = graph.node("decoder").config
    assert text_of(decoder.ffn.d_ff) == "d_ff"
    assert text_of(decoder.layers.variants["wide"].ffn.d_ff) not in ("d_ff", "32")
    assert text_of(graph.node("logits").signals["input"].width) == "d_model"


def test_every_width_of_a_stream_has_a_name() -> None:
    text = SPEC.replace(
        "graph:\n", "inputs: [source, target]\ngraph:\n  memory: {block: embedding, input: source, d_model: 24}\n"
    )
    text = text.replace("embedding: {block: embedding}", "embedding: {block: embedding, input: target}")
    graph, config = with_names(tfkit.loads(text, sets=["decoder.memory=memory", "decoder.ffn.d_ff=40"]))
    signals: Any = graph.node("decoder").signals
    names = [text_of(signals[wire].width) for wire in ("input", "memory")]
    assert [config.numbers[name] for name in names] == [16, 24]


def test_the_graph_itself_is_as_it_was() -> None:
    graph = tfkit.loads(SPEC)
    with_names(graph)
    decoder: Any = graph.node("decoder").config
    assert type(decoder.ffn.d_ff) is int


def test_numbers_that_follow_from_others_are_properties() -> None:
    sets = ["decoder.layers.variants.wide.attention={n_heads: 4}"]
    graph, config = with_names(tfkit.loads(SPEC, sets=sets))
    layers: Any = graph.node("decoder").config
    heads = [attention.head_width for attention in (layers.attention, layers.layers.variants["wide"].attention)]
    assert [*map(text_of, heads)] == ["d_model // n_heads", "d_model // decoder_n_heads"]
    texts = [config.text(number) for number in (*heads, [heads[0], 3], 2 * heads[0] + 1)]
    assert texts == ["config.d_head", "config.decoder_d_head", "[config.d_head, 3]", "2 * config.d_head + 1"]
    assert [config.value(text) for text in texts] == [8, 4, [8, 3], 17]
    source = config.source("\n".join(texts))
    assert "def decoder_d_head(self) -> int:\n        return self.d_model // self.decoder_n_heads" in source
    assert "d_ff" not in source


def test_a_width_that_the_spec_has_is_no_property() -> None:
    graph, config = with_names(tfkit.loads(SPEC, sets=["decoder.layers.variants.wide.attention={d_head: 4}"]))
    layers: Any = graph.node("decoder").config
    assert config.text(layers.attention.head_width) == "config.d_model // config.n_heads"
    assert config.text(layers.layers.variants["wide"].attention.head_width) == "config.d_head"


@pytest.mark.parametrize(("name", "merged"), [("d_head", True), ("d_value", False)])
def test_rearrangements_are_merged_if_their_widths_have_one_name(name: str, merged: bool) -> None:
    """The width of a head and of a mixer's values may be one number."""
    pattern = "b t (h d) -> b h t d"
    modules = [nn.Sequential(Rearrange(pattern, d=named_number(8, f"config.{width}"))) for width in ("d_head", name)]
    model = nn.Sequential(*modules)
    prepare_patterns(model)
    merge_equal(model)
    first, second = (module[0] for module in modules)
    assert (first is second) == merged
