"""Weights of nanoGPT, Meta and litgpt: converted folders against models written by hand, in tfkit and transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

import tfkit
from tfkit.tools.convert.convert import convert

from ...sampling import chosen
from . import by_hand
from .in_process import in_process

pytestmark = pytest.mark.usefixtures(in_process.__name__)


def assert_converted(source: Path, expected: Tensor, tmp_path: Path) -> tuple[Any, list[str]]:
    """The folder computes the same in tfkit and in transformers; its config.json, and the warnings."""
    transformers = pytest.importorskip("transformers")
    _, _, notes = convert(source, tmp_path / "out")
    imported = tfkit.import_config(tmp_path / "out")
    assert imported.notes == ()
    ours = tfkit.build(imported.graph)(by_hand.TOKENS[None])[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")(by_hand.TOKENS[None]).logits[0]
    for logits in (ours, theirs):
        assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
    return json.loads((tmp_path / "out/config.json").read_text()), [note.message for note in notes]


def nanogpt_file(folder: Path, state: dict[str, Tensor], **settings: object) -> Path:
    folder.mkdir()
    content = {"model": state, "model_args": {**by_hand.NANO, **settings}, "iter_num": 3, "config": {"device": "cpu"}}
    torch.save(content, folder / "ckpt.pt")
    return folder / "ckpt.pt"


@pytest.mark.parametrize("bias", chosen([True, False], [False]))
def test_nanogpt(bias: bool, tmp_path: Path) -> None:
    state = by_hand.nanogpt_state(bias)
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 12, 12)} if bias else {}
    names = {f"_orig_mod.{name}": tensor for name, tensor in {**state, **masks}.items()}
    source = nanogpt_file(tmp_path / "in", names, bias=bias)
    config, notes = assert_converted(source if bias else source.parent, by_hand.nanogpt(state), tmp_path)
    assert (config["activation_function"], config["tie_word_embeddings"]) == ("gelu", True)
    assert notes[0].startswith("the FFN has the exact GELU")
    assert len(notes) == (1 if bias else 2)


def meta_folder(folder: Path, shards: list[dict[str, Tensor]], **settings: object) -> Path:
    folder.mkdir()
    for number, state in enumerate(shards):
        torch.save(state, folder / f"consolidated.{number:02}.pth")
    (folder / "params.json").write_text(json.dumps({**by_hand.META, **settings}), encoding="utf-8")
    return folder


def split(state: dict[str, Tensor], table_axis: int) -> list[dict[str, Tensor]]:
    """Two files, as Meta's processes write them: each has its rows, or its columns of matrices that sum up."""
    shards: list[dict[str, Tensor]] = [{}, {}]
    for name, tensor in state.items():
        by_columns = name.endswith(("wo.weight", "w2.weight")) or (name.startswith("tok") and table_axis == 1)
        parts = [tensor, tensor] if tensor.dim() == 1 else tensor.chunk(2, int(by_columns))
        for shard, part in zip(shards, parts, strict=True):
            shard[name] = part.clone()
    return shards


@pytest.mark.parametrize("table_axis", chosen([None, 0, 1], [1]))
def test_meta(table_axis: int | None, tmp_path: Path) -> None:
    state = by_hand.meta_state()
    frequencies = {"rope.freqs": torch.ones(2)} if table_axis is None else {}
    shards = [state | frequencies] if table_axis is None else split(state, table_axis)
    config, notes = assert_converted(meta_folder(tmp_path / "in", shards), by_hand.meta(state), tmp_path)
    assert (config["num_key_value_heads"], config["intermediate_size"], notes) == (1, 24, [])


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "factor"), [(False, 8.0), (True, 32.0)])
def test_scaled_positions_of_meta(tied: bool, factor: float, tmp_path: Path) -> None:
    state = by_hand.meta_state()
    if tied:
        state["output.weight"] = state["tok_embeddings.weight"]
    folder = meta_folder(tmp_path / "in", [state], rope_theta=5e7, use_scaled_rope=True)
    config, notes = assert_converted(folder, by_hand.meta(state, 5e7, factor), tmp_path)
    assert (config["rope_scaling"]["factor"], config["tie_word_embeddings"], len(notes)) == (factor, tied, 1)


@pytest.mark.parametrize(("tied", "factor"), [(False, 8.0), (True, 32.0)])
def test_the_factor_of_scaled_positions_is_that_of_the_published_sizes(
    tied: bool, factor: float, tmp_path: Path
) -> None:
    """Llama 3.1 has 8; the sizes of Llama 3.2 have tied tables, and 32."""
    state = by_hand.meta_state()
    if tied:
        state["output.weight"] = state["tok_embeddings.weight"]
    convert(meta_folder(tmp_path / "in", [state], rope_theta=5e5, use_scaled_rope=True), tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["rope_scaling"]["factor"], config["max_position_embeddings"]) == (factor, 131072)


def litgpt_folder(folder: Path, state: dict[str, Tensor], config: dict[str, Any], *, wrapped: bool = False) -> Path:
    folder.mkdir()
    torch.save({"model": state} if wrapped else state, folder / "lit_model.pth")
    (folder / "model_config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("name", "older"),
    chosen([(name, older) for name in by_hand.LITGPT for older in (True, False)], [("qwen2", True)]),
)
def test_litgpt(name: str, older: bool, tmp_path: Path) -> None:
    defaults = {
        "norm_class_name": "LayerNorm",
        "mlp_class_name": "GptNeoxMLP",
        "parallel_residual": True,
        "bias": True,
        "attn_bias": False,
        "norm_qk": False,
        "n_expert": 0,
        "routed_scaling_factor": 1.0,
    }
    config = {**defaults, **by_hand.SHARED, **by_hand.LITGPT[name]}
    state = by_hand.litgpt_state(config)
    stored = by_hand.interleaved(state, config["n_query_groups"]) if older else state
    folder = litgpt_folder(tmp_path / "in", stored, config, wrapped=older)
    assert assert_converted(folder, by_hand.litgpt(state, config), tmp_path)[0]["model_type"] == name


def test_scaled_positions_of_litgpt_are_those_of_llama(tmp_path: Path) -> None:
    factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}
    config = {**by_hand.SHARED, **by_hand.LITGPT["llama"], "attn_bias": False, "rope_adjustments": factors}
    convert(litgpt_folder(tmp_path / "in", by_hand.litgpt_state(config), config), tmp_path / "out")
    scaling = json.loads((tmp_path / "out/config.json").read_text())["rope_scaling"]
    assert scaling["rope_type"] == "llama3"
    assert (scaling["factor"], scaling["original_max_position_embeddings"]) == (8.0, 8192)


def meta_with(tmp_path: Path, **settings: object) -> Path:
    return meta_folder(tmp_path / "in", [by_hand.meta_state()], **settings)


def litgpt_with(tmp_path: Path, **settings: object) -> Path:
    config = {**by_hand.SHARED, **by_hand.LITGPT["llama"], "attn_bias": False}
    return litgpt_folder(tmp_path / "in", by_hand.litgpt_state(config), config | settings)


REFUSED: list[tuple[Callable[[Path], Path], str]] = [
    (lambda path: nanogpt_file(path / "in", by_hand.nanogpt_state(True), n_layer=3), "the settings have 3 layers, but"),
    (lambda path: nanogpt_file(path / "in", by_hand.nanogpt_state(True), rope=True), "`rope` is not supported"),
    (
        lambda path: nanogpt_file(path / "in", by_hand.nanogpt_state(True), n_head="4"),
        "`n_head` must be a positive",
    ),
    (
        lambda path: nanogpt_file(path / "in", by_hand.nanogpt_state(True) | {"transformer.x.weight": torch.ones(2)}),
        "(?s)are not the tensors of the model.*unknown: `transformer.x.weight`",
    ),
    (lambda path: meta_with(path, moe={"num_experts": 8}), "params.json: `moe` is not supported"),
    (lambda path: meta_with(path, n_heads=3), "`layers.0.attention.wq.weight` does not have the shape"),
    (lambda path: litgpt_with(path, scale_embeddings=True), "`scale_embeddings` must be False; got True"),
    (lambda path: litgpt_with(path, mlp_class_name="GemmaMLP"), "neither Llama, Qwen2 nor GPT-NeoX"),
    (lambda path: litgpt_with(path, rope_adjustments={"factor": 2.0}), "`rope_adjustments` must have"),
    (lambda path: litgpt_with(path, n_query_groups=4), "does not have the shape that the settings describe"),
]


@pytest.mark.parametrize(("write", "message"), REFUSED, ids=range(len(REFUSED)))
def test_models_that_no_class_has_are_refused(write: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    source = write(tmp_path)
    with pytest.raises(tfkit.SpecError, match=message):
        convert(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
