"""Comparison of two models: components that can be compared, and reasons for those that cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tfkit
from tfkit.tools.compare.comparison import RETURNED, common_inputs, compare
from tfkit.tools.compare.other_model import Other, _patches, other_model

Run = Callable[..., str]
HEAD = "tfkit: 1\nname: {name}\nd_model: 16\nvocab_size: {vocab}\nmax_len: {length}\n"
DECODER = """
graph:
  embedding: {block: embedding}
  decoder: {block: decoder, n_layers: 2, norm: rmsnorm, attention: {n_heads: 2}, ffn: {kind: gelu, d_ff: 32}}
  logits: {block: lm_head}
"""
ENCODER = """
inputs: {tokens: tokens, token_types: {type: tokens, optional: true}}
graph:
  embedding: {block: embedding, input: tokens, tables: {token_types: 2}}
  encoder: {block: encoder, n_layers: 1, attention: {n_heads: 2}}
  logits: {block: lm_head}
"""
PAIR = """
inputs: [source, target]
graph:
  source_embedding: {block: embedding, input: source}
  encoder: {block: encoder, n_layers: 1, attention: {n_heads: 2}}
  embedding: {block: embedding, input: target}
  decoder: {block: decoder, memory: encoder, n_layers: 1, attention: {n_heads: 2}}
  logits: {block: lm_head}
"""
FEATURES = """
inputs: {image: {type: features, width: WIDTH}}
graph:
  patches: {block: linear}
  encoder: {block: encoder, n_layers: 1, attention: {n_heads: 2}}
"""


def graph(text: str, *sets: str, name: str = "a", vocab: int = 50, length: int = 32) -> tfkit.Graph:
    head = HEAD.format(name=name, vocab=vocab, length=length)
    return tfkit.loads((head.partition("vocab")[0] if "image" in text else head) + text, sets=sets)


def test_another_vocabulary() -> None:
    small = graph(DECODER, name="b", vocab=9, length=5)
    for a, b in ((graph(DECODER), small), (small, graph(DECODER))):
        actual = compare(a, b)
        assert actual.difference is None
        assert not actual.equal
        (unlike,) = actual.unlike[-1:]
        assert unlike.name == RETURNED
        assert actual.parts[-1].name != RETURNED
        assert "[2, 5, 50]" in unlike.reason
        assert "[2, 5, 9]" in unlike.reason
        assert any(part.name == "decoder.layers.1" for part in actual.parts)


def test_an_encoder_against_a_decoder() -> None:
    actual = compare(graph(ENCODER), graph(DECODER, name="b"))
    assert actual.difference is not None
    assert actual.first is not None
    assert actual.first.name == "embedding"
    assert actual.alone[0] == ("embedding.tables", "encoder")
    assert actual.alone[1] == ("decoder",)
    names = {part.name for part in actual.parts}
    assert names == {"embedding.tokens", "embedding", "logits.output", "logits", RETURNED}


def test_other_widths_inside() -> None:
    wide = graph(DECODER, "decoder.ffn.d_ff=64")
    actual = compare(graph(DECODER), wide)
    unlike = {component.name: component.reason for component in actual.unlike}
    assert unlike["decoder.layers.0.ffn.up"] == "[2, 16, 32] in A, [2, 16, 64] in B"
    assert not actual.equal
    assert compare(wide, wide).equal


def test_other_names_of_the_same_inputs() -> None:
    text = "inputs: [ids]" + DECODER
    actual = compare(graph(DECODER), graph(text, name="b"))
    assert actual.equal
    assert actual.difference == 0


CANNOT = {
    "another input": (DECODER, PAIR, "`b` requires `target` (tokens), but `a` has no such input"),
    "the other way round": (PAIR, DECODER, "`a` requires `target` (tokens), but `b` has no such input"),
    "another type": (FEATURES.replace("WIDTH", "4"), DECODER, "`a` requires `image` (a sequence of width 4)"),
    "another width": (
        FEATURES.replace("WIDTH", "4"),
        FEATURES.replace("WIDTH", "6"),
        "`image` has vectors of width 4 in `a`, but 6 in `b`",
    ),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_given_the_same_inputs_is_one_error(name: str) -> None:
    a, b, message = CANNOT[name]
    with pytest.raises(tfkit.SpecError) as refused:
        compare(graph(a), graph(b, name="b"))
    assert message in str(refused.value)


def test_a_grid_of_patches_has_rows_and_columns() -> None:
    images = torch.arange(2 * 8 * 12).view(2, 1, 8, 12)
    fields = SimpleNamespace(patch_size=2, spatial_merge_size=2, temporal_patch_size=3)
    patches, grids = _patches(images, fields)
    assert grids.tolist() == [[1, 4, 6]] * 2
    first_square = [images[0, 0, row : row + 2, column : column + 2] for row in (0, 2) for column in (0, 2)]
    assert torch.equal(patches.view(48, 3, 4)[:4, 2], torch.stack(first_square).flatten(1))


def test_more_tokens_than_one_can_read() -> None:
    with pytest.raises(tfkit.SpecError, match="`length` must be at most 5, the limit of `b`; got 16"):
        compare(graph(DECODER), graph(DECODER, name="b", length=5), length=16)


def test_both_get_the_same_tokens_below_the_smaller_vocabulary() -> None:
    a, b = graph(DECODER, vocab=500), graph(DECODER, vocab=20)
    ours, theirs = common_inputs(a, b, batch=4, length=None, device="cpu", seed=0)
    assert torch.equal(ours["tokens"], theirs["tokens"])
    assert ours["tokens"].max() < 20
    assert ours["tokens"].shape == (4, 16)


SMALL_SIZES = [
    "d_model=16",
    "vocab_size=32",
    "decoder.n_layers=1",
    "decoder.attention.n_heads=2",
    "decoder.ffn.d_ff=32",
]
NO_CONFIG = {
    "cut": (b'{"model_type": "gpt2",\n  "n_layer":', "its JSON is broken at line 2, column 13: Expecting value"),
    "list": (b"[]", "its JSON is not an object"),
    "null": (b"null", "its JSON is not an object"),
    "deep": (b'{"a":' * 100_000, "its JSON is nested too deeply"),
    "latin": (
        '{\n"name": "gr\u00fc\u00dfe"}'.encode("latin-1"),
        "its JSON is not UTF-8: byte 0xfc at line 2, column 12",
    ),
    "twice": (b'{"n_layer": 2, "n_layer": 3}', "its JSON has the key `n_layer` twice"),
    "long number": (b'{"n_layer": ' + b"7" * 5000 + b"}", "its JSON has a number that is too long"),
    "large": (b"{" + b" " * 2**24 + b"}", "it has more than 16,777,216 bytes"),
}


def load_other(folder: Path) -> Other:
    model = tfkit.build(tfkit.load("gpt2", sets=SMALL_SIZES), device="meta")
    return other_model(model, folder, None, device="cpu", dtype=torch.float32, seed=0)


@pytest.mark.parametrize("name", NO_CONFIG)
def test_a_damaged_config_is_named_with_the_line_and_the_column(name: str, tmp_path: Path) -> None:
    content, reason = NO_CONFIG[name]
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(tfkit.SpecError) as refused:
        load_other(tmp_path)
    assert str(refused.value) == f"error: cannot read `{tmp_path / 'config.json'}`: {reason}"


@pytest.mark.parametrize("value", ["GPT2LMHeadModel", [17], {"class": "GPT2LMHeadModel"}])
def test_architectures_are_a_list_of_names(value: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": value}))
    with pytest.raises(tfkit.SpecError, match=r"`architectures` in .* must be a list of names; got `"):
        load_other(tmp_path)


@pytest.mark.slow
def test_what_transformers_cannot_load_is_one_error(tmp_path: Path) -> None:
    tfkit.save(tfkit.build(tfkit.load("gpt2", sets=SMALL_SIZES)), tmp_path / "gpt2", layout="huggingface")
    config = tmp_path / "gpt2" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"n_layer": "three"}))
    with pytest.raises(tfkit.SpecError, match=r"transformers cannot load `.*gpt2`\n.*n_layer"):
        load_other(tmp_path / "gpt2")


@pytest.mark.slow
def test_a_program_that_reads_other_inputs(tmp_path: Path) -> None:
    example = {"image": torch.zeros(2, 16, 4)}
    program = torch.export.export(tfkit.build(graph(FEATURES.replace("WIDTH", "4"))).eval(), (), kwargs=example)
    torch.export.save(program, tmp_path / "other.pt2")
    with pytest.raises(tfkit.SpecError, match="B fails on these inputs: "):
        compare(graph(DECODER), tmp_path / "other.pt2")


def test_the_command_says_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name, text, vocab in (
        ("one", DECODER, 50),
        ("other", DECODER, 9),
        ("encoder", ENCODER, 50),
        ("pair", PAIR, 50),
    ):
        Path(f"{name}.yaml").write_text(HEAD.format(name=name, vocab=vocab, length=32) + text)
    out = run("compare", "one.yaml", "other.yaml", status=1)
    assert "not compared: (output of the model): [2, 16, 50] in A, [2, 16, 9] in B" in " ".join(out.split())
    assert "the outputs cannot be compared" in out
    out = run("compare", "encoder.yaml", "one.yaml", status=1)
    assert "only in A: encoder\nonly in B: decoder\n" in out
    assert "they diverge at embedding: " in out
    assert "no values to compare" in run("compare", "one.yaml", "one.yaml", "--device", "meta", status=2, stderr=True)
    assert "has no such input" in run("compare", "one.yaml", "pair.yaml", status=1, stderr=True)


def test_a_text_has_the_token_that_a_block_seeks_as_its_end() -> None:
    graph = tfkit.load("clip_base_32", sets=["text_pooled.end=2", "vocab_size=19"])
    inputs, _ = common_inputs(graph, graph, batch=3, length=5, device="cpu", seed=0)
    assert [row.index(2) for row in inputs["tokens"].tolist()] == [4, 3, 2]
