"""Weights that were trained with different semantic values: rejected with the differences, or accepted on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import tfkit
from tfkit.checkpoint.fitting import DIGEST, SEMANTICS
from tfkit.checkpoint.links import published_map
from tfkit.checkpoint.weight_map import write_shards
from tfkit.graph.semantics import Semantics, parse_semantics, semantics_of, value_changes
from tfkit.tools.common.loading_weights import build_with_weights, load_weights
from tfkit.tools.save.save import save

from ..sampling import some

SPEC = """\
tfkit: 1
name: small
d_model: 16
vocab_size: 40
max_len: 32
graph:
  embedding: {block: embedding}
  decoder:
    block: decoder
    n_layers: 4
    attention: {kind: mha, n_heads: 2, position: alibi}
    ffn: {kind: relu, d_ff: 32}
  logits: {block: lm_head, tie: embedding}
"""


def graph_of(*sets: str) -> tfkit.Graph:
    return tfkit.loads(SPEC, sets=sets)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    graph = graph_of()
    save(tfkit.build(graph, seed=3), tmp_path / "out")
    return tmp_path / "out"


CHANGES = {
    "decoder.attention.position=null": "decoder.attention.position: alibi in the file, null here",
    "decoder.attention.position=rope": "decoder.attention.position: alibi in the file, rope here",
    "decoder.norm.eps=0.1": "decoder.norm.eps: 1e-05 in the file, 0.1 here",
    "decoder.attention.n_heads=4": "decoder.attention.n_heads: 2 in the file, 4 here",
    "decoder.attention.mask={left: 3, right: 0}": (
        "decoder.attention.mask: null in the file, {left: 3, right: 0, rule: null} here"
    ),
    "decoder.ffn={kind: gelu, d_ff: 32}": "decoder.ffn: relu in the file, gelu here",
    "decoder.placement=parallel_two_norms": "decoder.placement: pre in the file, parallel_two_norms here",
    "embedding.scale=sqrt_d_model": "embedding.scale: null in the file, sqrt_d_model here",
    "logits.softcap=30.0": "logits.softcap: null in the file, 30.0 here",
    "decoder.layers={variants: {wide: {norm: {eps: 0.1}}}, pattern: [base, wide]}": (
        "decoder.layers.1,3.norm.eps: 1e-05 in the file, 0.1 here"
    ),
}


@pytest.mark.parametrize("change", some(CHANGES, 5))
def test_weights_of_another_model_are_refused_with_what_differs(change: str, weights: Path) -> None:
    other = graph_of(change)
    with pytest.raises(tfkit.SpecError, match="belong to a different model") as refused:
        build_with_weights(other, weights)
    assert CHANGES[change] in refused.value.diagnostics[0].notes
    with pytest.raises(tfkit.SpecError, match="belong to a different model"):
        load_weights(tfkit.build(other), weights)
    loaded = build_with_weights(other, weights, allow_change=True)
    assert torch.equal(
        loaded.embedding.tokens.weight, load_file(weights / "model.safetensors")["embedding.tokens.weight"]
    )  # type: ignore[union-attr]


IMMATERIAL_CHANGES = (
    "dropout=0.5",
    "max_len=77",
    "name=other",
    "init=gpt2",
    "decoder.attention.d_head=8",
    "decoder.layers={variants: {same: {norm: {eps: 0.00001}}}, pattern: [base, same]}",
    "decoder.final_norm=layernorm",
)


@pytest.mark.parametrize("change", some(IMMATERIAL_CHANGES, 3))
def test_what_says_nothing_about_the_numbers_may_change(change: str, weights: Path) -> None:
    build_with_weights(graph_of(change), weights)


def test_other_names_of_nodes_and_inputs_mean_the_same() -> None:
    text = SPEC.replace("logits:", "head:").replace("max_len: 32", "max_len: 32\ninputs: [ids]")
    here = semantics_of(tfkit.loads(text))
    assert here.digest == semantics_of(graph_of()).digest
    assert value_changes(semantics_of(graph_of()), here) == []
    cross = SPEC.replace("tie: embedding", "tie: embedding, softcap: 2.0").replace("logits:", "head:")
    (change,) = value_changes(semantics_of(graph_of()), semantics_of(tfkit.loads(cross)))
    assert str(change) == "head.softcap: null in the file, 2.0 here"


@pytest.mark.parametrize("name", ["gpt2", "vaswani_base", "gemma3_1b", "bert_base", "albert_base"])
def test_what_is_written_is_what_is_read(name: str) -> None:
    meaning = semantics_of(tfkit.load(name))
    again = parse_semantics(json.loads(meaning.text))
    assert value_changes(again, meaning) == []
    assert again.digest == meaning.digest
    assert len(meaning.text) < 8000


GPT2 = ["graph.decoder.n_layers=2", "d_model=32", "vocab_size=61", "decoder.attention.n_heads=4", "decoder.ffn.d_ff=64"]


@pytest.mark.parametrize("layout", ["tfkit", "huggingface", "shards", pytest.param("export", marks=pytest.mark.slow)])
def test_every_writer_says_what_its_weights_mean(layout: str, tmp_path: Path) -> None:
    graph, out = tfkit.load("gpt2", sets=GPT2), tmp_path / "out"
    model = tfkit.build(graph)
    if layout == "export":
        out.mkdir()
        tfkit.export(model.eval(), out / "model.safetensors")
    elif layout == "shards":
        from tfkit.checkpoint.fitting import safetensors_metadata

        out.mkdir()
        family = graph.spec.family
        assert family is not None
        metadata = safetensors_metadata(graph)
        write_shards(published_map(model, family), model.state_dict(), out, metadata=metadata, max_bytes=9000)
    else:
        save(model, out, layout=layout)  # type: ignore[arg-type]
    for file in out.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            text = opened.metadata()
        assert text["format"] == "pt"
        assert text[DIGEST] == semantics_of(graph).digest
    build_with_weights(graph, out)
    with pytest.raises(tfkit.SpecError, match="belong to a different model"):
        build_with_weights(tfkit.load("gpt2", sets=[*GPT2, "decoder.norm.eps=0.1"]), out)


def written(weights: Path, meaning: object) -> None:
    """The file of the weights, saying something else."""
    file = weights / "model.safetensors"
    text = meaning if isinstance(meaning, str) else json.dumps(meaning)
    save_file(load_file(file), file, metadata={"format": "pt", SEMANTICS: text})


def test_layers_of_a_variant_have_a_value_each() -> None:
    layers = "decoder.layers={variants: {soft: {norm: {kind: layernorm, eps: 0.25}}}, pattern: [base, soft, base]}"
    flat = semantics_of(graph_of("decoder.n_layers=5", layers)).flat
    numbers = [1e-5, 0.25, 1e-5, 1e-5, 0.25]
    expected = {f"decoder.layers.{layer}.norm.eps": number for layer, number in enumerate(numbers)}
    assert {path: value for path, value in flat.items() if path in expected} == expected


def test_files_that_say_nothing_load_as_they_are(weights: Path) -> None:
    file = weights / "model.safetensors"
    save_file(load_file(file), file)
    build_with_weights(graph_of("decoder.norm.eps=0.1"), weights)


def test_a_field_that_did_not_exist_means_its_default(weights: Path) -> None:
    report = json.loads(semantics_of(graph_of()).text)
    for path in ("layers.0-3.attention.softcap", "layers.0-3.norm.offset"):
        del report["graph"]["decoder"][path]
    written(weights, report)
    build_with_weights(graph_of(), weights)
    with pytest.raises(tfkit.SpecError) as refused:
        build_with_weights(graph_of("decoder.attention.softcap=5.0"), weights)
    assert refused.value.diagnostics[0].notes == ("decoder.attention.softcap: nothing in the file, 5.0 here",)


@pytest.mark.parametrize(
    "metadata",
    [
        "no json",
        "[]",
        "{}",
        {"inputs": {}, "graph": {"a": 1}},
        {"inputs": {}, "graph": {"a": {"layers.0-99999999999.x": 1}}},
        {"inputs": {}, "graph": {"a": {"layers.5-2.x": 1}}},
        {"inputs": {}, "graph": {"a": {"reads.input": [{}]}}},
        {"inputs": {}, "graph": {"a": {"reads.input": 5}}},
        "[" * 100_000,
    ],
)
def test_what_a_file_says_is_not_believed_unchecked(metadata: Any, weights: Path) -> None:
    written(weights, metadata)
    with pytest.raises(tfkit.SpecError, match="has an invalid description of the semantics of its weights"):
        build_with_weights(graph_of(), weights)


@pytest.mark.parametrize("value", [10**400, {"a": 1}, [1, {}], "text", True, 1e308])
def test_values_of_any_kind_are_differences(value: Any, weights: Path) -> None:
    report = json.loads(semantics_of(graph_of()).text)
    report["graph"]["decoder"]["layers.0-3.norm.eps"] = value
    written(weights, report)
    with pytest.raises(tfkit.SpecError, match=r"decoder\.norm\.eps: "):
        build_with_weights(graph_of(), weights)


PLUGIN = """\
from typing import Literal

import tfkit
from torch import nn


class Scaled(tfkit.FFNConfig):
    \"\"\"A layer with a factor.\"\"\"

    kind: Literal["scaled"] = "scaled"
    factor: float = 1.0
    rate: tfkit.Immaterial[float] = 0.5

    def build(self, make):
        return nn.Linear(self.d_model, self.d_model)


@tfkit.hookimpl
def tfkit_register(register):
    register(Scaled)
"""


def test_a_plugin_says_which_of_its_fields_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "tfkit_scaled.py").write_text(PLUGIN)
    plugins = tfkit.load_plugins(plugin_dirs=[tmp_path], entry_points=False)

    def meaning(**fields: Any) -> Semantics:
        ffn = json.dumps({"kind": "scaled", **fields})
        return semantics_of(tfkit.loads(SPEC, sets=[f"decoder.ffn={ffn}"], plugins=plugins))

    assert meaning().digest == meaning(rate=0.75).digest
    assert [str(change) for change in value_changes(meaning(), meaning(factor=2.0))] == [
        "decoder.ffn.factor: 1.0 in the file, 2.0 here"
    ]
