"""The fields of a config.json and the paths of a spec that they change; its layers as the pattern of a spec."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

import tfkit
from tfkit.checkpoint.config_json import FieldReading, FieldWriting, further_fields, pattern_of
from tfkit.components.fields.layer_variants import FirstLayersConfig, LayerNumbersConfig
from tfkit.components.fields.rotary import ORIGINAL, _partial, _scaling
from tfkit.components.fields.value import ValueConfig
from tfkit.components.fields.words import ActivationNameConfig, _numbered
from tfkit.errors import Invalid, Source, Span
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


def test_further_fields_inside_a_field_are_those_of_its_path() -> None:
    inside = {"attn_impl": "flash", "clip_qkv": 6.0, "use_cache": False, "d_model": 3}
    config = {"model_type": "mpt", "d_model": 64, "bos_token_id": 3, "verbose": 1, "attn_config": inside}
    assert further_fields(config, tfkit.load("mpt_7b").spec.family) == {
        "bos_token_id": 3,
        "verbose": 1,
        "attn_config": {"attn_impl": "flash", "use_cache": False},
    }


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


def test_unused_variants_are_removed(reading: FieldReading) -> None:
    reading.put("decoder.n_layers", 2)
    reading.arrange("decoder", ["local", "base"])
    reading.put("decoder.layers.variants.other.d_ff", 3)
    reading.drop_unused_variants()
    assert reading.at("decoder.layers") == {"variants": {"local": {}}, "pattern": {"0": "local", "rest": "base"}}


@pytest.mark.parametrize(
    ("name", "usual", "unusual"),
    [
        ("position_embedding_type", "absolute", "relative"),
        ("is_decoder", False, True),
        ("tie_encoder_decoder", False, 1),
    ],
)
def test_a_field_that_the_family_lacks_has_its_usual_value(name: str, usual: object, unusual: object) -> None:
    for value, count in ((usual, 0), (unusual, 1)):
        family = FamilyConfig(model_type="m", architecture="M", tensors={})
        trees = [node_of(data, Span(Source("m", ""), 1, 1)) for data in ({name: value}, {"graph": {}})]
        config, spec = cast(list[Mapping], trees)
        reading = FieldReading(config, spec, family)
        reading.check_all_known()
        assert len(reading.errors) == count
        assert not reading.ignored


@pytest.mark.parametrize("number", [0, None])
def test_no_layer_is_of_the_first_variant(reading: FieldReading, number: int | None) -> None:
    reading.put("decoder.n_layers", 2)
    file = cast(
        Any, SimpleNamespace(value=lambda name: number, listed=reading.listed, layers=lambda path: ["base"] * 2)
    )
    arranged = list[Any]()
    file.arrange = lambda path, names: arranged.append(names)
    FirstLayersConfig(first_layers="local", at="decoder").read("n_local", file)
    assert arranged == [["base", "base"]]


@pytest.mark.parametrize(("numbers", "second"), [(None, "base"), ([], "base"), ([1], "local")])
def test_the_layers_in_a_list_have_another_variant(numbers: list[int] | None, second: str) -> None:
    arranged = list[Any]()
    file = SimpleNamespace(
        value=lambda name: numbers,
        layers=lambda path: ["base", "base"],
        arrange=lambda path, names: arranged.append(names),
    )
    LayerNumbersConfig(layer_numbers={"base": "local"}, at="decoder").read("dense_layers", cast(Any, file))
    assert arranged == [["base", second]]


WRITTEN = """
tfkit: 1
name: m
d_model: 16
vocab_size: 11
graph:
  embedding: embedding
  decoder: {block: decoder, n_layers: 1, attention: {n_heads: 2, mask: {right: 0}}, ffn: {kind: relu, d_ff: 24}}
"""


@pytest.mark.parametrize(
    ("cases", "defaults", "left", "fields"),
    [
        ({"0": None}, {"window": 0}, "null", {"window": 0}),
        ({"0": None}, {"window": None}, "null", {}),
        ({"null": "width"}, {"window": 0}, "null", {}),
        (None, {"window": 0}, "3", {"window": 3}),
    ],
)
def test_a_value_that_the_spec_lacks(
    cases: dict[Any, Any] | None, defaults: dict[str, Any], left: str, fields: dict[str, Any]
) -> None:
    rules = {"window": ValueConfig(at="decoder.attention.mask.left", cases=cases), "width": ValueConfig(at="d_model")}
    family = FamilyConfig(model_type="m", architecture="M", tensors={}, fields=rules, defaults=defaults)
    spec = tfkit.loads(WRITTEN.replace("right: 0", f"left: {left}, right: 0")).spec
    writing = FieldWriting(spec, family)
    writing.write("window")
    assert writing.fields == fields


@pytest.mark.parametrize(("kind", "refused"), [("relu", False), ("gelu", True)])
def test_an_activation_name_is_that_of_all_variants(kind: str, refused: bool) -> None:
    family = FamilyConfig(
        model_type="m", architecture="M", tensors={}, fields={"act": ActivationNameConfig(activation="decoder.ffn")}
    )
    layers = f"n_layers: 2, layers: {{variants: {{wide: {{ffn: {{kind: {kind}, d_ff: 32}}}}}}, pattern: [base, wide]}}"
    writing = FieldWriting(tfkit.loads(WRITTEN.replace("n_layers: 1", layers)).spec, family)
    with pytest.raises(Invalid) if refused else nullcontext():
        writing.write("act")
    assert writing.fields == ({} if refused else {"act": "relu"})


def test_arithmetic_writes_the_fields_that_it_needs() -> None:
    rules = {"width": ValueConfig(at="d_model"), "half": ValueConfig(at="decoder.ffn.d_ff * width")}
    family = FamilyConfig(model_type="m", architecture="M", tensors={}, fields=rules)
    writing = FieldWriting(tfkit.loads(WRITTEN).spec, family)
    assert writing.compute("width * 2") == 32
    assert writing.fields == {"width": 16}
    for value in (True, "16"):
        writing.put("word", value)
        with pytest.raises(Invalid, match="`word` must be a number"):
            writing.compute("word * 2")


def test_default_names_of_at_most_a_million_classes() -> None:
    assert _numbered(2) == ["LABEL_0", "LABEL_1"]
    for count in (0, 10**6, True):
        with pytest.raises(Invalid, match="must be a number of classes"):
            _numbered(count)


def test_a_rotated_fraction_is_rounded_down() -> None:
    position = {"theta": 1e4, "scaling": None}
    assert _partial(0.3, position, 8) == {"width": 2}
    assert _partial(0.3, position, 10) == {"width": 4, "theta": 1e4 ** (4 / 3)}


@pytest.mark.parametrize("positions", [True, "64", 0])
def test_the_positions_before_a_scaling_are_a_number(positions: object) -> None:
    file = cast(Any, SimpleNamespace(knows=lambda name: False))
    with pytest.raises(Invalid, match="must be a number of positions; got"):
        _scaling(file, {"rope_type": "yarn", ORIGINAL: positions}, outside=False)
