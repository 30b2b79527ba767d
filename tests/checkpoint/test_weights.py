"""The weight map of a spec: bit-identical in both directions for any layout in a file, and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import tfkit
from tfkit.checkpoint.links import published_map
from tfkit.checkpoint.tensor_names import collapsed_layers
from tfkit.checkpoint.weight_map import TensorLocation, WeightMap, sort_metadata, write_shards
from tfkit.tools.common.loading_weights import build_with_weights, load_weights

SPEC: dict[str, Any] = {
    "tfkit": 1,
    "name": "small",
    "d_model": 16,
    "vocab_size": 13,
    "graph": {
        "embedding": {"block": "embedding"},
        "decoder": {
            "block": "decoder",
            "n_layers": 3,
            "attention": {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2, "position": "rope"},
            "ffn": {"kind": "swiglu", "d_ff": 24},
        },
        "logits": {"block": "lm_head"},
    },
}
LAYER = "decoder.layers.{i}"
NORMS = ["attention_norm_in", "ffn_norm_in"]
PATTERNS = [None, "... o -> o ...", "(a=4 b) ... -> (b a) ..."]
QKV = [
    None,
    "[q k v] ... -> q ..., k ..., v ...",
    "... [v q k] -> q ..., k ..., v ...",
    "(g [r k=1 v=1] d) ... -> (g r d) ..., (g k d) ..., (g v d) ...",
]
GATE_UP = [
    None,
    "[u g] ... -> g ..., u ...",
    "(f [g=1 u=1]) ... -> (f g) ..., (f u) ...",
    "(m=3 [g u]) ... -> (m g) ..., (m u) ...",
]


@st.composite
def checkpoints(draw: st.DrawFn) -> dict[str, Any]:
    """A family for the model of SPEC, every tensor of it stored in some way."""
    tensors: dict[str, Any] = {"embedding.tokens": "wte", "decoder.final_norm": "f", "logits.output": "head"}
    for norm in NORMS:
        tensors[f"{LAYER}.{norm}"] = f"{norm}.{{i}}.n"
    for name in ("attention.output", "ffn.down"):
        pattern = draw(st.sampled_from(PATTERNS))
        entry: Any = f"l.{{i}}.{name}"
        if pattern is not None:
            entry = {entry: pattern}
        tensors[f"{LAYER}.{name}"] = entry
    qkv, gate_up = draw(st.sampled_from(QKV)), draw(st.sampled_from(GATE_UP))
    tensors[f"{LAYER}.attention.project.[q k v]"] = _joined("l.{i}.attn", "[q k v]", qkv)
    tensors[f"{LAYER}.ffn.[gate up]"] = _joined("l.{i}.mlp", "[gate up]", gate_up)
    return {"model_type": "none", "architecture": "None", "tensors": tensors}


def _joined(file: str, words: str, pattern: str | None) -> Any:
    return f"{file}.{words}" if pattern is None else {f"{file}.fused": pattern}


def model_of(checkpoint: dict[str, Any], **changes: Any) -> torch.fx.GraphModule:
    return tfkit.build(tfkit.loads(yaml.safe_dump({**SPEC, **changes, "checkpoint": checkpoint}, sort_keys=False)))


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(checkpoint=checkpoints(), max_bytes=st.sampled_from([10**9, 4000]))
def test_any_map_gives_back_the_same_bits(checkpoint: dict[str, Any], max_bytes: int, tmp_path: Path) -> None:
    model = model_of(checkpoint)
    for old in tmp_path.iterdir():
        old.unlink()
    family = model.meta["graph"].spec.family
    write_shards(published_map(model, family), model.state_dict(), tmp_path, metadata={}, max_bytes=max_bytes)
    actual = build_with_weights(model.meta["graph"], tmp_path).state_dict()
    assert all(torch.equal(actual[name], tensor) for name, tensor in model.state_dict().items())


SIMPLE_MAP: dict[str, Any] = {
    "model_type": "none",
    "architecture": "None",
    "prefix": "m.",
    "tensors": {
        "embedding.tokens": "m.wte",
        f"{LAYER}.attention_norm_in": "m.{i}.n1",
        f"{LAYER}.attention.project.[q k v]": {
            "m.{i}.qkv": "(g [r k=1 v=1] d) ... -> (g r d) ..., (g k d) ..., (g v d) ...",
        },
        f"{LAYER}.attention.output": "m.{i}.o",
        f"{LAYER}.ffn_norm_in": "m.{i}.n2",
        f"{LAYER}.ffn.[gate up down]": "m.{i}.[gate up down]",
        "decoder.final_norm": "m.f",
        "logits.output": "head",
    },
    "extra": {"extra": "= m.wte.weight", "*.bias_of_mask": "computed"},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    model = model_of(SIMPLE_MAP)
    write_shards(published_map(model, model.meta["graph"].spec.family), model.state_dict(), tmp_path, metadata={})
    return tmp_path / "model.safetensors"


def test_fused_rows_lie_as_the_pattern_says(file: Path) -> None:
    """By hand: for each group two heads of queries, then its keys, then its values."""
    model, stored = model_of(SIMPLE_MAP), load_file(file)
    q, k, v = model.decoder.layers[1].attention.project.qkv.weight.split([16, 8, 8])  # type: ignore[union-attr, index]
    by_hand = [torch.cat([q[8 * g : 8 * g + 8], k[4 * g : 4 * g + 4], v[4 * g : 4 * g + 4]]) for g in range(2)]
    assert torch.equal(stored["m.1.qkv.weight"], torch.cat(by_hand))


def test_what_a_file_repeats_ignores_or_leaves_out(file: Path) -> None:
    stored = load_file(file)
    more = {"extra": stored["m.wte.weight"].clone(), "m.0.bias_of_mask": torch.zeros(2, dtype=torch.bool)}
    save_file({**stored, **more}, file)
    model = model_of(SIMPLE_MAP, init="xavier")
    with pytest.warns(tfkit.LeftOutWarning, match=r"omits 1 tensor of .*\n.*computed: m\.0\.bias_of_mask"):
        load_weights(model, file)
    assert torch.equal(model.embedding.tokens.weight, stored["m.wte.weight"])  # type: ignore[union-attr]
    save_file({name.removeprefix("m."): tensor for name, tensor in stored.items()}, file)
    load_weights(model, file)


def test_only_full_names_of_tensors_are_ignored(file: Path) -> None:
    save_file({**load_file(file), "m.0.bias_of_mask_of_keys": torch.zeros(2)}, file)
    assert refusal(file) == (
        "error: `model.safetensors` has tensors that the model lacks\n   = m.0.bias_of_mask_of_keys [2]"
    )


def test_ranges_of_layers_do_not_depend_on_the_order_of_a_file() -> None:
    shapes = {"m.10.up": (4, 3), "m.11.up": (4, 3), "m.2.up": (4, 3), "m.9.up": (4, 3), "m.3.up": (3, 4), "up": (4, 3)}
    assert collapsed_layers(shapes) == [("m.2,9-11.up", (4, 3)), ("m.3.up", (3, 4)), ("up", (4, 3))]


def refusal(file: Path, checkpoint: dict[str, Any] = SIMPLE_MAP) -> str:
    model = model_of(checkpoint)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(tfkit.SpecError) as refused:
        load_weights(model, file)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()), "half loaded"
    return str(refused.value)


def test_everything_wrong_with_a_file_is_said_at_once(file: Path) -> None:
    stored = load_file(file)
    stored["m.wtf.weight"] = stored.pop("m.wte.weight")
    stored |= {f"m.{i}.up.weight": torch.zeros(25, 16) for i in range(3)}
    stored["m.1.qkv.weight"] = torch.zeros(33, 16)
    stored["m.f.bias"] = stored["m.f.bias"].long()
    save_file(stored, file)
    assert refusal(file) == (
        "error: `model.safetensors` lacks tensors of the model\n"
        "   = m.wte.weight [13, 16]; the file has m.wtf.weight\n\n"
        "error: `model.safetensors` has tensors that the model lacks\n"
        "   = m.wtf.weight [13, 16]\n\n"
        "error: `model.safetensors` has tensors of other shapes than the model\n"
        "   = m.0-2.up.weight: [25, 16] in the file, [24, 16] in the model\n"
        "   = m.1.qkv.weight: `(g [r k v] d)` is 33 instead of 32 with g = 2, r = 2, d = 4, k = 1, v = 1, in\n"
        "     a tensor of shape 33 x 16, for decoder.layers.1.attention.project.q.weight\n\n"
        "error: `model.safetensors` has tensors that are not floating-point numbers\n"
        "   = m.f.bias: int64\n\n"
        "error: 4 errors"
    )


def test_values_that_are_not_finite_and_copies_that_differ(file: Path) -> None:
    stored = load_file(file)
    save_file({**stored, "extra": stored["m.wte.weight"] + 1}, file)
    assert refusal(file).startswith(
        "error: `extra` and `m.wte.weight` are one tensor in the model, but differ in the file"
    )
    stored["m.2.qkv.weight"][3, 5] = torch.nan
    save_file(stored, file)
    assert "`m.2.qkv.weight` of " in refusal(file)
    assert "values that are infinite or NaN" in refusal(file)


@pytest.mark.parametrize("start", ["m.", ""])
def test_what_must_be_zero_or_constant_is_checked_with_and_without_the_head(start: str, file: Path) -> None:
    stored = load_file(file)
    bare = {f"{start}{name.removeprefix('m.')}" if name[:2] == "m." else name: value for name, value in stored.items()}
    family = {**SIMPLE_MAP, "extra": {**SIMPLE_MAP["extra"], "m.gone": "= 0", "m.half": 0.5}}
    sound = {f"{start}gone": torch.zeros(3), f"{start}half": torch.tensor(0.5)}
    save_file({**bare, **sound}, file)
    load_weights(model_of(family), file)
    for name in sound:
        save_file({**bare, **sound, name: torch.ones_like(sound[name])}, file)
        assert f"`{name}` must have only the value" in refusal(file, family)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"decoder.final_norm": None}, "has no entry for tensors of the model\n   --> <spec>"),
        ({f"{LAYER}.ffn.[gate up down": "m.x"}, "has brackets without words, or an unmatched bracket"),
        ({f"{LAYER}.ffn.[up gate down]": "m.[x y z]"}, "two entries name `decoder.layers.{i}.ffn.up`"),
        ({"embedding.tokens": {"m.wte": "a b ->"}}, "found the end where a name"),
        ({"embedding.tokens": {"m.wte": "a b -> a"}}, "the block `a b` is on the left side only"),
        ({"embedding.tokens": "m.{x}.{y}.wte"}, "has more holes than `embedding.tokens.weight` has axes"),
        ({"embedding.tokens": "m.[wte wpe]"}, "1 tensors of the model cannot be 2 of the file"),
    ],
)
def test_maps_that_cannot_be(changes: dict[str, Any], text: str, file: Path) -> None:
    tensors = {name: tensor for name, tensor in {**SIMPLE_MAP["tensors"], **changes}.items() if tensor is not None}
    assert text in refusal(file, {**SIMPLE_MAP, "tensors": tensors})


def test_a_file_has_at_most_five_gigabytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files: list[list[str]] = []
    monkeypatch.setattr("tfkit.checkpoint.weight_map.save_file", lambda tensors, file, **_: files.append([*tensors]))
    monkeypatch.setattr("tfkit.checkpoint.weight_map.sort_metadata", lambda file: None)
    with torch.device("meta"):
        for more in (0, 1):
            state = {"weight": torch.empty(10**9), "bias": torch.empty(10**9 // 4 + more)}
            write_shards(WeightMap.of_model(nn.Linear(1, 1)), state, tmp_path, metadata={})
    assert files == [["weight", "bias"], ["weight"], ["bias"]]


def test_a_value_at_an_index_of_two_axes() -> None:
    state = {"w": torch.zeros(2, 5, 3)}
    TensorLocation("w").fill(state, torch.ones(3), (1, 4))
    assert state["w"].nonzero().tolist() == [[1, 4, channel] for channel in range(3)]


def test_sorted_metadata_has_equal_bytes_and_length(tmp_path: Path) -> None:
    texts = {f"{name} \u20ac": 'a"\\\n\t\x00\x1f\x7f\U0001f411/' + name for name in "gpdackzqx"}
    contents = set()
    for number in range(6):
        file = tmp_path / f"{number}.safetensors"
        save_file({"b": torch.ones(3), "a": torch.arange(5)}, file, metadata={**texts})
        size = file.stat().st_size
        sort_metadata(file)
        assert file.stat().st_size == size
        contents.add(file.read_bytes())
    assert len(contents) == 1
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == texts
        assert torch.equal(opened.get_tensor("a"), torch.arange(5))
