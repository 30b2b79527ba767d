"""Initial weights: the published formulas, and a seed for each parameter, independent of all other parameters."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tfkit

from ..sampling import some

PLUGINS = tfkit.load_plugins(entry_points=False)
D, FF, LAYERS, KV, VOCAB = 64, 160, 3, 32, 500

SPEC = f"""
    tfkit: 1
    name: start
    d_model: {D}
    vocab_size: {VOCAB}
    max_len: 200
    graph:
      embedding: {{block: embedding, position: learned}}
      decoder:
        block: decoder
        n_layers: {LAYERS}
        norm: layernorm
        attention: {{kind: gqa, n_heads: 4, n_kv_heads: 2}}
        ffn: {{kind: geglu, d_ff: {FF}}}
      logits: {{block: lm_head, bias: true}}
"""
LAYER = "decoder.layers.1"
PARTS = {
    # role: the tensor, its rows from and to, fan in, whether it ends in the residual stream
    "q": (f"{LAYER}.attention.project.qkv.weight", 0, D, D, False),
    "k": (f"{LAYER}.attention.project.qkv.weight", D, D + KV, D, False),
    "v": (f"{LAYER}.attention.project.qkv.weight", D + KV, D + 2 * KV, D, False),
    "o": (f"{LAYER}.attention.output.weight", 0, D, D, True),
    "gate": (f"{LAYER}.ffn.gate_up.weight", 0, FF, D, False),
    "up": (f"{LAYER}.ffn.gate_up.weight", FF, 2 * FF, D, False),
    "down": (f"{LAYER}.ffn.down.weight", 0, D, FF, True),
    "logits": ("logits.output.weight", 0, VOCAB, D, False),
}
TABLES = ("embedding.tokens.weight", "embedding.position.table.weight")


def weights(init: str, *sets: str, seed: int = 0) -> dict[str, Tensor]:
    graph = tfkit.loads(SPEC, sets=[f"init={init}", *sets], plugins=PLUGINS)
    return tfkit.build(graph, seed=seed).state_dict()


def formula(kind: str, fan_in: int, fan_out: int, *, residual: bool) -> tuple[str, float]:
    """The distribution and its standard deviation, or bound, as the paper or the code that it is named after."""
    return {
        "torch": ("uniform", 1 / math.sqrt(fan_in)),
        "fan_in": ("normal", math.sqrt(2 / (5 * fan_in)) / (math.sqrt(2 * LAYERS) if residual else 1)),
        "gpt2": ("normal", 0.02 / math.sqrt(2 * LAYERS) if residual else 0.02),
        "normal": ("normal", 0.02),
        "xavier": ("uniform", math.sqrt(6 / (fan_in + fan_out))),
        "small": ("normal", math.sqrt(2 / (5 * D))),
    }[kind]


def table_std(kind: str) -> float:
    return {
        "torch": 1.0,
        "fan_in": 0.02,
        "gpt2": 0.02,
        "normal": 0.02,
        "xavier": D**-0.5,
        "small": math.sqrt(2 / (5 * D)),
    }[kind]


def check_spread(x: Tensor, shape: str, size: float) -> None:
    """Mean 0, and the deviation of the distribution, within five standard errors; uniform up to its bounds."""
    std = size / math.sqrt(3) if shape == "uniform" else size
    n = x.numel()
    assert abs(x.mean()) < 5 * std / math.sqrt(n)
    assert abs(x.std() / std - 1) < 5 / math.sqrt(2 * n)
    if shape == "uniform":
        assert 0.99 * size < x.abs().max() <= size
    else:
        assert 2.8 * std < x.abs().max() < 6 * std
        assert abs((x.abs() < std).float().mean() - 0.6827) < 0.03


KINDS = list(PLUGINS.registry.kinds("init"))


@pytest.mark.parametrize(("kind", "role"), some(product(KINDS, PARTS), 25))
def test_each_part_of_a_linear_layer_has_the_spread_of_the_formula(kind: str, role: str) -> None:
    name, first, last, fan_in, residual = PARTS[role]
    shape, size = formula(kind, fan_in, last - first, residual=residual)
    check_spread(weights(kind)[name][first:last], shape, size)


def test_only_the_last_layer_of_a_plain_ffn_is_scaled_by_depth() -> None:
    state = weights("gpt2", f"decoder.ffn={{kind: gelu, d_ff: {FF}}}")
    for layer, residual in (("up", False), ("down", True)):
        check_spread(state[f"{LAYER}.ffn.{layer}.weight"], *formula("gpt2", D, FF, residual=residual))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TABLES)
def test_tables(kind: str, name: str) -> None:
    check_spread(weights(kind)[name], "normal", table_std(kind))


@pytest.mark.parametrize("d_model", [64, 1024])
def test_a_table_that_a_head_shares_is_small_where_it_is_wide(d_model: int) -> None:
    sets = [f"d_model={d_model}", "graph.decoder.n_layers=1", "graph.logits.tie=embedding"]
    actual = weights("fan_in", *sets)
    check_spread(actual["embedding.tokens.weight"], "normal", min(0.02, 4 / d_model))
    check_spread(actual["embedding.position.table.weight"], "normal", 0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_biases_and_norms(kind: str) -> None:
    for name, tensor in weights(kind).items():
        if "norm" in name:
            assert torch.equal(tensor, torch.full_like(tensor, float(name.endswith("weight"))))
        elif name.endswith("bias"):
            fan_in = FF if "down" in name else D
            bound = 1 / math.sqrt(fan_in) if kind == "torch" else 0.0
            assert tensor.abs().max() <= bound
            assert kind != "torch" or tensor.abs().max() > 0.8 * bound


@pytest.mark.filterwarnings("ignore::tfkit.FirstLossWarning")
@pytest.mark.parametrize("kind", ["gpt2", "normal"])
def test_the_deviation_can_be_set(kind: str) -> None:
    actual = weights(f"{{kind: {kind}, std: 0.5}}")
    check_spread(actual["embedding.tokens.weight"], "normal", 0.5)
    check_spread(actual[PARTS["q"][0]], "normal", 0.5)


def test_torch_is_what_torch_does() -> None:
    torch.manual_seed(0)
    layer, actual = nn.Linear(D, 4 * D), weights("torch")
    for mine, theirs in (
        (actual[PARTS["down"][0]] * math.sqrt(FF / D), layer.weight),
        (actual[PARTS["q"][0]], layer.weight),
    ):
        assert abs(mine.std() / theirs.std() - 1) < 0.03


# ---- seeds ----


@pytest.mark.parametrize("kind", KINDS)
def test_one_seed_gives_one_model_and_another_seed_another(kind: str) -> None:
    first, again, other = weights(kind), weights(kind), weights(kind, seed=1)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        if tensor.unique().numel() > 1:
            assert not torch.equal(tensor, other[name]), name


def test_building_does_not_touch_the_global_generator() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    weights("gpt2")
    assert torch.equal(before, torch.get_rng_state())


def test_no_two_parameters_start_alike_nor_do_the_parts_of_one() -> None:
    actual = weights("normal")
    fused = {name for name, *_ in PARTS.values()}
    parts = [tensor for name, tensor in actual.items() if name not in fused and tensor.unique().numel() > 1]
    parts += [actual[name][first:last] for name, first, last, *_ in PARTS.values()]
    starts = [tuple(part.flatten()[:4].tolist()) for part in parts]
    assert len(set(starts)) == len(starts) > len(fused) > 0


SWAPS: dict[str, tuple[list[str], Any]] = {
    "norm": (["graph.decoder.norm=rmsnorm"], "norm"),
    "norm kind and placement": (["graph.decoder.norm=rmsnorm", "graph.decoder.placement=sandwich"], "norm"),
    "ffn": (["graph.decoder.ffn={kind: relu, d_ff: 80}"], ".ffn."),
    "attention": (["graph.decoder.attention={kind: mqa, n_heads: 8}"], ".attention."),
    "position": (["graph.embedding.position=sinusoidal"], "position"),
    "softcap": (["graph.decoder.attention.softcap=5.0"], None),
    "dropout": (["graph.decoder.dropout=0.1"], None),
    "more layers": ([f"graph.decoder.n_layers={LAYERS + 1}"], f"layers.{LAYERS}."),
    "tie": (["graph.logits.tie=embedding"], "logits.output"),
}


@pytest.mark.parametrize("swap", SWAPS)
def test_a_swap_leaves_the_other_weights_bit_identical(swap: str) -> None:
    sets, changed = SWAPS[swap]
    before, after = weights("normal"), weights("normal", *sets)
    unchanged = [name for name in before if changed is None or changed not in name]
    assert unchanged
    for name in unchanged:
        assert torch.equal(before[name], after[name]), name
    shapes = [{name: tensor.shape for name, tensor in state.items()} for state in (before, after)]
    assert (shapes[0] == shapes[1]) == (changed is None)


def test_the_parts_of_a_fused_projection_start_alone() -> None:
    """Other key-value heads leave the queries as they were."""
    before = weights("normal")[PARTS["q"][0]]
    after = weights("normal", "graph.decoder.attention.n_kv_heads=4")[PARTS["q"][0]]
    assert before.shape != after.shape
    assert torch.equal(before[:D], after[:D])


def test_weights_do_not_depend_on_the_type_beyond_its_rounding() -> None:
    graph = tfkit.loads(SPEC, sets=["init=normal"], plugins=PLUGINS)
    full, half = tfkit.build(graph).state_dict(), tfkit.build(graph, dtype=torch.bfloat16).state_dict()
    name = PARTS["down"][0]
    check_spread(half[name].float(), "normal", 0.02)
    assert full[name].dtype == torch.float32
    assert half[name].dtype == torch.bfloat16
