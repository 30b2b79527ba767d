"""The optional steps of attention: their order, sinks, and every step through all conversions of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tfkit
from tfkit.components.attention_core import Eager, SinkDotProduct, SinkSoftmax
from tfkit.nn import Context
from tfkit.testing import Layout, check_cached_step, check_capture, check_component, example_inputs

from ..sampling import chosen, slow, some, spread
from .attentions import BACKENDS, WINDOW, mixed, results, run_flex_on_the_cpu, served, spec

LENGTH = 9

# ---- the order of the steps, against the formula ----

RMS = {"kind": "rmsnorm", "scale": False}
ALL_FIELDS: dict[str, Any] = {
    "kind": "gqa", "n_heads": 4, "n_kv_heads": 2, "clip": 0.5, "qk_norm_full": "rmsnorm", "qk_norm": "layernorm",
    "qk_norm_weight": "per_head", "qk_norm_rotated": "rmsnorm", "value_norm": RMS, "scale": 0.7, "softcap": 1.5,
    "sinks": True, "gate": {"activation": "softplus", "per": "head"}, "inner_norm": "rmsnorm", "bias": True,
}  # fmt: skip
TURNED = {"position": "rope", "temperature": {"beta": 0.7, "original_max_len": 3}}


def angles(positions: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Cosines and sines for heads of 8 channels, as they make them."""
    actual = positions[..., None].float() * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    both = actual.repeat_interleave(2, dim=-1) if interleaved else torch.cat((actual, actual), dim=-1)
    return both.cos(), both.sin()


def rms(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight


def standard(x: Tensor) -> Tensor:
    return (x - x.mean(dim=-1, keepdim=True)) / (x.var(dim=-1, unbiased=False, keepdim=True) + 1e-5).sqrt()


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    cos, sin = angles(positions, interleaved=False)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def formula(x: Tensor, source: Tensor, w: Mapping[str, Tensor], *, turned: bool) -> Tensor:
    """A sequence x [q, 32] that reads another or, turned, itself: head by head in the order of the docstring."""
    projected = {"q": x, "k": source, "v": source}
    for name, y in projected.items():
        projected[name] = (y @ w[f"project.{name}.weight"].T + w[f"project.{name}.bias"]).clamp(-0.5, 0.5)
    full = {name: rms(projected[name], w[f"project.{name}_norm.weight"]) for name in "qk"}
    positions, heads = torch.arange(len(x)), []
    gate = torch.nn.functional.softplus(x @ w["gate.linear.weight"].T)
    for head, group in enumerate((0, 0, 1, 1)):
        q, k, v = (
            full["q"][:, 8 * head :][:, :8],
            full["k"][:, 8 * group :][:, :8],
            projected["v"][:, 8 * group :][:, :8],
        )
        q = standard(q) * w["q_norm.weight"][head] + w["q_norm.bias"][head]
        k = standard(k) * w["k_norm.weight"][group] + w["k_norm.bias"][group]
        q, k = (rotated(q, positions), rotated(k, positions)) if turned else (q, k)
        q, k = rms(q, w["q_norm_rotated.weight"]), rms(k, w["k_norm_rotated.weight"])
        if turned:
            q = q * (1 + 0.7 * torch.log(1 + torch.floor(positions / 3)))[:, None]
        powers = (1.5 * torch.tanh(q @ k.T * 0.7 / 1.5)).exp()
        powers = powers.tril() if turned else powers
        weights = powers / (powers.sum(dim=1, keepdim=True) + w["core.softmax.sinks"][head].exp())
        heads.append(weights @ rms(v) * gate[:, head : head + 1])
    return rms(torch.cat(heads, dim=1), w["inner_norm.weight"]) @ w["output.weight"].T + w["output.bias"]


def shaken(model: nn.Module) -> Any:
    """The model with every parameter drawn at random: also those that start as if they were not there."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return model


@pytest.mark.parametrize("layout", ["decoder", "memory"])
@torch.no_grad()
def test_all_steps_at_once_are_the_formula(layout: str) -> None:
    part = ALL_FIELDS if layout == "memory" else ALL_FIELDS | TURNED
    model = shaken(tfkit.build(spec(layout, part))).eval()
    attention = model.get_submodule("stack.layers.0." + ("cross_attention" if layout == "memory" else "attention"))
    x = torch.randn(2, LENGTH, 32)
    source = torch.randn(2, 5, 12) if layout == "memory" else x
    stack = model.get_submodule("stack")
    context = stack.contexts(x, None, None, None, None)[0]
    if layout == "memory":
        context = Context(None, None, source)
    want = [formula(x[i], source[i], attention.state_dict(), turned=layout == "decoder") for i in range(2)]
    torch.testing.assert_close(attention(x, context), torch.stack(want), rtol=1e-5, atol=1e-5)


# ---- values that are the keys ----


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        ("decoder", {"clip": 0.5, "value_norm": RMS, "bias": True, **TURNED}),  # in one matrix
        ("decoder", {"qk_norm": "layernorm", "qk_norm_full": "rmsnorm", "bias": {"k": True, "v": True}}),
        ("memory", {"clip": 0.5, "bias": True}),
    ],
)
@torch.no_grad()
def test_values_are_the_keys_as_if_both_had_the_same_weights(layout: str, fields: dict[str, Any]) -> None:
    part = {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2, **fields}
    bias = {"k": True} if isinstance(fields["bias"], dict) else True
    graph = spec(layout, {**part, "values": "keys", "bias": bias})
    model, separate = shaken(tfkit.build(graph)).eval(), tfkit.build(spec(layout, part)).eval()
    tensors = dict(model.state_dict())
    for name in separate.state_dict():
        if "project.v." in name:
            tensors[name] = tensors[name.replace("project.v.", "project.k.")]
        elif "project.qkv." in name:
            tensors[name] = torch.cat([tensors[name], tensors[name][32:]])  # four heads of 8 queries, then the keys
    separate.load_state_dict(tensors)
    inputs = example_inputs(graph, length=LENGTH)
    torch.testing.assert_close(model(**inputs), separate(**inputs), rtol=1e-5, atol=1e-5)


def test_a_bias_of_values_that_are_the_keys_is_an_error() -> None:
    with pytest.raises(tfkit.SpecError, match=r"`bias\.v` has no effect: the values are the keys"):
        spec("decoder", {"values": "keys", "bias": {"v": True}})


# ---- sinks ----


@torch.no_grad()
def naive(q: Tensor, k: Tensor, v: Tensor, readable: Tensor, bias: Tensor, sinks: Tensor, cap: float | None) -> Tensor:
    """Query by query in plain numbers; `readable` [b, q, k], `bias` [h, q, k]."""
    out = torch.zeros_like(q)
    group = q.size(1) // k.size(1)
    for b, h, i in product(*map(range, q.shape[:3])):
        total = math.exp(sinks[h])
        for j in range(k.size(2)):
            score = float(q[b, h, i] @ k[b, h // group, j]) * 0.3
            score = score if cap is None else cap * math.tanh(score / cap)
            power = math.exp(score + float(bias[h, i, j])) if readable[b, i, j] else 0.0
            total += power
            out[b, h, i] += power * v[b, h // group, j]
        out[b, h, i] /= total
    return out


def sink_core(name: str, causal: bool, cap: float | None = None) -> nn.Module:
    softmax = SinkSoftmax(4)
    nn.init.normal_(softmax.sinks, generator=torch.Generator().manual_seed(3))
    if name == "sdpa":
        return SinkDotProduct(scale=0.3, dropout=0.0, causal=causal, heads=(4, 2), softmax=softmax)
    return Eager(scale=0.3, dropout=0.0, heads=(4, 2), cap=cap, softmax=softmax)


MASKS = ("none", "bool", "float", "empty", "bias")
CORES = ("sdpa", "eager", "softcap")


@pytest.mark.parametrize("queries", [1, 6])
@pytest.mark.parametrize(
    ("name", "mask"),
    [
        *chosen([*product(CORES, MASKS)], [*product(CORES, spread(MASKS, 3))]),
        slow(("sdpa", "flag")),  # no other core has a flag
    ],
)
def test_sinks_take_part_in_the_softmax_and_add_nothing(name: str, mask: str, queries: int) -> None:
    cap, causal = (1.5 if name == "softcap" else None), mask == "flag"
    core = sink_core(name, causal, cap)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        (2 * torch.randn(3, n, t, 8, generator=generator)).requires_grad_() for n, t in ((4, queries), (2, 6), (2, 6))
    )
    readable = (torch.arange(6) <= torch.arange(6 - queries, 6)[:, None]).expand(3, -1, -1).clone()
    if mask in ("none", "bias"):
        readable[:] = True
    if mask == "empty":
        readable[1:] = False
        readable[1, :, 3:] = True
    bias = torch.randn(4, queries, 6, generator=generator) if mask == "bias" else torch.zeros(4, queries, 6)
    options = {
        "none": None,
        "flag": None,
        "bool": readable[:, None],
        "bias": bias[None],
    }.get(mask, torch.zeros(3, 1, queries, 6).masked_fill(~readable[:, None], -math.inf))
    actual = core(q, k, v, options)
    want = naive(q, k, v, readable, bias, core.get_parameter("softmax.sinks"), cap)
    torch.testing.assert_close(actual, want, rtol=1e-5, atol=1e-5)
    assert mask != "empty" or not actual[2].any()


def test_no_key_is_copied_for_a_single_query(monkeypatch: pytest.MonkeyPatch) -> None:
    core = sink_core("sdpa", causal=True)
    monkeypatch.setattr(core, "attend", None)
    assert core(torch.randn(1, 4, 1, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8), None).shape == (1, 4, 1, 8)


def test_weights_and_the_sink_sum_to_one() -> None:
    model = shaken(tfkit.build(spec("decoder", {"sinks": True})))
    inputs = mixed(spec("decoder", {"sinks": True}))
    weights = tfkit.attention_weights(model, **inputs)["stack.layers.0.attention"]
    assert weights.shape == (4, 2, 9, 9)
    assert not weights[3].any()
    total = weights[0].sum(dim=-1)
    assert (total < 1).all()
    assert (total > 0).all()


# ---- every step through everything that a model goes through ----

STEPS: dict[str, dict[str, Any]] = {
    "clip": {"clip": 0.2},
    "clip_apart": {"clip": 0.2, "qk_norm_full": "rmsnorm"},
    "norm_by_head": {"qk_norm": {"kind": "rmsnorm", "offset": 1}, "qk_norm_weight": "per_head"},
    "norm_after_rotation": {"qk_norm_rotated": "rmsnorm", "position": "rope"},
    "value_norm": {"value_norm": RMS},
    "values": {"values": "keys", "qk_norm_full": "rmsnorm", "position": "rope"},
    "sinks": {"sinks": True},
    "sinks_in_a_window": {"sinks": True, "mask": WINDOW},
    "sinks_with_a_bias": {"sinks": True, "position": "alibi"},
    "sinks_and_softcap": {"sinks": True, "softcap": 2.0, "mask": WINDOW},
    "temperature": {"temperature": {"beta": 0.7, "original_max_len": 3}},
    "temperature_of_a_bias": {"temperature": {"beta": 0.7, "original_max_len": 2, "offset": 1}, "position": "alibi"},
    "gate_by_channel": {"gate": "sigmoid"},
    "gate_by_head": {"gate": {"activation": "softplus", "per": "head"}},
    "inner_norm": {"inner_norm": "layernorm"},
    "everything": {**ALL_FIELDS, **TURNED},
}
PROMISES = ("weights", "state-dict", "types", "padding", "gradients", "script", "cached")
TEMPERATURE = {"temperature": {"beta": 0.7, "original_max_len": 2, "offset": 1}}
OPTIONS: dict[str, list[Any]] = {
    "clip": [None, 0.2],
    "qk_norm": [None, "rmsnorm"],
    "qk_norm_full": [None, "rmsnorm"],
    "qk_norm_rotated": [None, "rmsnorm"],
    "value_norm": [None, "rmsnorm"],
    "values": [None, "keys"],
    "softcap": [None, 2.0],
    "sinks": [False, True],
    "position": [None, "rope", "alibi"],
    "gate": [None, "sigmoid"],
    "inner_norm": [None, "layernorm"],
}


@pytest.mark.slow
@pytest.mark.parametrize("within", ["decoder", "memory", "encoder"])
def test_all_steps_at_once_keep_every_promise(within: Layout) -> None:
    fields = {name: value for name, value in (ALL_FIELDS | TURNED).items() if name != "kind"}
    check_component("gqa", slot="attention", fields=fields, within=[within], only=PROMISES)


@pytest.mark.slow
@pytest.mark.parametrize("within", ["decoder", "memory", "encoder"])
def test_every_two_steps_keep_every_promise(within: Layout) -> None:
    check_component("gqa", slot="attention", fields=TEMPERATURE, options=OPTIONS, within=[within], only=PROMISES)


def part_of(step: str) -> dict[str, Any]:
    return {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2, "d_head": 16, **STEPS[step]}


@pytest.mark.slow
def test_all_steps_are_captured_whole() -> None:
    graph = spec("memory", part_of("everything"))
    model = shaken(tfkit.build(graph))
    check_capture(model, *[example_inputs(graph, length=n, padding="left") for n in (5, 8, 11)])
    check_cached_step(model, example_inputs(graph, length=LENGTH))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("step", some(STEPS, 2))
def test_backends_agree(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_flex_on_the_cpu(monkeypatch)
    graph = spec("decoder", part_of(step))
    for inputs in (mixed(graph), example_inputs(graph, length=LENGTH)):
        models = {backend: shaken(tfkit.build(graph, attention_backend=backend)) for backend in BACKENDS}
        rules = served(models["flex"])
        actual = {backend: results(model, inputs) for backend, model in models.items()}
        for backend, (name, want) in product(("eager", "flex"), actual["sdpa"].items()):
            scale = float(want.abs().max().clamp(min=1))
            torch.testing.assert_close(actual[backend][name] / scale, want / scale, rtol=0, atol=1e-5, msg=name)
        assert "sinks" not in STEPS[step] or not any(rules)


def test_what_is_not_asked_for_is_not_there() -> None:
    model = tfkit.build(spec("decoder", {}))
    attention: Any = model.get_submodule("stack.layers.0.attention")
    assert {name for name, _ in attention.named_children()} == {"project", "core", "merge_heads", "output"}
    assert model.get_submodule("stack").contexts(torch.zeros(1, 3, 32), None, None, None, None)[0].temperature is None  # type: ignore[operator]


def test_a_temperature_is_made_once_for_all_layers_that_share_it() -> None:
    stack: Any = tfkit.build(spec("decoder", STEPS["temperature"])).get_submodule("stack")
    assert len(stack.shared) == 1
    assert stack.contexts(torch.zeros(2, 7, 32), None, None, None, None)[0].temperature.shape == (1, 1, 7, 1)
