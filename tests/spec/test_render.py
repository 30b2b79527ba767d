"""A rendered spec describes the same model, and is readable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import Field

from tfkit.component import FFNConfig, Make, NormConfig, Shared
from tfkit.errors import SpecError
from tfkit.plugin.manager import Plugins, load_plugins
from tfkit.plugin.registry import Registry
from tfkit.spec.load import parse_spec, read_spec
from tfkit.spec.render import render_spec, schema_line

from ..sampling import some
from ..small_specs import covering_first

PLUGINS = load_plugins(entry_points=False)
INSTALLED = load_plugins()


def round_trip(text: str, plugins: Plugins = PLUGINS) -> str:
    model = parse_spec(text, plugins).model
    rendered = render_spec(model)
    assert parse_spec(rendered, plugins).model == model, rendered
    assert render_spec(parse_spec(rendered, plugins).model) == rendered
    return rendered


@pytest.mark.parametrize("name", covering_first(8))
def test_shipped_specs_load_again_as_the_same_model(name: str) -> None:
    model = read_spec(name, INSTALLED).model
    rendered = render_spec(model)
    assert parse_spec(rendered, INSTALLED).model == model
    assert rendered.startswith(f"tfkit: 1\nname: {name}\n")
    assert max(map(len, rendered.splitlines())) <= 120


HEAD = "tfkit: 1\nname: m\nd_model: 16\nvocab_size: 11\n"
FFN = "ffn: {kind: relu, d_ff: 3}"


def stack(*lines: str, head: str = HEAD) -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return f"{head}graph:\n  embedding: {{block: embedding}}\n  decoder:\n    block: decoder\n{body}"


def test_how_it_reads() -> None:
    text = stack(
        "n_layers: 4",
        "attention: {kind: gqa, n_heads: 4, n_kv_heads: 2, position: rope, qk_norm: {kind: rmsnorm, eps: 1e-5}}",
        "ffn: {kind: swiglu, d_ff: 8}",
        "layers:",
        "  variants:",
        "    local: {attention: {mask: {left: 2, right: 0}, position: {theta: 500}}}",
        "    dense: {ffn: {d_ff: 32}}",
        "  pattern: {0-1: local, rest: dense}",
        head="source: 'https://x.org/a#b'\ndescription: \"two: a, b\"\n" + HEAD,
    )
    assert round_trip(text) == (
        "tfkit: 1\n"
        "name: m\n"
        'source: "https://x.org/a#b"\n'
        'description: "two: a, b"\n'
        "\n"
        "graph:\n"
        "  embedding: {block: embedding, d_model: 16, vocab_size: 11, max_len: null, dropout: 0.0}\n"
        "  decoder:\n"
        "    block: decoder\n"
        "    d_model: 16\n"
        "    dropout: 0.0\n"
        "    n_layers: 4\n"
        "    norm: layernorm\n"
        "    attention:\n"
        "      kind: gqa\n"
        "      d_model: 16\n"
        "      n_heads: 4\n"
        "      dropout: 0.0\n"
        "      bias: true\n"
        "      n_kv_heads: 2\n"
        "      position: rope\n"
        "      qk_norm: {kind: rmsnorm, eps: 1e-05}\n"
        "    ffn: {kind: swiglu, d_model: 16, d_ff: 8, bias: true}\n"
        "    layers:\n"
        "      variants:\n"
        "        local: {attention: {position: {theta: 500.0}, mask: {left: 2, right: 0}}}\n"
        "        dense: {ffn: {d_ff: 32}}\n"
        "      pattern: {0-1: local, rest: dense}\n"
        "\n"
        "init: fan_in\n"
    )


def test_what_a_part_does_not_take_from_the_parts_around_it() -> None:
    """A dropout of 0 inside a stack of 0.1 is not inherited when the text is read again."""
    text = stack("n_layers: 1", "dropout: 0.1", "attention: {n_heads: 2, dropout: 0, bias: false}")
    rendered = round_trip(text)
    assert "attention: {kind: mha, d_model: 16, n_heads: 2, dropout: 0.0, bias: false}" in rendered


VARIANTS = {
    "another kind": "{attention: {kind: mqa, n_heads: 4}}",
    "back to a default": "{attention: {mask: null, scale: null, qk_norm: null}}",
    "part of a mask": "{attention: {mask: {left: null}}}",
    "none": "{attention: null, placement: post}",
    "another norm": "{norm: rmsnorm, attention: {qk_norm: layernorm}}",
    "a norm's number": "{norm: {eps: 1e-3}}",
    "biases one by one": "{attention: {bias: {q: true, o: true}}}",
    "a bias for all": "{ffn: {bias: true}, attention: {bias: true}}",
    "the steps": "{sublayers: [attention, {sublayer: ffn, norm_out: true, residual: {scale: 0.5}}, ffn]}",
    "the activation": "{ffn: {kind: mlp, d_ff: 4, activation: {kind: gelu, approximate: tanh}}}",
    "nothing": "{}",
}


@pytest.mark.parametrize("patch", VARIANTS.values(), ids=VARIANTS)
def test_variants_of_layers(patch: str) -> None:
    round_trip(
        stack(
            "n_layers: 4",
            "norm: {kind: layernorm, eps: 1e-6}",
            "dropout: 0.1",
            "attention:",
            "  {n_heads: 2, dropout: 0, bias: {q: true, k: true}, scale: 0.3, qk_norm: rmsnorm,",
            "  mask: {left: 3, right: 0}}",
            "ffn: {kind: gelu, d_ff: 8, bias: false}",
            f"layers: {{variants: {{v: {patch}}}, pattern: [base*3, v]}}",
        )
    )


STRINGS = [
    "", " ", "a b", " a", "a ", "1", "1e5", "0x1f", "007", "1_000", "null", "~", "true", "yes", "no", "none",
    ".inf", "-", "- a", "a: b", "a:b", "a:", ":a", "a #b", "a#b", "#a", "[a]", "{a}", "a, b", "a,b", "*a",
    "&a", "!a", "|", ">", "%a", "@a", "`a`", '"a"', "'a'", "a\nb", "a\tb", "a\\b", "\x07", "\x7f", "\x85",
    "\u2028", "\ufeff", "é", "日本", "😀", "---", "...", "? a", "<<", "=", "1" * 30, "x" * 300,
    "https://x.org/a?b=c&d=e#f", "1:2", "a  b", "\u00a0",
]  # fmt: skip


@pytest.mark.parametrize("text", some(STRINGS, 8), ids=ascii)
def test_text(text: str) -> None:
    spec = stack("n_layers: 1", FFN, head=f"description: {json.dumps(text, ensure_ascii=False)}\n{HEAD}")
    model = parse_spec(stack("n_layers: 1", FFN), PLUGINS).model.model_copy(update={"description": text})
    assert parse_spec(render_spec(model), PLUGINS).model == model
    if text.isprintable():
        round_trip(spec)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=20))
def test_any_text(text: str) -> None:
    model = parse_spec(stack("n_layers: 1", FFN), PLUGINS).model
    model = model.model_copy(update={"description": text, "source": text})
    assert parse_spec(render_spec(model), PLUGINS).model == model


@settings(max_examples=30, deadline=None)
@given(st.floats(min_value=5e-324, allow_infinity=False, allow_nan=False))
def test_any_number(number: float) -> None:
    round_trip(stack("n_layers: 1", FFN, f"norm: {{kind: rmsnorm, eps: {number!r}}}"))


def test_inputs() -> None:
    graph = "graph:\n  e: {block: embedding, input: ids, tables: {kinds: 2}}\n  l: {block: linear, input: pixels}\n"
    inputs = "inputs: {ids: tokens, kinds: {type: tokens, optional: true}, pixels: {type: features, width: 3}}\n"
    rendered = round_trip(HEAD + inputs + graph + "outputs: [l, e]\n")
    assert "inputs: {ids: {type: tokens}, kinds: {type: tokens, optional: true}, pixels: {type: features," in rendered
    assert "\noutputs: [l, e]\n" in rendered
    assert "inputs: [a, b]\n" in round_trip(
        HEAD + "inputs: [a, b]\ngraph: {e: {block: embedding, input: b}, f: {block: embedding, input: a}}\n"
    )


class OddConfig(FFNConfig):
    """What a plugin may think of."""

    kind: str = "odd"
    label: str | float = "x"
    table: dict[str, int] = Field(default={})
    sizes: tuple[int, ...] = ()
    norms: dict[str, NormConfig] = Field(default={})
    flag: bool | float = 1.0
    big: int = 0
    inner: Shared[NormConfig] | None = None

    def build(self, make: Make) -> Any:
        raise NotImplementedError


class NoneConfig(NormConfig):
    """A kind whose name is the word for an empty slot."""

    kind: Literal["none"] = "none"

    def build(self, make: Make, width: int) -> Any:
        raise NotImplementedError


def odd_plugins() -> Plugins:
    class Config(OddConfig):
        kind: Literal["odd"] = "odd"  # type: ignore[assignment]

    registry = Registry()
    for slot in PLUGINS.registry.slots():
        for value in PLUGINS.registry.kinds(slot).values():
            registry.add(value.config, value.plugin)
    registry.add(Config, "a test")
    registry.add(NoneConfig, "a test")
    return Plugins(registry, ())


def test_fields_of_plugins() -> None:
    plugins = odd_plugins()
    text = stack(
        "n_layers: 2",
        "ffn: {kind: odd, label: 'n_layers', table: {'1': 2, a: 3}, sizes: [1, 2], norms: {a: rmsnorm}, big: 10**20}",
        "layers:",
        "  variants: {v: {ffn: {table: {b: 1}, norms: {a: {eps: 1e-3}, b: layernorm}, sizes: []}}}",
        "  pattern: [v]",
    )
    rendered = round_trip(text, plugins)
    assert 'label: "n_layers"' in rendered
    assert 'table: {"1": 2, a: 3}' in rendered
    assert "v: {ffn: {sizes: [], table: {b: 1}, norms: {a: {kind: rmsnorm, eps: 0.001}, b: layernorm}}}" in rendered
    none = stack("n_layers: 1", "attention: {n_heads: 2, qk_norm: {kind: none}}")
    assert "qk_norm: {kind: none}" in round_trip(none, plugins)  # `qk_norm: none` leaves the slot empty
    assert "flag: true" in round_trip(stack("n_layers: 1", "ffn: {kind: odd, flag: true}"), plugins)


def test_what_no_text_can_say() -> None:
    plugins = odd_plugins()
    layers = "layers: {variants: {v: {ffn: {table: {b: 1}}}}, pattern: [v]}"
    model = parse_spec(stack("n_layers: 2", "ffn: {kind: odd, table: {a: 3}}", layers), plugins).model
    decoder: Any = model.graph["decoder"]
    decoder.layers.variants["v"].ffn.table.pop("a")
    with pytest.raises(ValueError, match="`table`: a variant cannot remove"):
        render_spec(model)
    with pytest.raises(ValueError, match="`<<` cannot be a key"):
        render_spec(model.model_copy(update={"graph": {"<<": model.graph["embedding"]}}))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_spec(specs: st.SearchStrategy[dict[str, Any]], data: st.DataObject) -> None:
    text = json.dumps(data.draw(specs))
    try:
        parse_spec(text, PLUGINS)
    except SpecError:
        assume(False)
    round_trip(text)


def test_a_spec_names_the_schema_that_lies_beside_it(tmp_path: Path) -> None:
    assert schema_line(tmp_path) == ""
    (tmp_path / "schema.json").write_text("{}")
    assert schema_line(tmp_path) == "# yaml-language-server: $schema=schema.json\n"
