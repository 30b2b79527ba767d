"""Parametrizations: roles, factors, initial values, and the spec that is trained."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

import tfkit
from tests.run.scaled_specs import DECODER, SPECS, ScaledSpec
from tests.run.training.runs import PLUGINS, TEXT, WITH_PLUGINS, Memory
from tfkit.cli import main
from tfkit.components.init import NormalInitConfig
from tfkit.run.checked_run import Run, load_run
from tfkit.run.kinds.optimizers import AdamWConfig, MuonConfig, SGDConfig
from tfkit.run.kinds.parametrizations import CompletePConfig
from tfkit.run.run_spec import render_run
from tfkit.run.training.loop import Trainer
from tfkit.run.training.optimizer import groups_of
from tfkit.run.training.parametrize import parameter_rules, rules_of, scale_initial_values
from tfkit.tools.check.measure import outcome_of
from tfkit.tools.train.check.optimizer import base_settings
from tfkit.tools.train.plan import run_plan
from tfkit.tools.train.run_data import RunData

ADAMW = AdamWConfig(lr=1e-3, weight_decay=0.25)
FOLDER = Path(__file__).parent
MUP = json.loads((FOLDER / "mup_groups.json").read_text())["groups"]
NANOGPT = json.loads((FOLDER / "nanogpt_mup.json").read_text())
MODEL = {
    "vocab_size": "data.vocab_size",
    "d_model": 64,
    "bias": True,
    "graph": {
        "embedding": {"block": "embedding", "position": {"kind": "learned", "max_len": 12}},
        "decoder": {
            "block": "decoder",
            "n_layers": 6,
            "attention": {"kind": "mha", "n_heads": 4},
            "ffn": {"kind": "relu", "d_ff": 192},
        },
        "head": {"block": "lm_head", "bias": True},
    },
}
BASE = {"model.d_model": 16, "model.decoder.n_layers": 2, "model.decoder.ffn.d_ff": 64}
"""The base sizes: heads get wider, from 4 to 16."""


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sheep.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def scaled_run(
    file: Path, kind: str = "completep", base: Mapping[str, int] = BASE, sets: Any = (), **values: Any
) -> Run:
    """Return a run with base sizes."""
    run = {"tfkit": 1, "name": "scaled", "seed": 3, "model": MODEL, "steps": 8, "batch": {"sequences": 6, "length": 12}}
    run |= {"data": {"kind": "text", "files": str(file)}, "optimizer": {"kind": "adamw", "lr": 1e-2}}
    run |= {"parametrization": {"kind": kind, "base": base}, **values}
    return load_run(run, PLUGINS, sets=sets)


def base_run(file: Path, sets: Any = ()) -> Run:
    """Return the run of the base sizes, without a parametrization."""
    return scaled_run(file, "standard", None, [*(f"{path}={size}" for path, size in BASE.items()), *sets])


# ---- the groups of different implementations ----


@pytest.mark.parametrize("name", SPECS)
def test_rates_and_decays_equal_the_groups_of_mup(name: str) -> None:
    config, base, graph = SPECS[name].graphs()
    rules = rules_of(config, ADAMW, graph, base)
    tied = {node.name for node in graph.nodes if "tie" in node.wires and node.output.type == "logits"}
    for parameter, rule in rules.items():
        lr, decay = MUP[name].get(parameter, (1.0, 1.0))
        factor = 1.0
        if rule.role in ("output", "latent"):
            # `mup` multiplies the output of such a matrix by 1 / columns; here the matrix contains this factor.
            assert parameter not in MUP[name]
            factor = 1 / 4
        elif rule.role == "fixed" and parameter.partition(".")[0] in tied:
            factor = 4.0  # the bias of a head, which `scale` multiplies by 1 / 4
        assert rule.factors.lr == pytest.approx(lr * factor, rel=1e-12), parameter
        assert rule.factors.weight_decay == pytest.approx(decay / factor, rel=1e-12), parameter
    assert MUP[name].keys() == {parameter for parameter, rule in rules.items() if rule.role == "hidden"}


def nanogpt_name(name: str) -> str:
    """Return the name of a weight of tfkit's GPT-2 in nanoGPT."""
    for old, new in (
        ("embedding.tokens.", "transformer.wte."),
        ("embedding.position.table.", "transformer.wpe."),
        ("decoder.layers.", "transformer.h."),
        ("decoder.final_norm.", "transformer.ln_f."),
        ("attention_norm_in.", "ln_1."),
        ("ffn_norm_in.", "ln_2."),
        ("attention.project.qkv.", "attn.c_attn."),
        ("attention.output.", "attn.c_proj."),
        ("ffn.up.", "mlp.c_fc."),
        ("ffn.down.", "mlp.c_proj."),
    ):
        name = name.replace(old, new)
    return name


def test_gpt2_equals_nanogpt_mup() -> None:
    spec = replace(
        SPECS["gpt2"],
        small={"vocab_size": 96, "init": {"kind": "normal", "std": NANOGPT["init_std"]}},
        widths={
            "d_model": (32, 128),
            "decoder.attention.n_heads": (2, 8),
            "decoder.ffn.d_ff": (128, 512),
            "decoder.n_layers": (2, 6),
        },
    )
    config, base, graph = spec.graphs(CompletePConfig)
    rules = rules_of(config, ADAMW, graph, base)
    assert {nanogpt_name(name) for name in rules} == NANOGPT["weights"].keys()
    for name, rule in rules.items():
        expected = NANOGPT["weights"][nanogpt_name(name)]
        assert rule.factors.lr == pytest.approx(expected["lr"], rel=1e-12), name
        assert expected["std"] is None or rule.std == pytest.approx(expected["std"], rel=1e-6), name
        if expected["weight_decay"]:
            assert rule.factors.weight_decay == pytest.approx(expected["weight_decay"], rel=1e-12), name
        # nanoGPT-mup divides epsilon by the depth for all weights, the paper only in layers.
        depth = 1.0 if ".layers." in name else 3.0
        assert rule.factors.eps == pytest.approx(expected["eps"] * depth, rel=1e-12), name
    assert graph.node("logits").config.scale == NANOGPT["logits"]
    stack, small = graph.node("decoder").stack, base.node("decoder").stack
    assert stack is not None
    assert small is not None
    assert {step.addition.scale for layer in stack.layers for step in layer.steps} == {NANOGPT["branch"]}
    # Both have heads of the same width at both sizes, so a factor 1 / d_head is a constant.
    assert graph.node("decoder").config.attention.scale == base.node("decoder").config.attention.scale


# ---- one step by hand ----


@pytest.mark.parametrize("tie", ["null", "embedding"])
def test_a_step_of_adamw_equals_the_rule_by_hand(text_file: Path, tie: str) -> None:
    sets = [f"model.head.tie={tie}"]
    optimizer = {"kind": "adamw", "lr": 1e-2, "weight_decay": 0.5, "eps": 1e-3}
    data = RunData(scaled_run(text_file, sets=sets, optimizer=optimizer))
    model = data.build_model()
    loss = data.build_loss(model)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    batch = data.train.batch(1)
    loss(batch.inputs, batch.targets).backward()
    gradients = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    data.build_optimizer(model).step()
    width, ffn, depth = 64 / 16, 192 / 64, 6 / 2
    for name, value in model.named_parameters():
        lr, decay, eps = 1e-2, 0.0, 1e-3 / width / (depth if ".layers." in name else 1)
        if name.startswith("decoder.") and value.dim() > 1:
            inputs = ffn if name.endswith("down.weight") else width
            lr, decay = lr / inputs, 0.5 * inputs
        elif name == "head.output.weight":
            lr, decay, eps = lr / width, 0.5 * width, 1e-3
        elif name == "head.output.bias":
            lr, eps = (lr, 1e-3) if tie == "null" else (lr * width, 1e-3 / width)
        gradient = gradients[name]
        expected = before[name] * (1 - lr * decay) - lr * gradient / (gradient.abs() + eps)
        torch.testing.assert_close(value.detach(), expected, rtol=1e-6, atol=1e-6 * lr, msg=name)


def test_an_output_matrix_equals_a_matrix_with_a_factor() -> None:
    """Training W' = f W is training W with a factor f of the product, as the papers write it."""
    config, base, graph = SPECS["llama"].graphs()
    rule = rules_of(config, ADAMW, graph, base)["logits.output.weight"]
    factor, generator = 1 / 4, torch.Generator().manual_seed(1)
    weight, x, target = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 3), (4, 3), (4, 5))
    )
    papers, ours = (start.clone().requires_grad_() for start in (weight, factor * weight))
    groups = [{"params": [papers], "eps": 1e-2 / 4}]
    by_paper = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5)
    f = rule.factors
    by_rule = torch.optim.AdamW([ours], lr=0.1 * f.lr, weight_decay=0.5 * f.weight_decay, eps=1e-2 * f.eps)
    for _ in range(3):
        for optimizer, loss in ((by_paper, (x @ (factor * papers).T - target)), (by_rule, (x @ ours.T - target))):
            optimizer.zero_grad()
            loss.square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours, factor * papers, rtol=1e-12, atol=0)
    assert rule.factors.std == factor


# ---- initial values ----


@pytest.mark.parametrize("init", ["fan_in", "torch", "xavier", "small", "gpt2", "normal"])
def test_initial_values_have_the_standard_deviation_of_the_base(text_file: Path, init: str) -> None:
    run, small = scaled_run(text_file, sets=[f"model.init={init}"]), base_run(text_file, [f"model.init={init}"])
    rules = parameter_rules(run)
    assert rules is not None
    model, base_model = (RunData(sized).build_model() for sized in (run, small))
    for name in (
        "embedding.tokens.weight",
        "decoder.layers.0.attention.project.qkv.weight",
        "decoder.layers.1.attention.output.weight",
        "decoder.layers.1.ffn.down.weight",
        "head.output.weight",
    ):
        values, base = model.get_parameter(name).detach(), base_model.get_parameter(name).detach()
        ratio = {"embedding.tokens.weight": 1.0, "decoder.layers.1.ffn.down.weight": 3**-0.5}.get(name, 0.5)
        ratio = 0.25 if name == "head.output.weight" else ratio
        noise = 4 / math.sqrt(2 * base.numel())
        assert float(values.std() / base.std()) == pytest.approx(ratio, rel=noise), name
        assert rules[name].std == pytest.approx(float(values.std()), rel=noise), name


def test_fused_parts_and_biases_have_the_values_of_the_base(text_file: Path) -> None:
    """Xavier's deviation depends on the rows of each part; torch's biases depend on the columns."""
    sets = ["model.init=xavier", "model.decoder.attention={kind: mqa, n_heads: 4, d_head: 4}"]
    rule = parameter_rules(scaled_run(text_file, sets=sets))["decoder.layers.0.attention.project.qkv.weight"]  # type: ignore[index]
    (q_rows, q_scale), (k_rows, k_scale), _ = rule.scales
    assert (q_rows, k_rows) == (16, 4)
    assert q_scale == pytest.approx(math.sqrt((64 + 16) / (16 + 16)) / 2)
    assert k_scale == pytest.approx(math.sqrt((64 + 4) / (16 + 4)) / 2)
    weight = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.ones(24, 64))})
    scale_initial_values(weight, {"w": rule})
    assert torch.equal(weight["w"], torch.tensor([q_scale] * 16 + [k_scale] * 8)[:, None].expand(24, 64))
    model = RunData(scaled_run(text_file, sets=["model.init=torch"])).build_model()
    bound = 1 / math.sqrt(16)
    assert bound / 2 < float(model.get_parameter("decoder.layers.0.ffn.up.bias").detach().abs().max()) <= bound


def walks(weight: torch.Tensor) -> None:
    """Fill each column with a random walk, whose deviation depends on the number of rows."""
    weight.copy_(torch.empty_like(weight).normal_().cumsum(0))


@pytest.mark.parametrize("fill", [torch.nn.init.trunc_normal_, torch.nn.init.orthogonal_, walks])
def test_unknown_initial_values_are_an_error(text_file: Path, fill: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's functions do nothing on the meta device, and the values of a walk have no quantiles."""
    monkeypatch.setattr(NormalInitConfig, "linear", lambda self, weight, **options: fill(weight))
    with pytest.raises(tfkit.SpecError, match="must be filled by operations on single values"):
        parameter_rules(scaled_run(text_file, sets=["model.init=normal"]))


def test_initial_values_that_differ_by_more_than_a_factor_are_an_error(
    text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(self: object, weight: torch.Tensor, **options: object) -> None:
        weight.normal_(mean=1 / weight.size(1), std=0.5)

    monkeypatch.setattr(NormalInitConfig, "linear", shifted)
    with pytest.raises(tfkit.SpecError, match="must differ only by a factor"):
        parameter_rules(scaled_run(text_file, sets=["model.init=normal"]))


def test_a_run_at_its_base_sizes_is_the_same_run(text_file: Path) -> None:
    plain = base_run(text_file)
    scaled = scaled_run(text_file, sets=[f"{path}={size}" for path, size in BASE.items()])
    assert scaled.graph.spec.model == plain.graph.spec.model
    weights, groups = [], []
    for run in (plain, scaled):
        data = RunData(run)
        weights.append(dict(data.build_model().named_parameters()))
        model = data.build_model()
        groups.append(data.build_optimizer(model).param_groups)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    settings = [[(group["lr"], group["weight_decay"], group["eps"]) for group in of_run] for of_run in groups]
    assert settings[0] == settings[1]


# ---- factors in the spec ----


def test_factors_are_values_of_the_spec(text_file: Path) -> None:
    run = scaled_run(text_file, sets=["model.head.tie=embedding", "model.head.scale=3.0"])
    decoder = run.graph.node("decoder").config
    assert decoder.residual.scale == 1 / 3
    assert decoder.attention.scale == pytest.approx(4**-0.5 / 4)  # sqrt(d_base) / d
    assert run.graph.node("head").config.scale == 3.0 / 4
    assert parameter_rules(run)["embedding.tokens.weight"].role == "table"  # type: ignore[index]


def test_a_run_folder_does_not_contain_the_factors_twice(text_file: Path, tmp_path: Path) -> None:
    run = scaled_run(text_file, sets=["model.head.tie=embedding"])
    path = tmp_path / "run.yaml"
    path.write_text(render_run(run.config, run.written))
    again = load_run(path, PLUGINS)
    assert again.graph.spec.model == run.graph.spec.model
    assert again.digest == run.digest


def test_factors_that_follow_from_sizes_keep_their_values(text_file: Path) -> None:
    sets = ["model.embedding.scale=sqrt_d_model", "model.head.tie=embedding", "model.head.scale=d_model ** -0.5"]
    run = scaled_run(text_file, sets=sets)
    assert run.graph.node("embedding").config.scale == 4.0
    assert run.graph.node("head").config.scale == 0.25 / 4
    sets = ["model.decoder.residual={scale: 1.4 / n_layers ** 0.5}"]
    assert scaled_run(text_file, sets=sets).graph.node("decoder").config.residual.scale == 1.4 / 2**0.5 / 3
    sets, base = ["model.decoder.attention.scale=d_model ** -0.5"], {**BASE, "model.decoder.attention.n_heads": 1}
    assert scaled_run(text_file, sets=sets, base=base).graph.node("decoder").config.attention.scale == 0.25


def test_factors_reach_the_variants_of_layers(text_file: Path) -> None:
    variants = "{variants: {wide: {attention: {n_heads: 2}, residual: {scale: 0.5}}}, pattern: [wide, base]}"
    run = scaled_run(text_file, sets=[f"model.decoder.layers={variants}"])
    stack = run.graph.node("decoder").stack
    assert stack is not None
    scales = [{step.addition.scale for step in layer.steps} for layer in stack.layers[:2]]
    assert scales == [{0.5 / 3}, {1 / 3}]
    scores = [layer.steps[0].config.scale for layer in stack.layers[:2]]  # type: ignore[attr-defined]
    assert scores == [pytest.approx(8**-0.5 / 4), pytest.approx(4**-0.5 / 4)]
    assert parameter_rules(run)


def test_more_heads_of_the_same_width_need_no_factor(text_file: Path) -> None:
    run = scaled_run(text_file, base={**BASE, "model.decoder.attention.n_heads": 1})
    assert run.graph.node("decoder").config.attention.scale is None


# ---- optimizers ----


def test_groups_of_the_run_are_multiplied(text_file: Path) -> None:
    groups = [{"match": "*.ffn.down.weight", "lr": 0.5, "weight_decay": 0.3}]
    run = scaled_run(text_file, optimizer={"kind": "adamw", "lr": 1e-2, "weight_decay": 0.1, "groups": groups})
    model = tfkit.build(run.graph, device="meta")
    of_name = dict(model.named_parameters())
    by_parameter = {
        parameter: group
        for group in groups_of(model, run.config.optimizer, parameter_rules(run))
        for parameter in group["params"]
    }
    group = by_parameter[of_name["decoder.layers.3.ffn.down.weight"]]
    assert (group["lr"], group["weight_decay"]) == (pytest.approx(0.5 / 3), pytest.approx(0.3 * 3))
    group = by_parameter[of_name["decoder.layers.3.ffn.up.weight"]]
    assert (group["lr"], group["weight_decay"]) == (pytest.approx(1e-2 / 4), pytest.approx(0.1 * 4))


def factors_by_name(name: str, optimizer: Any) -> dict[str, tuple[float, float]]:
    config, base, graph = SPECS[name].graphs()
    rules = rules_of(config, optimizer, graph, base)
    return {parameter: (rule.factors.lr, rule.factors.weight_decay) for parameter, rule in rules.items()}


def test_factors_of_sgd() -> None:
    factors = factors_by_name("gpt2", SGDConfig(lr=0.1))
    assert factors["decoder.layers.0.ffn.up.weight"] == (6 / 4, 4 / 6)
    assert factors["decoder.layers.0.ffn.down.weight"] == (4 / 6, 6 / 4)
    assert factors["embedding.tokens.weight"] == (4, 1 / 4)
    assert factors["decoder.layers.0.ffn.up.bias"] == (6, 1 / 6)
    bert = factors_by_name("bert", SGDConfig(lr=0.1))
    (bias,) = (value for name, value in bert.items() if name.endswith(".output.bias") and "layers" not in name)
    assert bias == (16, 1 / 16)  # `scale` multiplies the bias and its gradient
    vit = factors_by_name("vit", SGDConfig(lr=0.1))
    (head,) = (value for name, value in vit.items() if name.endswith("output.weight") and "layers" not in name)
    assert head == (1 / 4, 4)


@pytest.mark.parametrize(
    ("scale", "up", "down", "square"),
    [("original", 1.0, (4 / 6) ** 0.5, 1.0), ("match_rms_adamw", 0.5, 1 / 6**0.5 * (4 / 6) ** 0.5 * 6**0.5 / 2, 0.5)],
)
def test_factors_of_muon(scale: Any, up: float, down: float, square: float) -> None:
    """An update has the size sqrt(rows / columns): `up` is 64 x 32 and 384 x 128, `down` is the transpose."""
    factors = factors_by_name("gpt2", MuonConfig(lr=0.1, scale=scale, others=ADAMW))
    expected = {"ffn.up": up, "ffn.down": down, "attention.project.qkv": square}
    if scale == "match_rms_adamw":  # sqrt(rows / columns / max(rows, columns)), relative to the base
        expected["ffn.down"] = (128 / 384 / 384) ** 0.5 / (32 / 64 / 64) ** 0.5
    for name, factor in expected.items():
        lr, decay = factors[f"decoder.layers.0.{name}.weight"]
        assert (lr, decay) == (pytest.approx(factor), pytest.approx(1 / factor)), name
    assert factors["embedding.tokens.weight"] == (1.0, 1.0)


# ---- refusals ----


CONNECTED = "{kind: manifold, streams: 2}"
REJECTED: dict[str, tuple[str, dict[str, int] | None, list[str], str]] = {
    "post-norm": (
        "completep",
        BASE,
        ["model.decoder.placement=post"],
        "only for pre-norm layers: `attention` in `decoder`",
    ),
    "sandwich": ("completep", BASE, ["model.decoder.placement=sandwich"], "only for pre-norm layers"),
    "no norm": (
        "completep",
        BASE,
        ["model.decoder.sublayers=[{sublayer: ffn}, {sublayer: attention, norm_in: false}]"],
        "only for pre-norm layers: `attention`",
    ),
    "hyper-connections": ("completep", BASE, [f"model.decoder.residual={CONNECTED}"], "the residual `manifold`"),
    "shared layers": ("completep", BASE, ["model.decoder.layers={groups: 1}"], "layers that share weights"),
    "depth": ("mup", BASE, [], "`mup` has no rule for depth: `decoder` must have 6 layers at the base sizes"),
    "vocabulary": (
        "mup",
        {"model.d_model": 16, "model.embedding.position.max_len": 16},
        [],
        "`embedding.position.table",
    ),
    "no base": ("mup", None, [], "`mup` has no effect without `base`"),
    "not a path of the model": ("mup", {"d_model": 16}, [], "a base size must be a path of the model; got `d_model`"),
    "invalid base model": ("mup", {"model.d_model": 18}, [], "d_model (18) must be a multiple of n_heads (4)"),
    "unknown key": ("mup", {"model.decoder.d_fff": 18}, [], "unknown key `d_fff`"),
    "decay in the gradient": (
        "mup",
        {"model.d_model": 16},
        ["optimizer={kind: adam, lr: 0.1, weight_decay: 0.5}"],
        "no rule for the weight decay of the optimizer `adam`",
    ),
    "several rates": (
        "mup",
        {"model.d_model": 16, "model.decoder.attention.n_heads": 4, "model.decoder.attention.n_kv_heads": 2},
        ["model.decoder.attention={kind: gqa, n_heads: 16, n_kv_heads: 4}", "optimizer={kind: sgd, lr: 0.1}"],
        "several rates for the matrices of `decoder.layers.0.attention.project.qkv.weight`: factors 0.5 and 1",
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_no_rule_is_an_error(text_file: Path, case: str) -> None:
    kind, base, sets, message = REJECTED[case]
    with pytest.raises(tfkit.SpecError) as error:
        parameter_rules(
            load_run(
                {
                    "tfkit": 1,
                    "name": "scaled",
                    "model": MODEL,
                    "steps": 8,
                    "batch": {"sequences": 6, "length": 12},
                    "data": {"kind": "text", "files": str(text_file)},
                    "optimizer": {"kind": "adamw", "lr": 1e-2},
                    "parametrization": {"kind": kind, "base": base},
                },
                WITH_PLUGINS,
                sets=sets,
            )
        )
    text = " ".join(str(error.value).split())
    assert message in text
    assert "parametrization" in text or case == "invalid base model"


def test_wider_heads_of_a_mixer_have_no_rule() -> None:
    spec = SPECS["mamba2"]
    wider = replace(
        spec,
        small={**DECODER, "decoder.mixer.n_heads": 8},
        widths={"d_model": (32, 128), "decoder.mixer.d_head": (8, 32)},
    )
    with pytest.raises(tfkit.Invalid, match="no rule for wider heads of the mixer `mamba2`"):
        wider.graphs()


def test_one_axis_of_the_state_of_a_single_head_may_grow() -> None:
    widths = {"d_model": (32, 128), "decoder.mixer.d_inner": (64, 256)}
    spec = ScaledSpec("mamba_130m", {**DECODER, "decoder.mixer.step_rank": 4}, widths)
    spec.graphs()
    with pytest.raises(tfkit.Invalid, match="no rule for wider heads of the mixer `mamba`"):
        replace(spec, widths={**widths, "decoder.mixer.d_state": (4, 12)}).graphs()


# ---- the run ----


def test_a_resumed_run_has_equal_bits(text_file: Path) -> None:
    run = scaled_run(text_file, steps=4)
    uninterrupted, first = Memory(), Memory()
    Trainer(run, uninterrupted).train()
    Trainer(run, first, until=2).train()
    second = Memory(first.saved)
    Trainer(run, second).train()
    assert second.lines[-1]["loss"] == uninterrupted.lines[-1]["loss"]
    assert uninterrupted.saved is not None
    assert second.saved is not None
    assert all(torch.equal(value, second.saved.weights[name]) for name, value in uninterrupted.saved.weights.items())


def test_the_base_sizes_are_part_of_the_digest(text_file: Path) -> None:
    """Equal base sizes, written in different ways, are the same run."""
    base = {f"model.graph.{path.removeprefix('model.')}": size for path, size in BASE.items() if "decoder" in path}
    again = scaled_run(text_file, base={**base, "model.d_model": 16})
    assert again.digest == scaled_run(text_file).digest
    assert again.digest != scaled_run(text_file, base={**BASE, "model.d_model": 32}).digest
    assert again.digest != scaled_run(text_file, kind="mup", base={"model.d_model": 16}).digest


def test_the_plan_shows_groups_factors_and_growth(text_file: Path) -> None:
    run = scaled_run(text_file, optimizer={"kind": "adamw", "lr": 1e-2, "weight_decay": 0.5})
    plan = run_plan(run)
    (hidden,) = (group for group in plan.groups if group.role == "hidden" and group.lr == pytest.approx(1e-2 / 4))
    assert (hidden.weights, hidden.weight_decay) == (18, pytest.approx(2.0))
    assert hidden.eps == pytest.approx(1e-8 / 4 / 3)
    assert sum(group.parameters for group in plan.groups) == plan.parameters
    assert plan.growth == {"decoder": {"width": 4, "depth": 3, "heads": 1, "width of heads": 4}}
    assert plan.factors == {"decoder.attention.scale": pytest.approx(1 / 8), "decoder.residual.scale": 1 / 3}
    assert run_plan(base_run(text_file)).groups == ()


def test_the_roles_of_weights_are_printed(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = scaled_run(text_file)
    path = tmp_path / "run.yaml"
    path.write_text(render_run(run.config, run.written))
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", str(path), "--plan", "--roles"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:3] == ["head.output.weight", "output", "0.0025"] for line in lines)
    assert max(map(len, lines)) <= 80
    assert main(["train", str(path), "--plan", "--roles", "--json"]) == 0
    weights = json.loads(capsys.readouterr().out)["weights"]
    assert weights["decoder.layers.5.ffn.down.weight"]["role"] == "hidden"
    assert main(["train", str(path), "--roles"]) == 2
    path.write_text(render_run(base_run(text_file).config, base_run(text_file).written))
    assert main(["train", str(path), "--plan", "--roles"]) == 1
    assert "the run has no base sizes" in capsys.readouterr().err


class DoublingConfig(tfkit.ParametrizationConfig):
    """A wrong rule: rates are doubled even at the base sizes."""

    kind: Literal["doubling"] = "doubling"

    def factors(self, growth: tfkit.Growth, optimizer: tfkit.OptimizerConfig) -> tfkit.Factors:
        return tfkit.Factors(lr=2.0)


def test_a_rule_with_a_factor_at_the_base_sizes_is_broken(text_file: Path) -> None:
    run = scaled_run(text_file)
    assert outcome_of(base_settings, SimpleNamespace(full=run)).status == "ok"
    config = run.config.model_copy(update={"parametrization": DoublingConfig(base={})})
    broken = replace(run, file=replace(run.file, config=config))
    outcome = outcome_of(base_settings, SimpleNamespace(full=broken))
    assert outcome.status == "failed"
    assert "a factor of `embedding.tokens.weight` must be 1 at the base sizes" in (outcome.detail or "")
