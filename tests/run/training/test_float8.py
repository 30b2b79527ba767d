"""Training steps in float8: against models that torchao converts, and everything else as in a run without it."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import tfkit
from tfkit.cli import main
from tfkit.errors import Diagnostic, SpecError
from tfkit.run.training.layers import matrices_in_float8, use_float8
from tfkit.run.training.parallel import Together

from .launches import forked, options
from .runs import same, small_run, trained, write_run

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SETS = ("precision=bfloat16", "machine.float8=tensorwise")
MOE = Path(__file__).parents[3] / "plugins" / "tfkit-moe"


def run_of(recipe: str) -> Any:
    machine = SimpleNamespace(float8=recipe)
    return SimpleNamespace(
        config=SimpleNamespace(machine=machine),
        error=lambda text, *path, help: SpecError(Diagnostic(text, path=".".join(path), help=help)),
    )


def test_float8_is_part_of_the_meaning_and_the_rest_of_the_machine_is_not(tmp_path: Path) -> None:
    plain, float8, again = (
        small_run(tmp_path, *sets)
        for sets in (SETS[:1], SETS, (*SETS, "machine.recompute=full", "machine.threads=2", "machine.device=cuda"))
    )
    assert plain.digest != float8.digest == again.digest
    assert float8.semantics.differences(plain.semantics.values) == ["machine.float8"]
    assert plain.semantics.differences(float8.semantics.values) == ["machine.float8"]
    assert not any(path.startswith("machine") for path in plain.semantics.values)


def test_float8_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="`float8` must be combined with `precision: bfloat16`; got float32"):
        small_run(tmp_path, SETS[1])
    with pytest.raises(SpecError, match="`float8` has no effect: the model has no layers"):
        small_run(tmp_path, *SETS, "model.graph={embedding: embedding, head: lm_head}")
    model = tfkit.build(small_run(tmp_path).graph, device="meta")
    for capability, valid in (((8, 6), False), ((8, 9), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        monkeypatch.setitem(sys.modules, "torchao.float8", None)
        cause = "`float8` needs the package torchao" if valid else "compute capability 8.9 or higher; got `cuda`"
        with pytest.raises(SpecError, match=cause) as caught:
            use_float8(model, run_of("rowwise"), CUDA)
        assert caught.value.diagnostics[0].path == "machine.float8"
    narrow = tfkit.build(small_run(tmp_path, "model.d_model=24").graph, device="meta")
    with pytest.raises(SpecError, match="`float8` has no effect: no matrix of a layer"):
        matrices_in_float8(narrow, run_of("rowwise"))


def test_matrices_of_layers_without_routers_and_experts() -> None:
    plugins = tfkit.load_plugins(plugin_dirs=[MOE], entry_points=False)
    graph = tfkit.load("mixtral_8x7b", sets=["decoder.n_layers=1", "decoder.ffn.n_experts=16"], plugins=plugins)
    model = tfkit.build(graph, device="meta")
    matrices, text = matrices_in_float8(model, run_of("rowwise"))
    names = {name for name, module in model.named_modules() if module in matrices}
    assert names == {"decoder.layers.0.attention.project.qkv", "decoder.layers.0.attention.output"}
    assert text == "rowwise, 2 of 5 matrices of layers"


def test_the_plan_reports_the_matrices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path)
    assert main(["train", str(path), "--no-plugins", "--plan", *options(*SETS, "model.decoder.ffn.d_ff=40")]) == 0
    assert "tensorwise, 4 of 8 matrices of layers" in capsys.readouterr().out


# ---- with torchao ----

SIZES = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
RECIPES = ("tensorwise", "rowwise")
torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="pip install -e '.[float8]'")


def gradients(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of random tokens in bfloat16, and the gradients by name."""
    tokens = torch.randint(1, 61, (5, 17), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(tokens[:, :-1])
    logits = output if isinstance(output, torch.Tensor) else output.logits
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    model.zero_grad()
    loss.backward()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def deviation(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def in_both(folder: Path, kind: str, recipe: str) -> tuple[Any, Any, Any]:
    """The losses and gradients of tfkit without float8, with it, and of the class of transformers with it."""
    import transformers

    float8 = importlib.import_module("torchao.float8")

    torch.manual_seed(0)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SIZES)).train()
    for parameter in theirs.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(folder)
    model = tfkit.build(tfkit.import_config(folder).graph, weights=folder)
    plain = gradients(model)
    use_float8(model, run_of(recipe), CPU)
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    float8.convert_to_float8_training(theirs, module_filter_fn=lambda _, name: name != "lm_head", config=config)
    for module in theirs.modules():
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:  # as torchao does under autocast for CUDA
            module.register_forward_pre_hook(lambda _, inputs: inputs[0].to(torch.bfloat16))
    return plain, gradients(model), gradients(theirs)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


NAMES = {
    "embedding.tokens.weight": "model.embed_tokens.weight",
    "decoder.layers.0.attention.output.weight": "model.layers.0.self_attn.o_proj.weight",
    "decoder.layers.1.ffn.down.weight": "model.layers.1.mlp.down_proj.weight",
}


@pytest.mark.slow
@torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_phi3_is_the_class_of_transformers_that_torchao_converts(recipe: str, tmp_path: Path) -> None:
    """Both have fused matrices, and therefore the same scales."""
    plain, actual, expected = in_both(tmp_path, "Phi3", recipe)
    assert actual[0] == pytest.approx(expected[0], abs=1e-5)
    assert abs(actual[0] - plain[0]) > 1e-4
    for name, reference in NAMES.items():
        assert deviation(actual[1][name], expected[1][reference]) < 0.01
        assert deviation(actual[1][name], plain[1][name]) > 0.05


@pytest.mark.slow
@torchao
def test_llama_with_scales_by_rows_has_the_loss_of_separate_matrices(tmp_path: Path) -> None:
    """Only in the backward do fused matrices have other scales."""
    plain, actual, expected = in_both(tmp_path, "Llama", "rowwise")
    assert actual[0] == pytest.approx(expected[0], abs=1e-5)
    assert abs(actual[0] - plain[0]) > 1e-4
    for name, reference in NAMES.items():
        float8 = deviation(actual[1][name], plain[1][name])
        assert deviation(actual[1][name], expected[1][reference]) < float8 / 2


@pytest.mark.slow
@torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_that_run_again_and_shards_keep_all_bits(recipe: str, tmp_path: Path) -> None:
    sets = (
        "precision=bfloat16",
        f"machine.float8={recipe}",
        "model.dropout=0.1",
        "eval={every: 4, splits: {val: all}}",
    )
    once, weights = trained(small_run(tmp_path, *sets))
    assert once.lines[0]["float8"] == f"{recipe}, 8 of 8 matrices of layers, emulated"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for more in ("full", "selective"):
            again = small_run(tmp_path, *sets, f"machine.recompute={more}")
            copies, shards = trained(again), trained(again, processes=Together())
            assert once.lines == copies[0].lines == shards[0].lines
            assert same(weights, copies[1])
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@torchao
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_equal_layers_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter, compile = CompileCounterWithBackend("aot_eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile(function, backend=counter))
    sets = [*SETS, "model.decoder.n_layers=4"]
    compiled = trained(small_run(tmp_path, *sets, "machine.compile=layers"))
    assert counter.frame_count == 1
    assert compiled[0].losses == pytest.approx(trained(small_run(tmp_path, *sets))[0].losses, abs=1e-6)


@pytest.mark.slow
@torchao
def test_only_steps_are_in_float8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Float8 changes no file, name or type of a run, and no evaluation. An interruption changes no bit."""
    path, evaluated = str(write_run(tmp_path)), "eval={every: 4, splits: {val: all}}"
    for name, sets in {"plain": SETS[:1], "once": SETS, "twice": SETS}.items():
        command = ["train", path, "--no-plugins", "-o", str(tmp_path / name), *options(*sets, evaluated)]
        assert main([*command, *(["--stop-after", "3"] if name == "twice" else [])]) == 0
        assert main(command) == 0
    files = {name: sorted(file.name for file in (tmp_path / name / "step-8").iterdir()) for name in ("plain", "once")}
    assert files["plain"] == files["once"]
    for file in ("model.safetensors", "optimizer.safetensors"):
        plain, once, twice = (load_file(tmp_path / name / "step-8" / file) for name in ("plain", "once", "twice"))
        assert {k: (t.dtype, t.shape) for k, t in plain.items()} == {k: (t.dtype, t.shape) for k, t in once.items()}
        assert not same(plain, once)
        assert same(once, twice)
    bits = {name: json.loads((tmp_path / name / "run.json").read_text())["bits"] for name in ("plain", "once")}
    assert {**bits["plain"], "torchao": version("torchao")} == bits["once"]
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "once"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out).popitem()[1] == {"val.loss": lines_of(tmp_path / "once")[-1]["val.loss"]}


@pytest.mark.slow
@torchao
def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    path = str(write_run(tmp_path))
    sets = options("precision=bfloat16", "machine.float8=rowwise", "model.dropout=0", "machine.micro_batch=3")
    assert main(["train", path, "--no-plugins", "-o", str(tmp_path / "one"), *sets]) == 0
    forked(tmp_path, 2, "small.yaml", "-o", "two", *sets)
    alone, together = (
        [line["loss"] for line in lines_of(tmp_path / name) if "loss" in line] for name in ("one", "two")
    )
    assert together == pytest.approx(alone, abs=1e-3)
