"""The JSON Schema accepts what the loader accepts, and rejects typical mistakes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema.exceptions import best_match
from pydantic import ConfigDict

from tfkit.cli import main
from tfkit.component import FFNConfig, Make, PositiveFloat
from tfkit.errors import SpecError
from tfkit.plugin.manager import Plugins, load_plugins
from tfkit.plugin.registry import Registry
from tfkit.spec.load import parse_spec, read_spec, read_tree
from tfkit.spec.render import SCHEMA as SCHEMA_FILE
from tfkit.spec.render import render_spec
from tfkit.spec.schema import json_schema
from tfkit.spec.source import parse, plain_data, read

from ..known import KNOWN
from ..sampling import some
from ..small_specs import covering_first

PLUGINS = load_plugins(entry_points=False)
SCHEMA = json_schema(PLUGINS)
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
ROOT = Path(__file__).parents[2]
TEXTS = [spec.path.read_text(encoding="utf-8") for spec in KNOWN.files.values()]
INSTALLED = load_plugins()
REQUIRES = re.compile(r"^requires: \[(.+)\]$", re.MULTILINE)
NEEDED = sorted({name for text in TEXTS for names in REQUIRES.findall(text) for name in names.split(", ")})
OF_THE_SPECS = json_schema(load_plugins(plugin_dirs=[ROOT / "plugins" / name for name in NEEDED], entry_points=False))
WITH_PLUGINS = jsonschema.Draft202012Validator(OF_THE_SPECS)
BROKEN = ROOT / "tests" / "broken"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def is_valid(text: str) -> bool:
    return VALIDATOR.is_valid(plain_data(parse(text, "test")))


@pytest.mark.slow
def test_it_is_a_schema() -> None:
    VALIDATOR.check_schema(SCHEMA)


def test_every_reference_is_there() -> None:
    expected = set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(SCHEMA)))
    assert sorted(expected - SCHEMA["$defs"].keys()) == []


def test_make_writes_the_schema_that_the_specs_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe in the Makefile serves every spec; the specs name its file in their first line."""
    target = re.search(r"^SCHEMA +:= specs/(.*)$", MAKEFILE, re.MULTILINE)
    recipe = re.search(r"^\$\(SCHEMA\):.*\n\t\$\(BIN\)/tfkit ((?:.|\n)*?) -o \$@$", MAKEFILE, re.MULTILINE)
    assert target
    assert recipe
    assert target[1] == SCHEMA_FILE
    monkeypatch.chdir(ROOT)
    assert main([*shlex.split(recipe[1].replace("\\\n", "")), "-o", str(tmp_path / "schema.json")]) == 0
    assert json.loads((tmp_path / "schema.json").read_text(encoding="utf-8")) == OF_THE_SPECS
    assert all(re.search(rf"^{goal}:.* \$\(SCHEMA\)", MAKEFILE, re.MULTILINE) for goal in ("demo", "test"))


def test_specs_name_the_schema() -> None:
    for spec in (file.path for file in KNOWN.files.values()):
        named = re.findall(r"^# yaml-language-server: \$schema=(.*)$", spec.read_text(encoding="utf-8"), re.MULTILINE)
        assert [(spec.parent / file).resolve() for file in named] == [ROOT / "specs" / SCHEMA_FILE], spec


def test_it_is_the_same_each_time() -> None:
    assert json.dumps(json_schema(load_plugins(entry_points=False))) == json.dumps(SCHEMA)


@pytest.mark.parametrize("name", covering_first(8))
def test_shipped_specs_are_valid(name: str) -> None:
    spec = plain_data(read(KNOWN.files[name].path))
    WITH_PLUGINS.validate(spec)
    if "requires" not in plain_data(read_tree(name, KNOWN)):
        VALIDATOR.validate(spec)


@pytest.mark.parametrize("name", covering_first(8))
def test_rendered_specs_are_valid(name: str) -> None:
    model = read_spec(name, INSTALLED).model
    (WITH_PLUGINS if model.requires else VALIDATOR).validate(plain_data(parse(render_spec(model), name)))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_the_loader_takes_is_valid(specs: st.SearchStrategy[dict[str, Any]], data: st.DataObject) -> None:
    spec = data.draw(specs)
    try:
        parse_spec(json.dumps(spec), PLUGINS)
    except SpecError:
        assume(False)
    VALIDATOR.validate(spec)


BEYOND = {
    "type_whole_float_for_int",  # JSON has one kind of number
    "range_infinite",  # no YAML that is read at all
}
MISTYPED = ("key", "kind", "name", "place", "range", "type", "version")


@pytest.mark.parametrize(
    "path",
    some([p for p in sorted(BROKEN.glob("*.yaml")) if p.stem.startswith(MISTYPED) and p.stem not in BEYOND], 30),
    ids=lambda path: path.stem,
)
def test_what_is_mistyped_is_found_where_it_is(path: Path) -> None:
    """An editor marks the key that the loader names; a bare word that stands for a kind as a whole."""
    with pytest.raises(SpecError) as caught:
        read_spec(path, PLUGINS)
    best = best_match(VALIDATOR.iter_errors(plain_data(read(path))))
    where = [str(part) for part in best.absolute_path]
    assert any(marks(where, best.message, diagnostic.path.split(".")) for diagnostic in caught.value.diagnostics), (
        best.message
    )
    assert "any of the given schemas" not in best.message


def marks(where: list[str], message: str, expected: list[str]) -> bool:
    """Whether an editor marks what is meant: that place, or a mapping and its key, or a word for a whole mapping."""
    *around, key = expected
    return where[: len(expected)] == expected or (
        where == around and (f"'{key}'" in message or key in ("kind", "type", "sublayer"))
    )


DEEP = {
    "decoder: {ffn: {d_fff: 3}}": "decoder.ffn d_fff",
    "decoder: {ffn: {kind: relu, approximate: tanh}}": "decoder.ffn approximate",
    "decoder: {attention: {kind: gqa, n_kv_headss: 2}}": "decoder.attention n_kv_headss",
    "decoder: {attention: {position: {kind: rope, scaling: {kind: yarn, factr: 2}}}}": (
        "decoder.attention.position.scaling factr"
    ),
    "decoder: {attention: {n_heads: many}}": "decoder.attention.n_heads many",
    "decoder: {attention: {qk_norm: {epsilon: 1}}}": "decoder.attention.qk_norm epsilon",
    "decoder: {n_layers: -1}": "decoder.n_layers -1",
    "decoder: {layers: {variants: {v: {ffn: {d_fff: 3}}}, pattern: [v]}}": "decoder.layers.variants.v.ffn d_fff",
    "decoder: {sublayers: [ffn, {sublayer: ffn, norm_inn: true}]}": "decoder.sublayers.1 norm_inn",
    "more: {block: decoder, n_layer: 3}": "more n_layer",
    "more: {block: decoderr}": "more.block decoderr",
}


@pytest.mark.parametrize("node", DEEP)
def test_a_deep_mistake_in_a_change_is_found_where_it_is(node: str) -> None:
    best = best_match(VALIDATOR.iter_errors(plain_data(parse(f"extends: gpt2\nname: m\ngraph: {{{node}}}", "test"))))
    path, culprit = DEEP[node].split(" ")
    assert ".".join(str(part) for part in best.absolute_path) == f"graph.{path}"
    assert culprit in best.message


def tiny(decoder: str, *top: str) -> str:
    lines = ["tfkit: 1", "name: m", "d_model: 16", "vocab_size: 11", *top]
    return "\n".join([*lines, "graph:", "  embedding: {block: embedding}", f"  d: {{block: decoder, {decoder}}}"])


RIGHT = [
    "n_layers: 2, attention: {n_heads: 2}",
    "n_layers: 2, ffn: {kind: relu, d_ff: 3}, attention: null",
    "n_layers: 2, ffn: {kind: relu, d_ff: 3}, attention: none",
    "n_layers: 2 * 3, attention: {kind: mha, n_heads: d_model // 8, scale: (n_layers / 36) ** -0.5}",
    "n_layers: 2, attention: {n_heads: 2, scale: 1e-1 * 2, position: rope}",
    "n_layers: 2, ffn: {kind: relu, d_ff: 3}, norm: {eps: 1e-3}, final_norm: false",
    "n_layers: 2, final_norm: rmsnorm, sublayers: [ffn, {sublayer: ffn, norm_in: true}], ffn: {kind: relu, d_ff: 3}",
    "n_layers: 2, ffn: {kind: relu, d_ff: 3}, layers: {variants: {v: {ffn: {d_ff: 4}}}, pattern: [v, base]}",
    "n_layers: 2, attention: {n_heads: 2}, "
    "layers: {variants: {v: {norm: {scale: false, bias: false}}}, pattern: {'0': v, rest: base}}",
]
WRONG = [
    "n_layers: twelve",
    "n_layers: '12'",
    "n_layers: len(d_model)",
    "n_layers: 2, attention: {kind: gqqa, n_heads: 2}",
    "n_layers: 2, attention: mha",
    "n_layers: 2, attention: {kind: mha}",
    "n_layers: 2, attention: {kind: mha, n_heads: 2, n_kv_heads: 1}",
    "n_layers: 2, attention: {kind: mha, n_heads: 2, position: sinusoidal}",
    "n_layers: 2, ffn: {d_ff: 3}",
    "n_layers: 2, norm: none",
    "n_layers: 2, placement: before",
    "n_layers: 2, sublayers: [{norm_in: true}]",
    "n_layers: 2, layers: {variants: {v: {ffn: {d_ff: true}}}, pattern: [v]}",
    "n_layers: 2, layers: {variants: {v: {n_layers: 3}}, pattern: [v]}",
    "attention: {n_heads: 2}",
]


@pytest.mark.parametrize("decoder", RIGHT)
def test_right(decoder: str) -> None:
    parse_spec(tiny(decoder), PLUGINS)
    assert is_valid(tiny(decoder))


@pytest.mark.parametrize("decoder", WRONG)
def test_wrong(decoder: str) -> None:
    with pytest.raises(SpecError):
        parse_spec(tiny(decoder), PLUGINS)
    assert not is_valid(tiny(decoder))


def test_the_top() -> None:
    assert is_valid(tiny("n_layers: 1", "bias: {q: true}", "norm: {kind: rmsnorm, eps: 1e-5}", "inputs: [a]"))
    assert is_valid("extends: gpt2\nname: mine\ngraph: {decoder: {n_layers: 2, attention: {position: rope}}}")
    assert is_valid("extends: gpt2\nnorm: {eps: 1e-3}")
    assert is_valid("extends: gpt2\nbias: null\ninit: null\nmax_len: null")
    assert not is_valid(tiny("n_layers: 1", "bias: null"))
    assert not is_valid("name: mine\ngraph: {}")
    assert not is_valid("extends: gpt2\nname: mine\ngraph: {decoder: {n_layer: 2}}")
    assert not is_valid(tiny("n_layers: 1", "n_heads: 3"))
    assert not is_valid(tiny("n_layers: 1", "inputs: [ids_mask]"))
    assert not is_valid(tiny("n_layers: 1", "inputs: {ids: words}"))


def test_what_an_editor_shows() -> None:
    defs = SCHEMA["$defs"]

    def field(config: str, name: str) -> Any:
        actual = defs[config]["properties"][name]
        return defs[actual["$ref"].removeprefix("#/$defs/")] if "$ref" in actual else actual

    assert defs["attention.gqa"]["description"] == "Groups of query heads share one head of keys and values."
    assert field("attention.gqa", "n_kv_heads")["description"] == "Number of key-value heads."
    assert field("norm.rmsnorm", "eps")["default"] == 1e-6
    assert field("block.decoder", "norm")["default"] == "layernorm"
    words = field("block.decoder", "norm")["else"]
    assert words["enum"] == ["layernorm", "rmsnorm"]
    assert words["enumDescriptions"][1] == "Divide by the root mean square, then scale."


class Opaque:
    """A type of a plugin's own, of which JSON Schema knows nothing."""


class OddConfig(FFNConfig):
    """Odd."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    kind: Literal["odd"] = "odd"
    strength: PositiveFloat = 1.0
    """How odd."""
    opaque: Opaque | None = None

    def build(self, make: Make) -> Any:
        raise NotImplementedError


def test_plugins_are_part_of_it() -> None:
    registry = Registry()
    for slot in PLUGINS.registry.slots():
        for value in PLUGINS.registry.kinds(slot).values():
            registry.add(value.config, value.plugin)
    registry.add(OddConfig, "tfkit-odd 1.0")
    validator = jsonschema.Draft202012Validator(json_schema(Plugins(registry, ())))
    assert validator.schema["$defs"]["ffn.odd"]["description"] == "Odd. (from tfkit-odd 1.0)"
    for ffn, valid in {
        "odd": True,
        "{kind: odd, strength: d_model / 3}": True,
        "{kind: odd, strong: 1}": False,
    }.items():
        assert validator.is_valid(plain_data(parse(tiny(f"n_layers: 1, ffn: {ffn}"), "test"))) == valid
