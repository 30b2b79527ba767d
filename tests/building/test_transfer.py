"""Weights from a different model: depth, experts, grouped heads, and rows of tokens in both vocabularies."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import tfkit
from tfkit.building import transfer
from tfkit.building.transfer import Transfer
from tfkit.checkpoint.selection import matches_any
from tfkit.errors import Invalid, SpecError

SETS = [
    "logits.tie=null",
    "d_model=8",
    "vocab_size=11",
    "decoder.n_layers=4",
    "decoder.attention.n_heads=4",
    "decoder.ffn.d_ff=12",
]
EXPERTS = "{kind: moe, n_experts: 3, n_experts_per_token: 2, d_ff: 12, router: {renormalize: true}}"
GROUPS = "decoder.attention={kind: gqa, n_heads: 4, n_kv_heads: 2}"
FIRST, LAST = (f"decoder.layers.{number}.ffn.down" for number in (0, 3))
POOL = {
    "decoder.layers.{i}.attention.project.[k v]": {"decoder.layers.{i}.attention.project.[k v]": "(g r d) i -> (g d) i"}
}


def model(*sets: str, seed: int = 0) -> fx.GraphModule:
    return tfkit.build("char_swiglu", sets=[*SETS, *sets], seed=seed).eval()


@cache
def unchanged_model(*sets: str) -> fx.GraphModule:
    """Return a model that several tests share, because an error leaves it unchanged."""
    return model(*sets)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "old"
    tfkit.save(model(seed=1), path)
    return path


@pytest.fixture
def old(folder: Path) -> fx.GraphModule:
    return tfkit.build(folder).eval()


def filled(new: fx.GraphModule, folder: Path, **transfer: Any) -> dict[str, Tensor]:
    """Fill a model from a folder, and return its state dict."""
    Transfer(**transfer).fill(new, folder)
    return new.state_dict()


def test_a_dense_model_spread_over_experts_gives_its_logits(old: fx.GraphModule, folder: Path) -> None:
    new = model(f"decoder.ffn={EXPERTS}")
    entry = {"decoder.layers.{i}.ffn.experts": {"decoder.layers.{i}.ffn": "o i -> e o i"}}
    routers = {name: tensor.clone() for name, tensor in new.state_dict().items() if "router" in name}
    state = filled(new, folder, map=entry, missing=["*.router.*"], allow_change=["decoder.ffn"])
    tokens = torch.arange(10).view(2, 5)
    torch.testing.assert_close(new(tokens), old(tokens), rtol=1e-6, atol=1e-7)
    assert routers
    assert all(torch.equal(state[name], tensor) for name, tensor in routers.items())


def test_zeros_and_initial_values(old: fx.GraphModule, folder: Path) -> None:
    """An entry 0 sets weights and biases to zero; new rows keep their initial values, and old rows are divided."""
    new = model("decoder.ffn.d_ff=15")
    initial = new.get_parameter("decoder.layers.1.ffn.gate_up.weight").detach().clone()
    entries = {
        "decoder.layers.{i}.ffn.[gate up].weight": {"decoder.layers.{i}.ffn.[gate up].weight": "f i -> [f ?] i / 2"},
        "decoder.layers.{i}.ffn.down.weight": {"decoder.layers.{i}.ffn.down.weight": "o i -> o [i 0]"},
        "decoder.layers.2.attention": 0,
    }
    state = filled(new, folder, map=entries, allow_change=["decoder.ffn"], unused=["decoder.layers.2.attention"])
    gate = old.state_dict()["decoder.layers.1.ffn.gate_up.weight"][:12]
    assert torch.equal(state["decoder.layers.1.ffn.gate_up.weight"][:12], gate / 2)
    assert torch.equal(state["decoder.layers.1.ffn.gate_up.weight"][12:15], initial[12:15])
    assert not state["decoder.layers.1.ffn.down.weight"][:, 12:].any()
    assert state["decoder.layers.1.ffn.down.weight"][:, :12].all()
    assert not any(tensor.any() for name, tensor in state.items() if name.startswith("decoder.layers.2.attention."))


def test_all_processes_gather_tensors_in_one_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes have different orders of sets, and `full_tensor` waits for the same tensor of all processes."""
    new, gathered = model("decoder.ffn.d_ff=15"), list[int]()

    def full_tensor(tensor: Tensor) -> Tensor:
        gathered.append(tensor.data_ptr())
        return tensor

    monkeypatch.setattr(transfer, "full_tensor", full_tensor)
    entries: dict[str, Any] = {
        "decoder.layers.{i}.ffn.[gate up].weight": {"decoder.layers.{i}.ffn.[gate up].weight": "f i -> [f ?] i"},
        "decoder.layers.{i}.ffn.down.weight": {"decoder.layers.{i}.ffn.down.weight": "o i -> o [i 0]"},
    }
    filled(new, folder, map=entries, allow_change=["decoder.ffn"])
    fused = [new.get_parameter(f"decoder.layers.{i}.ffn.gate_up.weight").data_ptr() for i in range(4)]
    assert gathered == 2 * [address for address in fused for _ in range(2)]


@pytest.mark.parametrize(
    ("n", "source", "layers", "unused"),
    [
        (8, "{i // 2}", [0, 0, 1, 1, 2, 2, 3, 3], []),
        (6, "{i - 2 * (i // 4)}", [0, 1, 2, 3, 2, 3], []),
        (2, "{2 * i + 1}", [1, 3], ["decoder.layers.*"]),
    ],
)
def test_layers_are_duplicated_and_dropped(
    old: fx.GraphModule, folder: Path, n: int, source: str, layers: list[int], unused: list[str]
) -> None:
    new = model(f"decoder.n_layers={n}")
    state = filled(new, folder, map={"decoder.layers.{i}": f"decoder.layers.{source}"}, unused=unused)
    expected = {name: tensor for name, tensor in old.state_dict().items() if ".layers." not in name}
    for number, layer in enumerate(layers):
        start = f"decoder.layers.{layer}."
        part = {name.removeprefix(start): t for name, t in old.state_dict().items() if name.startswith(start)}
        expected |= {f"decoder.layers.{number}.{name}": tensor for name, tensor in part.items()}
    assert expected.keys() == state.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_heads_are_pooled_to_groups_and_the_most_specific_entry_applies(old: fx.GraphModule, folder: Path) -> None:
    new = model(GROUPS)
    query = "decoder.layers.{}.attention.project.q"
    queries = {query.format("{i}"): query.format("{3 - i}"), query.format(0): query.format(0)}
    unused = [f"{query.format(3)}.weight"]
    state = filled(new, folder, map={**POOL, **queries}, unused=unused, allow_change=["decoder.attention"])
    fused = [old.state_dict()[f"decoder.layers.{number}.attention.project.qkv.weight"].split(8) for number in range(4)]
    for number, layer in enumerate([0, 2, 1, 0]):
        pooled = [torch.stack((t[0:4].view(2, 2, 8).mean(0), t[4:8].view(2, 2, 8).mean(0))) for t in fused[number][1:]]
        expected = torch.cat((fused[layer][0], *(tensor.view(4, 8) for tensor in pooled)))
        torch.testing.assert_close(state[f"decoder.layers.{number}.attention.project.qkv.weight"], expected)


def test_tokens_in_both_vocabularies_keep_their_rows(old: fx.GraphModule, folder: Path) -> None:
    new = model("vocab_size=13")
    before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    pairs = [(0, 10), (5, 2), (12, 0), (99, 1), (7, 88)]  # two are beyond a table
    state = filled(new, folder, tokens=["embedding.tokens.*", "logits.*"], rows=pairs)
    for name in ("embedding.tokens.weight", "logits.output.weight"):
        expected = before[name].clone()
        expected[[0, 5, 12]] = old.state_dict()[name][[10, 2, 0]]
        assert torch.equal(state[name], expected)


@pytest.mark.parametrize(
    ("sets", "transfer", "message"),
    [
        (["decoder.n_layers=5"], {"map": {"decoder.layers.{i}": "decoder.layers.{i // 9}"}}, "the model does not use"),
        (
            ["decoder.n_layers=5"],
            {"map": {"decoder.layers.{j}": "decoder.layers.{j + 1}"}},
            "decoder.layers.3-4.ffn.up.weight from `decoder.layers.{j + 1}`",
        ),
        ([], {"map": {"decoder.layers.{i}": "decoder.layers.{i}"}}, "fills weights that it would fill anyway"),
        ([], {"map": {"decoder.layer.{i}": "decoder.layers.{i}"}}, "similar name exists: `layers`"),
        ([], {"map": {"decoder.layers.{i}": "decoder.layers.{j}"}}, "`j` must be a name in the braces"),
        ([], {"map": {"decoder.layers.{i}": "decoder.layers.{i / 2}"}}, "must be an integer of 0 or more; got 0.5"),
        ([], {"map": {"decoder.layers.{i + 1}": "decoder.layers.{i}"}}, "braces of a key must hold a name"),
        ([], {"map": {"decoder.layers.0.ffn.[gate up]": "decoder.layers.0.ffn.[gate up down]"}}, "must have 2 words"),
        ([], {"map": {"logits.output": 3}}, "must be mapped to a weight"),
        (
            [],
            {"map": {"logits.[output]": "embedding.tokens", "logits.output": "logits.output"}},
            "must match one entry",
        ),
        ([GROUPS], {"map": POOL}, "decoder.attention: mha in the file, gqa here"),
        ([GROUPS], {"map": {**POOL}, "allow_change": ["decoder.atention"]}, "no value that differs matches"),
        (
            ["decoder.ffn.d_ff=16"],
            {"tokens": ["logits.*"], "rows": [(0, 0)], "allow_change": ["*.d_ff"]},
            "[16, 8] in the model",
        ),
        ([], {"map": {"logits": {"logits": "o i -> o j"}}}, "the block `o i` is on the left side only"),
        ([], {"map": {"logits": "embedding"}, "unused": ["lm_head.*"]}, "no weight that the map leaves out"),
        (
            [],
            {"map": {"logits": "embedding"}, "missing": ["logits.*"], "unused": ["logits.*"]},
            "matches no weight that is read",
        ),
    ],
)
def test_errors(folder: Path, sets: list[str], transfer: dict[str, Any], message: str) -> None:
    new = unchanged_model(*sets)
    before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    with pytest.raises((Invalid, SpecError)) as error:
        filled(new, folder, **transfer)
    text = f"{error.value} {getattr(error.value, 'help', '')}"
    assert message in text, text
    assert all(torch.equal(before[name], tensor) for name, tensor in new.state_dict().items())


def test_a_new_head_stays_initialized_in_python(old: fx.GraphModule, folder: Path) -> None:
    sets = [*SETS, "vocab_size=13"]
    options = {"missing": ["logits.*", "embedding.*"], "unused": ["logits.*", "embedding.*"]}
    new = tfkit.build("char_swiglu", sets=sets, seed=5, weights=folder, allow_change=True, **options).state_dict()
    fresh = tfkit.build("char_swiglu", sets=sets, seed=5).state_dict()
    for name, tensor in new.items():
        assert torch.equal(tensor, (old.state_dict() if "decoder" in name else fresh)[name])
    with pytest.raises(SpecError, match="no weight of the model matches"):
        tfkit.build("char_swiglu", sets=SETS, weights=folder, missing=["lm_head.*"])
    with pytest.raises(ValueError, match="`missing` has no effect without weights"):
        tfkit.build("char_swiglu", missing=["logits.*"])


def test_a_map_in_python(old: fx.GraphModule, folder: Path) -> None:
    new = model()
    tfkit.load_weights(new, folder, map={"decoder.layers.{i}": "decoder.layers.{3 - i}"})
    assert torch.equal(new.get_parameter(f"{FIRST}.weight"), old.get_parameter(f"{LAST}.weight"))
    with pytest.raises(SpecError, match="matches no weight that is read"):
        tfkit.load_weights(new, folder, map={"decoder.layer.{i}": "decoder.layers.{3 - i}"})


def test_the_name_of_a_component_matches_all_of_it(tmp_path: Path) -> None:
    """`decoder.attention` is the prefix that the error suggests for `decoder.attention.n_kv_heads`."""
    groups = "decoder.attention={{kind: gqa, n_heads: 4, n_kv_heads: {}, position: rope}}"
    old = model(groups.format(2))
    tfkit.save(old, tmp_path / "groups")
    fused = ["decoder.layers.*.attention"]
    state = filled(
        model(groups.format(1)), tmp_path / "groups", missing=fused, unused=fused, allow_change=["decoder.attention"]
    )
    before = old.state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.items() if ".attention." not in name)
    assert not matches_any("decoder.attention_norm.weight", ["decoder.attention"])
