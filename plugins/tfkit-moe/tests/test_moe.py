"""The layer against everything that tfkit guarantees for a component, and the ways to compute it against each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tfkit_moe import Experts, Gate, MoEConfig, Router
from tfkit_moe.stacked import takes_grouped
from torch import Tensor, nn

import tfkit
from tfkit.cli import main
from tfkit.testing import check_component, check_model

from .layer import PLUGINS, layer, spec

CHOICE = {"n_experts": 8, "n_experts_per_token": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "biases": {},
    "plain": {"gated": False, "activation": "relu2", "bias": False},
    "deepseek": {
        "shared": {"d_ff": 16, "gate": True, "bias": False},  # the experts have biases
        "router": {
            "score": "sigmoid",
            "correction_bias": True,
            "groups": {"n": 4, "keep": 2, "by": "top2sum"},
            "renormalize": True,
        },
    },
    "clamped": {"router": {"order": "topk_then_score", "bias": True}, "limit": 0.5, "up_offset": 1},
    "input": {"router": {"score": "sigmoid", "weighs": "input", "softcap": 3.0, "scale": 2}},
    "average": {"shared": {"d_ff": 16, "combine": "average"}},
    "mixer": {"n_experts_per_token": 3, "router": {"sparse_mixer": {"jitter": 0.2}, "renormalize": True}},
    "all": {"n_experts_per_token": 8},
    "branches": {
        "norm_in": "rmsnorm",
        "norm_out": {"kind": "rmsnorm", "offset": 1},
        "shared": {"d_ff": 16, "norm_in": "layernorm", "norm_out": "rmsnorm"},
        "router": {"norm": "rmsnorm", "logit_scale": 0.25, "renormalize": True, "expert_scale": True},
    },
    "odd widths": {"d_ff": 23},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS])
def test_it_has_every_property(name: str) -> None:
    within = ["decoder"] if VARIANTS[name] else ["encoder", "decoder", "memory"]
    check_component(MoEConfig, fields={**CHOICE, "activation": "silu", **VARIANTS[name]}, within=within)


@pytest.mark.parametrize("name", ["biases", "deepseek", "clamped", "input", "mixer", "branches"])
def test_it_trains_is_scripted_and_acts_on_each_token_alone(name: str) -> None:
    graph = tfkit.loads(spec(**{**CHOICE, "d_ff": 24, **VARIANTS[name]}), plugins=PLUGINS)
    check_model(graph, plugins=PLUGINS, only=["weights", "padded-gradients", "position-wise", "script"])


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("deepseek", "mixer", "branches") else pytest.param(name, marks=pytest.mark.slow)
        for name in VARIANTS
    ],
)
def test_it_computes_what_the_reference_says(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "moe.yaml").write_text(spec(**{**CHOICE, "d_ff": 24, **VARIANTS[name]}))
    assert main(["check", str(tmp_path / "moe.yaml"), "--only", "meaning"]) == 0, capsys.readouterr()
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 ok")  # not: does not apply


def experts(d_ff: int = 24, **options: Any) -> Experts:
    """Experts with random weights, 8 of them for tokens of width 16."""
    fields = {"n": 8, "per_token": 3, "d_model": 16, "d_ff": d_ff, "bias": True, "weighs_input": False, **options}
    actual = Experts(Gate(nn.SiLU(), limit=None, up_offset=0), **fields)
    generator = torch.Generator().manual_seed(0)
    for parameter in actual.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return actual


def routing(n: int = 20, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, weights and experts of theirs; two experts get no token."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 16, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(n, 3, generator=generator).requires_grad_()
    chosen = torch.rand(n, 6, generator=generator).topk(3, dim=-1)[1] + 1
    return x, weights, chosen


def naive(module: Experts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Token by token, expert by expert."""
    assert module.gate_up is not None
    assert module.gate_up.bias is not None
    assert module.down.bias is not None
    rows = []
    for token, shares, those in zip(x, weights, chosen.tolist(), strict=True):
        total = torch.zeros(16, dtype=x.dtype)
        for share, value in zip(shares, those, strict=True):
            read = token * share.to(x.dtype) if module.weighs_input else token
            gate, up = (module.gate_up.weight[value] @ read + module.gate_up.bias[value]).chunk(2)
            out = module.down.weight[value] @ (nn.functional.silu(gate) * up) + module.down.bias[value]
            total = total + (out if module.weighs_input else share * out)
        rows.append(total)
    return torch.stack(rows)


def gradients(module: Experts, out: Tensor, x: Tensor, weights: Tensor) -> list[Tensor]:
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    return list(torch.autograd.grad((out.float() * direction).sum(), [x, weights, *module.parameters()]))


WAYS = {
    "grouped": lambda module, x, weights, chosen: module(x, chosen, weights),
    "one by one": lambda module, x, weights, chosen: torch.jit.script(module)(x, chosen, weights),
    "every": lambda module, x, weights, chosen: module.every(x, chosen, weights),
    "compiled": lambda module, x, weights, chosen: torch.compile(module, fullgraph=True, backend="aot_eager")(
        x, chosen, weights
    ),
}


@pytest.mark.parametrize("weighs_input", [False, True], ids=["output", "input"])
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way == "compiled")) for way in WAYS])
def test_every_way_is_the_naive_one(way: str, weighs_input: bool) -> None:
    module = experts(weighs_input=weighs_input)
    x, weights, chosen = routing()
    assert takes_grouped(x, module.widths) == hasattr(nn.functional, "grouped_mm")
    actual, want = WAYS[way](module, x, weights, chosen), naive(module, x, weights, chosen)
    torch.testing.assert_close(actual, want, rtol=1e-5, atol=1e-6)
    for mine, other in zip(gradients(module, actual, x, weights), gradients(module, want, x, weights), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["grouped", "every", "odd widths"])
def test_what_hooks_on_to_a_layer_takes_part(way: str) -> None:
    """Adapters change a parameter or an output while a module runs: no weight is read beside that."""
    module = experts(d_ff=23 if way == "odd widths" else 24)
    x, weights, chosen = routing()
    run = WAYS.get(way, WAYS["grouped"])
    plain = run(module, x, weights, chosen)
    with torch.no_grad():
        module.down.bias.zero_()
    halved = run(module, x, weights, chosen)
    module.down.register_forward_hook(lambda layer, args, out: 2 * out)
    torch.testing.assert_close(run(module, x, weights, chosen), 2 * halved, rtol=1e-5, atol=1e-6)
    module.gate_up.register_forward_hook(lambda layer, args, out: 0 * out)
    assert plain.any()
    assert not run(module, x, weights, chosen).any()


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way == "compiled")) for way in WAYS])
def test_bfloat16_in_every_way(way: str) -> None:
    module = experts().to(torch.bfloat16)
    x, weights, chosen = routing(dtype=torch.bfloat16)
    actual = WAYS[way](module, x, weights, chosen)
    assert actual.dtype == torch.bfloat16
    want = naive(module.float(), x.float(), weights, chosen)
    assert (actual.float() - want).abs().max() <= 0.02 * want.abs().max()


def test_the_gradient_of_doubles_is_that_of_differences() -> None:
    module = experts(d_ff=4).double()
    x, weights, chosen = routing(4, torch.float64)
    weights = weights.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, weights: module(x, chosen, weights), (x, weights))


@pytest.mark.parametrize("d_ff", [24, 23])
def test_no_tokens_give_nothing(d_ff: int) -> None:
    assert layer(**CHOICE, d_ff=d_ff)(torch.randn(2, 0, 16)).shape == (2, 0, 16)


def test_it_runs_without_values() -> None:
    model = tfkit.build(tfkit.loads(spec(**CHOICE, d_ff=24), plugins=PLUGINS), device="meta")
    assert model(torch.randn(2, 5, 16, device="meta")).shape == (2, 5, 16)


def test_the_experts_are_chosen_in_single_precision_under_autocast() -> None:
    module = layer(**CHOICE, d_ff=24)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    weights, chosen = module.router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed, same = module.router(x)
        out = module(x)
    assert torch.equal(chosen, same)
    assert torch.equal(weights, mixed)
    assert out.dtype == torch.bfloat16
    exact = module(x)
    assert (out.float() - exact).abs().max() < 0.03 * exact.abs().max()


def test_a_token_depends_on_no_other() -> None:
    module = layer(**CHOICE, **{"d_ff": 24, **VARIANTS["deepseek"]})
    x = torch.randn(3, 5, 16)
    alone = torch.stack([module(token) for token in x.flatten(0, 1)[:, None]]).view(x.shape)
    torch.testing.assert_close(module(x), alone, rtol=1e-5, atol=1e-6)


def test_every_expert_is_filled_as_a_layer_of_its_own() -> None:
    sets = ["init={kind: small}"]
    models = [tfkit.build(tfkit.loads(spec(**CHOICE, d_ff=24), sets=sets, plugins=PLUGINS), seed=s) for s in (0, 0, 1)]
    weights = [model.state_dict()["encoder.layers.0.ffn.experts.gate_up.weight"] for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert weights[0].flatten(1).unique(dim=0).size(0) == 8
    torch.testing.assert_close(weights[0].std(), torch.tensor((2 / (5 * 16)) ** 0.5), rtol=0.05, atol=0)


def test_a_correction_guides_the_choice_and_nothing_else() -> None:
    fields = {"score": "sigmoid", "correction_bias": True}
    module = layer(**CHOICE, d_ff=24, router=fields)
    correction = module.router.correction
    assert correction is not None
    assert not correction.any()
    assert not correction.requires_grad
    x = torch.randn(9, 16)
    with torch.no_grad():
        correction[5] = 2.0
    weights, chosen = module.router(x)
    assert (chosen == 5).any(dim=-1).all()
    torch.testing.assert_close(weights, torch.sigmoid(x @ module.router.weight.T).gather(1, chosen))


def test_the_routing_can_be_read() -> None:
    module = layer(**CHOICE, d_ff=24)
    calls: list[tuple[Tensor, Tensor]] = []
    module.router.register_forward_hook(lambda router, args, output: calls.append(output))
    module(torch.randn(2, 7, 16))
    assert isinstance(module.router, Router)
    assert [tensor.shape for tensor in calls[0]] == [(14, 2), (14, 2)]


@pytest.mark.parametrize("n", [1, 3, 500])
def test_equal_scores_are_chosen_by_the_index_of_the_expert(n: int) -> None:
    groups = {"n": 4, "keep": 2, "by": "top2sum"}
    router = layer(n_experts=24, n_experts_per_token=7, d_ff=24, router={"score": "sigmoid", "groups": groups}).router
    assert isinstance(router, Router)
    scores = torch.full((n, 24), 0.5)
    scores[:, 20] = scores[:, 9] = 0.75  # the second and the last group of six are the best
    assert router.choose(scores).tolist() == [[6, 7, 8, 9, 10, 11, 20]] * n
    scores[:, 20] = 0.25
    assert router.choose(scores).tolist() == [[0, 1, 2, 3, 4, 5, 9]] * n


MODEL = """
tfkit: 1
name: small
d_model: 16
vocab_size: 11
bias: false
graph:
  embedding: {block: embedding}
  decoder:
    block: decoder
    n_layers: 3
    attention: {kind: mha, n_heads: 2, position: rope}
    ffn:
      kind: moe
      n_experts: 8
      n_experts_per_token: 2
      d_ff: 24
      router: {score: sigmoid, renormalize: true, correction_bias: true, groups: {n: 4, keep: 2, by: top2sum}}
      shared: {d_ff: 16}
    layers:
      variants: {dense: {ffn: {kind: swiglu, d_ff: 48}}}
      pattern: {"0": dense, rest: base}
  logits: {block: lm_head}
"""


@pytest.mark.slow
def test_a_whole_model_with_a_dense_first_layer() -> None:
    graph = tfkit.loads(MODEL, plugins=PLUGINS)
    check_model(graph)
    decoder = tfkit.build(graph).get_submodule("decoder.layers")
    assert [type(layer.ffn).__name__ for layer in decoder] == ["GatedMLP", "MoE", "MoE"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_it_runs_on_a_gpu(dtype: torch.dtype, compiled: bool) -> None:
    module = experts().to("cuda", dtype)
    x, weights, chosen = (tensor.detach().cuda() for tensor in routing(dtype=dtype))
    run = torch.compile(module, fullgraph=True) if compiled else module
    actual = run(x.requires_grad_(), chosen, weights)
    actual.float().square().sum().backward()
    want = naive(module.cpu().float(), x.detach().cpu().float(), weights.cpu(), chosen.cpu())
    error = 0.02 if dtype == torch.bfloat16 else 1e-4
    assert (actual.detach().cpu().float() - want).abs().max() <= error * want.abs().max()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("fields", "location", "reason"),
    [
        ({"n_experts_per_token": 9}, "n_experts_per_token", "a token cannot go through 9 experts: there are 8"),
        ({"router": {"groups": {"n": 3, "keep": 2}}}, "router.groups.n", "8 experts cannot be divided into 3 groups"),
        (
            {"router": {"groups": {"n": 4, "keep": 4}}},
            "router.groups.keep",
            "no effect: all groups are kept, 4 of 4",
        ),
        (
            {"router": {"groups": {"n": 8, "keep": 1}}},
            "router.groups.keep",
            "1 groups must hold 2 or more experts; got 1",
        ),
        (
            {"router": {"groups": {"n": 8, "keep": 4, "by": "top2sum"}}},
            "router.groups.by",
            "`top2sum` must have at least two experts in each group; got one",
        ),
        (
            {"router": {"renormalize": True, "order": "topk_then_score"}},
            "router.renormalize",
            "the softmax over the chosen experts adds up to 1",
        ),
        (
            {"router": {"sparse_mixer": {}, "score": "sigmoid"}},
            "router.score",
            "`score` cannot be combined with `sparse_mixer`",
        ),
        (
            {"router": {"sparse_mixer": {}, "groups": {"n": 4, "keep": 2}}},
            "router.groups",
            "`groups` cannot be combined with `sparse_mixer`",
        ),
        ({"router": {"eps": 1e-20}}, "router.eps", "`eps` has no effect without `renormalize: true`"),
        (
            {"n_experts_per_token": 8, "router": {"correction_bias": True}},
            "router.correction_bias",
            "`correction_bias` has no effect: a token goes through all 8 experts",
        ),
        ({"gated": False, "limit": 7.0}, "limit", "`limit` has no effect without a gate"),
        ({"gated": False, "up_offset": 1}, "up_offset", "`up_offset` has no effect without a gate"),
        ({"dropout": 0.1}, "dropout", "unknown key `dropout`"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], location: str, reason: str) -> None:
    with pytest.raises(tfkit.SpecError, match=re.escape(reason)) as raised:
        tfkit.loads(spec(**{**CHOICE, "d_ff": 24, **fields}), plugins=PLUGINS)
    assert f"(graph.encoder.ffn.{location})" in str(raised.value)


# ---- properties of `tfkit check` ----


@pytest.mark.slow
def test_check_finds_a_choice_among_equal_scores_that_depends_on_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {**CHOICE, "activation": "silu", "router": {"correction_bias": True, "bias": True}}
    check_component(MoEConfig, fields=fields, within=["decoder"], only=["equal-scores"])
    monkeypatch.setattr(Router, "choose", lambda self, scores: (scores + self.correction).topk(self.k)[1])
    with pytest.raises(AssertionError, match=r"- equal-scores, .*with equal scores: .* differs from the reference"):
        check_component(MoEConfig, fields=fields, within=["decoder"], only=["equal-scores"])


def test_the_order_of_experts_does_not_matter() -> None:
    check_component(MoEConfig, fields={**CHOICE, "activation": "silu"}, within=["decoder"], only=["expert-order"])


def test_an_order_that_matters_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Router, "choose", lambda self, scores: torch.arange(self.k).expand(scores.size(0), -1))
    with pytest.raises(AssertionError, match=r"- expert-order, .*experts in another order change the outputs by"):
        check_component(MoEConfig, fields={**CHOICE, "activation": "silu"}, within=["decoder"], only=["expert-order"])
