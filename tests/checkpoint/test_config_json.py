"""The fields of a config.json and the paths of a spec that they change; its layers as the pattern of a spec."""

from __future__ import annotations

from typing import Any

import pytest

from tfkit.checkpoint.config_json import FieldReading, pattern_of
from tfkit.errors import Source, Span
from tfkit.spec.arithmetic import ExpressionError
from tfkit.spec.families import FamilyConfig
from tfkit.spec.tree import Mapping, node_of


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        ("b", ["b"]),
        ("bbb", ["b"]),
        ("ab", {"0": "a", "rest": "b"}),
        ("aabbb", {"0-1": "a", "rest": "b"}),
        ("abab", ["a", "b"]),
        ("aabaab", ["a*2", "b"]),
        ("abc", ["a", "b", "c"]),
        ("aba", ["a", "b"]),
        ("abbca", ["a", "b*2", "c"]),
    ],
)
def test_layers_have_the_shortest_pattern(names: str, pattern: Any) -> None:
    assert pattern_of([*names]) == pattern


@pytest.fixture
def reading() -> FieldReading:
    """A config.json without numbers, of a family with a variant `local` and without a head."""
    family = FamilyConfig(
        model_type="m", architecture="M", tensors={}, variants={"local": {}}, spec={"graph": {"logits": None}}
    )
    decoder = {"d_ff": 8, "attention": {"n_heads": 2}, "cross_attention": None, "layers": {"variants": {}}}
    config, spec = (
        node_of(data, Span(Source("m", ""), 1, 1))
        for data in ({"flag": True, "word": "12"}, {"graph": {"decoder": decoder}})
    )
    assert isinstance(config, Mapping)
    assert isinstance(spec, Mapping)
    return FieldReading(config, spec, family)


@pytest.mark.parametrize(
    ("path", "reached"),
    [
        ("decoder.attention.n_heads", True),
        ("decoder.layers.variants.local.d_ff", True),
        ("decoder.layers.variants.global.d_ff", False),
        ("decoder.cross_attention.n_heads", False),
        ("logits.bias", False),
    ],
)
def test_a_field_reaches_what_the_spec_may_have(reading: FieldReading, path: str, reached: bool) -> None:
    assert reading.reaches(path) == reached
    before = reading.tree
    reading.solve(path, 4)
    assert (reading.at(path) == 4) == reached
    assert (reading.tree == before) != reached


@pytest.mark.parametrize(("name", "value"), [("flag", True), ("word", "12")])
def test_a_value_that_is_computed_is_a_number(reading: FieldReading, name: str, value: object) -> None:
    with pytest.raises(ExpressionError, match=f"`{name}` must be a number; got"):
        reading.compute(f"{name} * 2")
    with pytest.raises(ExpressionError, match="the value must be a number; got"):
        reading.solve("decoder.d_ff * 2", value)
    reading.solve("decoder.d_ff * 2", 12)
    assert reading.at("decoder.d_ff") == 6
