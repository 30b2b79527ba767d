"""Runs with adapters: what is trained, what checkpoints contain, and how such a run continues."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

import tfkit
from tfkit.building.builder import build
from tfkit.checkpoint.adapters import Matrices
from tfkit.cli import main
from tfkit.decoding.generate import generate
from tfkit.errors import Invalid, SpecError
from tfkit.nn import is_untouched
from tfkit.run.checked_run import Run, load_run
from tfkit.run.run_spec import AdaptersConfig
from tfkit.run.training.adapters import chosen_matrices, low_ranks
from tfkit.run.training.loop import Trainer
from tfkit.tools.check.reduced import reduced_model
from tfkit.tools.save.save import save
from tfkit.tools.trace.attention_weights import attention_weights
from tfkit.tools.train.plan import run_plan

from .launches import forked, numbers, options
from .runs import PLUGINS, Memory, same, small_run, trained, write_run

ADAPTERS = "adapters={targets: [q, v, ffn.up, head], rank: 3, alpha: 5}"
SETS = ("weights=base", ADAPTERS)
SCALE = 5 / 3


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the run `small.yaml` and the weights `base`."""
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    save(build(small_run(tmp_path).graph, seed=8), "base")
    return tmp_path / "base"


def adapted(folder: Path, *sets: str) -> Run:
    return small_run(folder, *SETS, *sets)


def matrices(model: torch.nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """The matrices `a` and `b` by the layer and the part."""
    return {path: (module.a.detach(), module.b.detach()) for path, module in low_ranks(model)}


def fill(model: torch.nn.Module, seed: int = 0) -> None:
    """Give all matrices values whose product is not zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for matrix in (matrix for pair in matrices(model).values() for matrix in pair):
            matrix.copy_(torch.randn(matrix.shape, generator=generator) * 0.3)


def merged(weights: Mapping[str, Tensor], pairs: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The weights with scale B A, by the formula of the paper, for a width of 16 and fused rows q, k, v."""
    result = {name: tensor.clone() for name, tensor in weights.items()}
    for path, (a, b) in pairs.items():
        layer, _, adapter = path.rpartition(".")
        start = {"lora": 0, "lora_q": 0, "lora_k": 16, "lora_v": 32}[adapter]
        result[f"{layer}.weight"][start : start + len(b)] += SCALE * b @ a
    return result


# ---- the model ----


def test_a_layer_adds_the_product_to_the_rows_of_its_part(tmp_path: Path) -> None:
    trainer = Trainer(adapted(tmp_path), Memory())
    fill(trainer.model)
    pairs = matrices(trainer.model)
    assert [path.rpartition(".layers.")[2] for path in pairs if ".layers.1" in path] == [
        "1.attention.project.qkv.lora_q",
        "1.attention.project.qkv.lora_v",
        "1.ffn.up.lora",
    ]
    state = trainer.model.state_dict()
    assert same(state, tfkit.build("base").state_dict())  # a state dict has the tensors of the spec
    plain = tfkit.build("base")
    plain.load_state_dict(merged(state, pairs))
    tokens = torch.randint(0, 20, (3, 9), generator=torch.Generator().manual_seed(1))
    expected = plain.eval()(tokens)
    torch.testing.assert_close(trainer.model.eval()(tokens), expected, atol=2e-5, rtol=1e-4)
    assert (expected - tfkit.build("base").eval()(tokens)).abs().max() > 0.1
    for name, weights in attention_weights(trainer.model, tokens).items():
        torch.testing.assert_close(weights, attention_weights(plain, tokens)[name], atol=1e-5, rtol=1e-4)
    greedy = [generate(model, tokens, max_new_tokens=3).tokens for model in (trainer.model, plain)]
    assert torch.equal(*greedy)
    assert not is_untouched(trainer.model.get_submodule("decoder.layers.0.attention.project.qkv"))
    assert is_untouched(trainer.model.get_submodule("decoder.layers.0.attention.output"))


@pytest.mark.parametrize(
    ("settings", "scale"),
    [("rank: 4", 1.0), ("rank: 4, alpha: 6", 1.5), ("rank: 4, alpha: 6, rslora: true", 3.0), ("alpha: 2", 0.25)],
)
def test_the_scale_is_alpha_by_the_rank_or_its_root(settings: str, scale: float, tmp_path: Path) -> None:
    run = small_run(tmp_path, "weights=base", f"adapters={{targets: [ffn.down], {settings}}}")
    (_, module), _ = low_ranks(Trainer(run, Memory()).model)
    assert module.scale == scale


def test_the_product_is_zero_at_first_and_a_is_drawn_from_the_seed(tmp_path: Path) -> None:
    models = [Trainer(adapted(tmp_path, f"seed={seed}"), Memory()).model for seed in (4, 4, 5)]
    first, again, other = map(matrices, models)
    bound = math.sqrt(1 / 16)  # as in PEFT: uniform in 1 / sqrt(columns)
    for path, (a, b) in first.items():
        assert not b.any()
        assert bound / 2 < a.abs().max() <= bound
        assert torch.equal(a, again[path][0])
        assert not torch.equal(a, other[path][0])
    assert len({a.flatten()[0].item() for a, _ in first.values()}) == len(first)


def test_dropout_acts_on_the_input_of_an_adapter_in_training_only(tmp_path: Path) -> None:
    model = Trainer(adapted(tmp_path, "adapters.dropout=0.4"), Memory()).model
    fill(model)
    layer = model.get_submodule("decoder.layers.0.ffn.up")
    adapter = layer.get_submodule("lora")
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(7)
    y = layer.train()(x)
    torch.manual_seed(7)
    dropped = F.dropout(x, 0.4)
    plain = F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(y, plain + SCALE * dropped @ adapter.a.T @ adapter.b.T)
    torch.testing.assert_close(layer.eval()(x), plain + SCALE * x @ adapter.a.T @ adapter.b.T)


# ---- training ----


def test_only_the_adapters_are_trained_and_saved(tmp_path: Path) -> None:
    run = adapted(tmp_path, "optimizer.weight_decay=0.3")
    first = matrices(Trainer(run, Memory()).model)
    memory, weights = trained(run)
    assert same(weights, tfkit.build("base").state_dict())
    saved = memory.saved
    assert saved
    names = {f"{name}.lora_{letter}.weight" for name in NAMES for letter in "AB"}
    assert {name.removeprefix("base_model.model.") for name in saved.weights} == names
    assert {name.split("/")[0] for name in saved.optimizer} == {f"{path}.{letter}" for path in first for letter in "ab"}
    assert all(tensor.any() for tensor in saved.weights.values())
    assert memory.lines[1]["adapters"].startswith("801 of 6,337 parameters, rank 3: decoder.layers.0-1.attention")


PARTS = ("attention.project.q", "attention.project.v", "ffn.up")
NAMES = [*(f"decoder.layers.{i}.{name}" for i in (0, 1) for name in PARTS), "head.output"]


def test_gradients_are_the_gradients_of_the_merged_weights(tmp_path: Path) -> None:
    """dL/dA = scale B^T G and dL/dB = scale G A^T, with the gradient G of the full weight."""
    trainer = Trainer(adapted(tmp_path), Memory())
    fill(trainer.model)
    pairs = matrices(trainer.model)
    batch = trainer.batch(1)
    trainer._gradients(batch, 1)
    plain = Trainer(small_run(tmp_path, "weights=base"), Memory())
    plain.model.load_state_dict(merged(trainer.model.state_dict(), pairs))
    plain._gradients(batch, 1)
    for path, module in low_ranks(trainer.model):
        layer = path.rpartition(".")[0]
        gradient = plain.model.get_parameter(f"{layer}.weight").grad
        assert gradient is not None
        start = {"lora_v": 32}.get(path.rpartition(".")[2], 0)
        rows = gradient[start : start + len(module.b)]
        torch.testing.assert_close(module.a.grad, SCALE * module.b.T @ rows, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(module.b.grad, SCALE * rows @ module.a.T, atol=1e-6, rtol=1e-4)
    assert not [name for name, p in trainer.model.named_parameters() if ".lora" not in name and p.grad is not None]


def test_a_run_continues_with_the_same_bits(tmp_path: Path) -> None:
    sets = ["adapters.dropout=0.2", "model.dropout=0.1", "data.order=sampled"]
    uninterrupted, _ = trained(adapted(tmp_path, *sets))
    part, _ = trained(adapted(tmp_path, *sets), until=3)
    rest, _ = trained(adapted(tmp_path, *sets), Memory(part.saved))
    assert part.lines + rest.lines == uninterrupted.lines
    assert uninterrupted.saved
    assert rest.saved
    assert same(uninterrupted.saved.weights, rest.saved.weights)
    assert same(uninterrupted.saved.optimizer, rest.saved.optimizer)


def test_micro_batches_change_results_by_rounding_only(tmp_path: Path) -> None:
    losses = [
        [line["loss"] for line in trained(adapted(tmp_path, *sets))[0].lines if "loss" in line]
        for sets in ([], ["machine.micro_batch=2"], ["machine.recompute=selective"])
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert losses[2] == pytest.approx(losses[0], abs=1e-6)


def test_groups_and_muon_take_the_matrices_of_adapters(tmp_path: Path) -> None:
    run = adapted(tmp_path, "optimizer.groups=[{match: '*.lora_q.b', lr: 0.5}]")
    rates = {group["lr"]: len(group["params"]) for group in Trainer(run, Memory()).optimizer.param_groups}
    assert rates == {0.5: 2, 1e-2: 12}
    muon = "optimizer={kind: muon, lr: 0.02, others: {kind: adamw, lr: 0.01}}"
    groups = Trainer(adapted(tmp_path, muon), Memory()).optimizer.param_groups
    assert {group["lr"]: len(group["params"]) for group in groups} == {
        0.02: 12,
        0.01: 2,
    }  # the head is no hidden matrix


# ---- folders ----


def train(*sets: str, output: str = "out") -> tfkit.Trained:
    return tfkit.train("small.yaml", output=output, sets=[*SETS, *sets], quiet=True)


EVAL = ("eval={every: 4, splits: {val: {batches: all}}}", "data.split={train: 0.8, val: 0.2}", "checkpoint.every=3")


def test_a_run_folder_stands_for_the_merged_model(tmp_path: Path, base: Path) -> None:
    done = train(*EVAL, "callbacks=[{kind: ema, decay: 0.5}]")
    step = tmp_path / "out" / "step-8"
    assert not (step / "model.safetensors").exists()
    tensors = load_file(step / "adapter_model.safetensors")
    stem = "base_model.model."
    pairs = {name: (tensors[f"{stem}{name}.lora_A.weight"], tensors[f"{stem}{name}.lora_B.weight"]) for name in NAMES}
    settings = json.loads((step / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (3, 5, str(base))
    assert settings["target_modules"] == NAMES
    layers = {
        name.replace("project.q", "project.qkv.lora_q").replace("project.v", "project.qkv.lora_v"): pair
        for name, pair in pairs.items()
    }
    paths = {name if "lora_" in name else f"{name}.lora": pair for name, pair in layers.items()}
    expected = merged(tfkit.build("base").state_dict(), paths)
    model = tfkit.build("out")
    assert all(torch.allclose(tensor, expected[name], atol=1e-6) for name, tensor in model.state_dict().items())
    last = [value for _, value in done.history.curves["val.loss"]][-1]
    assert tfkit.evaluate("out")["val.loss"] == pytest.approx(last, abs=1e-6)
    averages = [value for _, value in done.history.curves["ema.val.loss"]][-1]
    assert tfkit.evaluate("out", weights="out/ema")["val.loss"] == pytest.approx(averages, abs=1e-6)
    assert abs(last - averages) > 1e-4


def test_a_folder_continues_and_needs_the_weights_that_it_changes(tmp_path: Path, base: Path) -> None:
    train(*EVAL, output="whole")
    tfkit.train("small.yaml", output="part", sets=[*SETS, *EVAL], stop_after=4, quiet=True)
    tfkit.train("part", output="part", quiet=True)
    for name in ("step-8/adapter_model.safetensors", "step-8/optimizer.safetensors", "metrics.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "part" / name).read_bytes()

    tfkit.train("small.yaml", output="other", sets=[*SETS, *EVAL], stop_after=4, quiet=True)
    save(build(small_run(tmp_path).graph, seed=9), base, force=True)
    with pytest.raises(SpecError, match="has a different run") as of_train:
        tfkit.train("other", output="other", quiet=True)
    with pytest.raises(SpecError, match="are not the tensors that the run wrote") as of_eval:
        tfkit.evaluate("other")
    with pytest.warns(tfkit.ChangedWeightsWarning):
        tfkit.build("whole")
    assert help_of(of_train) == f"{HELP}, or name a new folder with -o"
    assert help_of(of_eval).startswith(f"{HELP}, or accept the weights with --allow-change")
    shutil.rmtree(base)
    with pytest.raises(SpecError, match=r"cannot read .*base") as of_train:
        tfkit.train("other", output="other", quiet=True)
    with pytest.raises(SpecError, match=r"changes the model .*, and there is no such folder") as of_eval:
        tfkit.evaluate("other")
    assert help_of(of_train) == help_of(of_eval) == HELP


HELP = (
    "restore the model that the adapter changes, or write its folder as `base_model_name_or_path` to "
    "`other/step-4/adapter_config.json`, and as `weights` to `other/run.yaml`"
)


def help_of(error: pytest.ExceptionInfo[SpecError]) -> str:
    (diagnostic,) = error.value.diagnostics
    assert diagnostic.help is not None
    return diagnostic.help


def test_each_half_of_a_move_has_the_help_for_the_other_half(tmp_path: Path, base: Path) -> None:
    tfkit.train("small.yaml", output="other", sets=[*SETS, *EVAL], stop_after=4, quiet=True)
    shutil.copytree(base, tmp_path / "moved")
    save(build(small_run(tmp_path).graph, seed=9), base, force=True)
    run, adapter = tmp_path / "other" / "run.yaml", tmp_path / "other" / "step-4" / "adapter_config.json"
    before = run.read_text()
    run.write_text(before.replace(str(base), str(tmp_path / "moved")))
    with pytest.raises(SpecError, match="must change the `weights` of the run; got a different model") as error:
        tfkit.train("other", output="other", quiet=True)
    assert help_of(error) == HELP
    shutil.rmtree(base)
    with pytest.raises(SpecError, match=r"cannot resume from .*, and there is no such folder") as error:
        tfkit.train("other", output="other", quiet=True)
    assert help_of(error) == HELP
    adapter.write_text(adapter.read_text().replace(str(base), str(tmp_path / "moved")))
    run.write_text(before)
    with pytest.raises(SpecError, match=r"cannot read .*base") as error:
        tfkit.train("other", output="other", quiet=True)
    assert help_of(error) == HELP


def test_params_counts_the_adapters_of_a_run_by_component(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Trainer(adapted(tmp_path), Memory()).model
    by_hand = {"attention": 4 * 2 * 3 * 16, "ffn": 2 * 3 * (16 + 32), "head": 3 * (16 + 27)}
    path = tmp_path / "adapted.yaml"
    path.write_text(f"extends: small.yaml\nweights: base\n{ADAPTERS.replace('=', ': ', 1)}\n")
    assert main(["params", "adapted.yaml", "--json", "--no-plugins"]) == 0
    ((count,)) = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["trainable"] for row in count["rows"] if row["trainable"]} == by_hand
    assert count["trainable"] == sum(parameter.numel() for pair in matrices(model).values() for parameter in pair)
    assert count["total"] - count["trainable"] == sum(p.numel() for p in tfkit.build("base").parameters())
    assert main(["params", "adapted.yaml", "--no-plugins"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"^component +parameters +share +trained +frozen$", table, re.MULTILINE)
    assert re.search(r"^attention .* 384 +[\d,]+$", table, re.MULTILINE)
    tfkit.train("adapted.yaml", output="out", stop_after=2, quiet=True)
    assert main(["params", "out", "--no-plugins"]) == 0
    assert capsys.readouterr().out == table
    assert main(["params", "adapted.yaml", "--by", "layer", "--set", "adapters.rank=1", "--no-plugins"]) == 0
    assert re.search(r"^head .* 43 +[\d,]+$", capsys.readouterr().out, re.MULTILINE)
    assert main(["params", "small.yaml", "--no-plugins"]) == 0
    assert "non-embedding" in capsys.readouterr().out


def test_a_checkpoint_of_another_scale_is_found_and_its_base_may_move(tmp_path: Path, base: Path) -> None:
    tfkit.train("small.yaml", output="out", sets=SETS, stop_after=4, quiet=True)
    path = tmp_path / "out" / "step-4" / "adapter_config.json"
    text = path.read_text()
    path.write_text(text.replace('"lora_alpha": 5', '"lora_alpha": 6'))
    with pytest.raises(SpecError, match="were changed after the checkpoint was written"):
        tfkit.train("out", output="out", quiet=True)
    base.rename(tmp_path / "moved")
    for file, content in ((path, text), (tmp_path / "out" / "run.yaml", (tmp_path / "out" / "run.yaml").read_text())):
        file.write_text(content.replace(str(base), str(tmp_path / "moved")))
    assert tfkit.train("out", output="out", quiet=True).ended == "finished"


def test_a_run_starts_from_an_adapter_or_from_the_merged_weights(tmp_path: Path) -> None:
    train(output="first")
    start = "adapters={targets: [q, v, ffn.up, head], rank: 3, alpha: 2, start: first}"
    trainer = Trainer(load_run("small.yaml", PLUGINS, sets=["weights=base", start]), Memory())
    tokens = torch.randint(0, 20, (3, 9), generator=torch.Generator().manual_seed(1))
    first = tfkit.build("first").eval()(tokens)
    torch.testing.assert_close(trainer.model.eval()(tokens), first, atol=1e-6, rtol=1e-5)  # although alpha differs
    assert trainer.notes["start"] == "7 matrices from first"
    on_top = Trainer(load_run("small.yaml", PLUGINS, sets=["weights=first", ADAPTERS]), Memory())
    torch.testing.assert_close(on_top.model.eval()(tokens), first, atol=1e-6, rtol=1e-5)
    assert not any(b.any() for _, b in matrices(on_top.model).values())
    runs = [adapted(tmp_path, *sets) for sets in ([], ["adapters.dropout=0.1"], ["adapters.rslora=true"])]
    assert len({run.digest for run in (*runs, trainer.run, on_top.run)}) == 5


def test_a_loop_over_the_data_of_a_run_has_its_adapters(tmp_path: Path) -> None:
    data = tfkit.data("small.yaml", sets=SETS)
    model = data.build_model()
    assert len(matrices(model)) == 7
    optimizer = data.build_optimizer(model)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 14
    with pytest.raises(SpecError, match="AdaptedLinear, and Linear by the spec"):
        save(model, "lost")


# ---- the plan, and errors ----


def test_the_plan_has_the_memory_of_adapters(tmp_path: Path) -> None:
    plan, full = run_plan(adapted(tmp_path)), run_plan(small_run(tmp_path, "weights=base"))
    model = Trainer(adapted(tmp_path), Memory()).model
    assert plan.trained == sum(len(a) * a.size(1) + len(b) * b.size(1) for a, b in matrices(model).values())
    assert plan.parameters == full.parameters + plan.trained
    assert full.trained is None
    assert full.memory - plan.memory > 2 * 4 * (full.parameters - 2 * plan.trained)  # states of AdamW
    assert plan.flops < full.flops


ERRORS = {
    "unknown": "{targets: [qkvv]}",
    "table": "{targets: [embedding.tokens]}",
    "norm": "{targets: [final_norm]}",
    "none": "{targets: []}",
    "fused_and_part": "{targets: [qkv, k]}",
    "rank": "{targets: [qkv], rank: 17}",
    "alpha": "{targets: [qkv], alpha: 0}",
    "rslora": "{targets: [qkv], rslora: true}",
    "start": "{targets: [qkv], start: base}",
    "start_rank": "{targets: [q, v, ffn.up, head], rank: 2, start: first}",
    "start_targets": "{targets: [q, ffn.up, head], rank: 3, start: first}",
}
FURTHER = {
    "no_weights": ["weights=null"],
    "map": ["weights={path: base, missing: ['head.*']}"],
    "tied": ["model.head={block: lm_head, tie: embedding}"],
    "freeze": ["freeze=['embedding.*']"],
    "flops": ["steps=null", "flops=1e9"],
    "float8": ["machine.float8=tensorwise", "precision=bfloat16"],
}


@pytest.mark.parametrize("name", [*ERRORS, *FURTHER])
def test_errors_of_adapters(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Any) -> None:
    if "first" in ERRORS.get(name, ""):
        train(output="first")
    sets = ["weights=base", f"adapters={ERRORS[name]}"] if name in ERRORS else [*SETS, *FURTHER[name]]
    capsys.readouterr()
    assert main(["train", "small.yaml", "--plan", "--no-plugins", *options(*sets)]) == 1
    golden(f"runs/adapters/{name}", capsys.readouterr().err.replace(str(tmp_path), "..."))


def test_targets_have_the_names_of_the_model_or_of_the_published_model() -> None:
    plugins = tfkit.load_plugins(entry_points=False)
    models = {
        spec: build(reduced_model(tfkit.load(spec, plugins=plugins), plugins).graph, device="meta")
        for spec in ("llama3_8b", "bert_base", "modernbert_base")
    }
    matrices = {spec: Matrices.of(model) for spec, model in models.items()}

    def chosen(spec: str, *targets: str) -> set[str]:
        """The layers and parts in the second layer of a stack."""
        config = AdaptersConfig.model_validate({"targets": targets, "rank": 2})
        names = (matrix.name for matrix in chosen_matrices(matrices[spec], config, models[spec]))
        return {name.partition(".layers.1.")[2] for name in names} - {""}

    assert chosen("llama3_8b", "q_proj", "down_proj") == {"attention.project.q", "ffn.down"}
    parts = {f"attention.project.{part}" for part in "qkv"}
    assert chosen("llama3_8b", "self_attn") == {*parts, "attention.output"}
    assert chosen("llama3_8b", "attention") == {"attention.project.qkv", "attention.output"}
    assert chosen("llama3_8b", "layers.*.mlp.*") == {"ffn.gate", "ffn.up", "ffn.down"}
    assert chosen("modernbert_base", "Wqkv", "ffn") == {"attention.project.qkv", "ffn.gate_up", "ffn.down"}
    assert chosen("bert_base", "query", "attention.output.dense") == {"attention.project.q", "attention.output"}
    assert chosen("bert_base", "*.dense") == set()  # the head's
    with pytest.raises(Invalid, match="got a name of different layers in both") as caught:
        chosen("bert_base", "dense")
    assert caught.value.notes == ("published: bert.encoder.layer.0.attention.output.dense",)


@pytest.mark.parametrize(("target", "module"), [("router", "Router"), ("ffn.experts.down", "ExpertLinear")])
def test_experts_and_their_router_are_no_linear_layers(target: str, module: str, tmp_path: Path) -> None:
    plugins = tfkit.load_plugins(plugin_dirs=[Path(__file__).parents[3] / "plugins" / "tfkit-moe"], entry_points=False)
    experts = "model.decoder.ffn={kind: moe, n_experts: 3, n_experts_per_token: 2, d_ff: 24}"
    run = load_run("small.yaml", plugins, sets=[*SETS, experts, f"adapters.targets=[q, {target}]"])
    with pytest.raises(SpecError, match=f"`{target}` must match linear layers; got {module}"):
        Trainer(run, Memory())


def test_a_branch_cannot_leave_a_run_with_adapters(tmp_path: Path) -> None:
    train(output="first")
    with pytest.raises(SpecError, match="`branch` must be a run without adapters"):
        _ = load_run("small.yaml", PLUGINS, sets=["branch=first", "steps=12"]).branch


@pytest.mark.slow
def test_two_processes_train_and_write_what_one_does(tmp_path: Path) -> None:
    sets = options(*SETS, *EVAL, "batch.sequences=8", "clip=0.5", "callbacks=[{kind: ema, decay: 0.7}]")
    assert main(["train", "small.yaml", "--no-plugins", "-o", "one", *sets]) == 0
    forked(tmp_path, 2, "small.yaml", "-o", "two", "--stop-after", "5", *sets)
    forked(tmp_path, 2, "small.yaml", "-o", "two", *sets)
    for first, other in zip(numbers(tmp_path / "two"), numbers(tmp_path / "one"), strict=True):
        assert first == pytest.approx(other, abs=1e-5), first["step"]
    for name in ("step-8", "ema"):
        ours, theirs = (load_file(tmp_path / run / name / "adapter_model.safetensors") for run in ("two", "one"))
        assert ours.keys() == theirs.keys()
        for path, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[path], atol=2e-4, rtol=0)

    on_top = options("weights=one", ADAPTERS, "batch.sequences=8", "steps=2")  # the weights of an adapter
    assert main(["train", "small.yaml", "--no-plugins", "-o", "three", *on_top]) == 0
    forked(tmp_path, 2, "small.yaml", "-o", "four", *on_top)
    for first, other in zip(numbers(tmp_path / "three"), numbers(tmp_path / "four"), strict=True):
        assert first == pytest.approx(other, abs=1e-5)


@pytest.mark.slow
def test_a_run_with_adapters_passes_all_checks(capsys: pytest.CaptureFixture[str]) -> None:
    sets = options(*SETS, "adapters.dropout=0.2", "adapters.rank=13")
    assert main(["check", "small.yaml", "--no-plugins", *sets]) == 0
    assert "FAILED" not in capsys.readouterr().out
