"""Null removes an inherited value; a shared key that no component reads is an error only where it was written."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import tfkit
from tfkit.errors import SpecWarning
from tfkit.graph.expand import Graph
from tfkit.tools.import_.importing import import_config

PLUGINS = tfkit.load_plugins(entry_points=False)
BASE = """\
tfkit: 1
name: base
description: all shared keys
d_model: 16
vocab_size: 11
max_len: 8
dropout: 0.1
bias: false
norm: rmsnorm
inputs: [tokens, segment]
graph:
  embedding: {block: embedding, input: tokens, position: learned, tables: {segment: 2}}
  decoder: {block: decoder, n_layers: 1, attention: {n_heads: 2}, ffn: {kind: relu, d_ff: 24}}
  extra: {block: lm_head, input: decoder}
  logits: {block: lm_head, input: decoder}
init: {kind: normal, std: 0.02}
outputs: [extra, logits]
"""


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., Path]:
    """`files(*lines)` writes a spec of these lines that extends the base."""
    (tmp_path / "base.yaml").write_text(BASE)

    def child(*lines: str) -> Path:
        path = tmp_path / "child.yaml"
        path.write_text("\n".join(["tfkit: 1", "extends: ./base.yaml", "name: child", *lines]) + "\n")
        return path

    return child


def load(path: Path, *sets: str) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return tfkit.load(path, sets=sets, plugins=PLUGINS)


def refusal(path: Path, *sets: str) -> str:
    with pytest.raises(tfkit.SpecError) as caught:
        load(path, *sets)
    assert len(caught.value.diagnostics) == 1
    return str(caught.value)


def warning(path: Path, *sets: str) -> str:
    with pytest.warns(SpecWarning) as caught:
        tfkit.load(path, sets=sets, plugins=PLUGINS)
    (value,) = caught
    return str(value.message)


def attention_bias(graph: Graph) -> object:
    return graph.node("decoder").config.attention.bias  # type: ignore[attr-defined]


def test_null_at_the_top_takes_a_shared_key_away(files: Callable[..., Path]) -> None:
    assert attention_bias(load(files())) is False
    by_file, by_set = load(files("bias: null")), load(files(), "bias=null")
    assert attention_bias(by_file) is attention_bias(by_set) is True
    assert by_file.spec.model == by_set.spec.model
    assert load(files("norm: null")).node("decoder").config.norm.kind_name() == "layernorm"  # type: ignore[attr-defined]
    assert load(files(), "dropout=null").node("decoder").config.dropout == 0.0  # type: ignore[attr-defined]


def test_null_at_the_top_takes_the_other_keys_away_too(files: Callable[..., Path]) -> None:
    lines = ["init: null", "description: null"]
    first, other = load(files(*lines)), load(files(), "init=null", "description=null")
    assert first.spec.model == other.spec.model
    assert (first.spec.model.init.kind_name(), first.spec.model.description) == ("fan_in", None)
    assert "missing key `graph`" in refusal(files("graph: null"))


def test_what_is_taken_away_can_be_missing(files: Callable[..., Path]) -> None:
    assert "missing key `d_model`" in refusal(files("d_model: null"))
    assert "missing key `d_model`" in refusal(files(), "d_model=null")


def test_set_takes_away_named_parts_as_a_file_does(files: Callable[..., Path]) -> None:
    first = load(files("outputs: null", "graph: {extra: null}"))
    other = load(files(), "outputs=null", "extra=null")
    assert first.spec.model == other.spec.model
    assert list(other.spec.model.graph) == ["embedding", "decoder", "logits"]


def test_a_key_that_was_taken_away_can_come_back(files: Callable[..., Path]) -> None:
    assert attention_bias(load(files("bias: null"), "bias=false")) is False


def test_null_that_takes_nothing_away(files: Callable[..., Path], tmp_path: Path) -> None:
    assert "there is no `bias` to remove" in refusal(files("bias: null"), "bias=null")
    local = tmp_path / "own.yaml"
    local.write_text("tfkit: 1\nname: own\nvocab_size: 11\nd_model: null\ngraph: {embedding: {block: embedding}}\n")
    assert "there is no `d_model` to remove" in refusal(local)
    local.write_text("tfkit: 1\nname: own\nvocab_size: 11\nd_model: 8\nbias: null\ngraph: {e: {block: embedding}}\n")
    assert "there is no `bias` to remove" in refusal(local)


def test_nothing_after_the_sign_takes_nothing_away(files: Callable[..., Path]) -> None:
    assert "`bias` must have a value" in refusal(files(), "bias=")
    assert "got null" in refusal(files(), "extra=")


def test_null_in_a_config_takes_nothing_away(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 16}
    for nulls, invalid in (({"n_positions": None}, "max_len"), ({"vocab_size": None}, "vocab_size")):
        (tmp_path / "config.json").write_text(json.dumps({**config, **nulls}))
        with pytest.raises(tfkit.SpecError, match=f"{invalid}.*got null|no `{invalid}`"):
            import_config(tmp_path / "config.json", plugins=PLUGINS)


def test_null_in_a_variant_still_means_nothing_there(files: Callable[..., Path]) -> None:
    layers = "{variants: {bare: {attention: null}}, pattern: [bare]}"
    layer = load(files(), f"decoder.layers={layers}").node("decoder").config.layers.variants["bare"]  # type: ignore[attr-defined]
    assert layer.attention is None


def test_null_takes_a_class_away_from_a_family_in_a_file(files: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: gpt2\nheads: {Model: null}\n")
    heads = {name: load(files(f"checkpoint: {name}")).spec.family.heads for name in ("gpt2", "./mine.yaml")}  # type: ignore[union-attr]
    assert heads["gpt2"].keys() - heads["./mine.yaml"].keys() == {"Model"}


# ---- a shared key that no part takes ----

BODY = """\
tfkit: 1
name: base
d_model: 16
norm: rmsnorm
inputs: {x: {type: features, width: 16}}
graph:
  body: {block: encoder, n_layers: 1, attention: {n_heads: 2}}
"""
SWAP = "body={block: linear, bias: false}"
SWAPPED = "graph: {body: {block: linear, bias: false}}"


@pytest.fixture
def bodies(files: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """The same with a base whose `norm` only the encoder reads."""
    (tmp_path / "base.yaml").write_text(BODY)
    return files


def test_a_key_that_set_leaves_without_a_reader_is_warned_of(bodies: Callable[..., Path], tmp_path: Path) -> None:
    for path in (bodies(), tmp_path / "base.yaml"):
        text = warning(path, SWAP)
        assert text.startswith("warning: `norm` no longer has an effect")
        assert "base.yaml:4:1" in text
        assert "`--set norm=null`" in text
    load(bodies(), SWAP, "norm=null")


def test_so_is_one_that_a_child_leaves_to_its_parent(bodies: Callable[..., Path]) -> None:
    for sets in ((), ("body.bias=true",)):
        text = warning(bodies(SWAPPED), *sets)
        assert "base.yaml:4:1" in text
        assert "`norm: null`" in text
    load(bodies(SWAPPED, "norm: null"))


def test_what_the_file_says_itself_is_strict(bodies: Callable[..., Path], tmp_path: Path) -> None:
    child = bodies("norm: layernorm", SWAPPED)
    assert "child.yaml:4:1" in refusal(child)
    assert "child.yaml:4:1" in refusal(child, "body.bias=true")
    base = tmp_path / "base.yaml"
    base.write_text(BODY.replace("encoder, n_layers: 1, attention: {n_heads: 2}", "linear, bias: false"))
    assert "base.yaml:4:1" in refusal(base)
    assert "base.yaml:4:1" in refusal(base, "body.bias=true")


def test_what_set_says_itself_is_strict(bodies: Callable[..., Path], tmp_path: Path) -> None:
    assert "--set:1:1" in refusal(bodies(SWAPPED, "norm: null"), "norm=layernorm")
    assert "nothing in the model takes it" in refusal(tmp_path / "base.yaml", SWAP, "norm.eps=1e-3")


def test_on_the_command_line_it_is_a_note(bodies: Callable[..., Path], run: Callable[..., str]) -> None:
    assert "warning: `norm` no longer has an effect" in run("params", str(bodies()), "--set", SWAP, stderr=True)
    assert "warning: `norm` no longer has an effect" in run("validate", str(bodies(SWAPPED)), stderr=True)


def test_the_count_of_a_base_is_not_that_of_what_changes_it() -> None:
    assert tfkit.load("gpt2").spec.model.parameters is not None
    assert tfkit.loads("extends: gpt2\nname: mine\nd_model: 24").spec.model.parameters is None
    assert tfkit.load("gpt2", sets=["d_model=24"]).spec.model.parameters is None
