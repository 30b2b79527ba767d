"""The plan of several processes, against `fully_shard` in a group whose other processes do not exist."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import tfkit
from tests.run.training.runs import PLUGINS, small_run
from tfkit.cli import main
from tfkit.nn.spread import rows_of
from tfkit.run.checked_run import Run, load_run
from tfkit.run.training.layers import layers_of
from tfkit.tools.train.per_process import fitting, per_process

BIG = """\
tfkit: 1
name: big
model: {{extends: {model}}}
data: {{kind: tokens, files: tokens.npy, split: {{train: 1.0}}}}
batch: {{sequences: {processes}, length: 512}}
steps: 10
optimizer: {{kind: adamw, lr: 1e-4}}
"""


def big_run(folder: Path, model: str, processes: int) -> Run:
    np.save(folder / "tokens.npy", np.arange(600 * processes) % 1000)
    (folder / "big.yaml").write_text(BIG.format(model=model, processes=processes))
    return load_run(folder / "big.yaml", PLUGINS)


def measured(run: Run, processes: int) -> tuple[int, int]:
    """The bytes of this process's weights, and of all weights of the root group and of a layer."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        model = tfkit.build(run.graph, device="meta")
        mesh = init_device_mesh("cpu", (processes,))
        layers = [layer for _, layer in layers_of(model, once=True)]
        inside = {parameter for layer in layers for parameter in layer.parameters()}
        root = sum(parameter.nbytes for parameter in model.parameters() if parameter not in inside)
        layer = max(sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers)
        for module in (*layers, model):
            fully_shard(module, mesh=mesh)
        return sum(rows_of(parameter)[0].nbytes for parameter in model.parameters()), 2 * root + 3 * layer
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "processes"), [("llama3_8b", 8), ("llama3_70b", 64), ("llama3_405b", 512)])
def test_parts_have_the_sizes_that_torch_gives_them(model: str, processes: int, tmp_path: Path) -> None:
    run = big_run(tmp_path, model, processes)
    needs, (weights, gathered) = per_process(run, processes, "adamw"), measured(run, processes)
    assert needs.weights == needs.gradients == pytest.approx(weights, rel=0.01)
    assert needs.states == pytest.approx(2 * weights, rel=0.01)
    assert needs.gathered == pytest.approx(gathered, rel=0.01)


def test_machine_keys_lower_their_parts(tmp_path: Path) -> None:
    sets = ("batch.sequences=8", "precision=bfloat16", "model.decoder.n_layers=4")
    plain, gather, again, second, copies = (
        per_process(small_run(tmp_path, *sets, *more), 4, "adamw")
        for more in (
            [],
            ["machine.gather=bfloat16"],
            ["machine.recompute=full"],
            ["machine.recompute=2"],
            ["machine.shard=2"],
        )
    )
    assert gather.gathered < plain.gathered
    assert gather.sent < plain.sent
    assert gather.casts == again.casts == 0 < plain.casts
    assert again.activations < second.activations < plain.activations
    assert copies.weights == pytest.approx(2 * plain.weights, abs=1)


def test_an_evaluation_needs_no_activations_of_other_layers(tmp_path: Path) -> None:
    sets = ("batch.sequences=8", "model.decoder.n_layers=4")
    assert per_process(small_run(tmp_path, *sets), 4, "adamw").evaluation == 0
    needs = per_process(small_run(tmp_path, *sets, "eval={every: 4, splits: {train: {batches: 2}}}"), 4, "adamw")
    shared = needs.weights + needs.gradients + needs.states + needs.gathered + needs.logits
    assert shared < needs.evaluation + needs.gathered // 2 + needs.logits // 2 < shared + needs.activations // 2


def test_the_cheapest_change_that_fits_is_named(tmp_path: Path) -> None:
    run = small_run(tmp_path, "batch.sequences=8", "precision=bfloat16", "model.decoder.n_layers=4")

    def total(**values: object) -> int:
        return per_process(run, 4, "adamw", run.config.machine.model_copy(update=values)).total

    limits = {
        "gather: bfloat16": total(gather="bfloat16"),
        "gather: bfloat16, micro_batch: 1": total(gather="bfloat16", micro_batch=1),
        "gather: bfloat16, recompute: full": total(gather="bfloat16", recompute="full"),
    }
    assert [*limits.values()] == sorted(limits.values(), reverse=True)
    assert total(recompute="full") > limits["gather: bfloat16, micro_batch: 1"]
    for text, limit in limits.items():
        assert fitting(run, 4, "adamw", limit) == f"machine: {{{text}}}"
    assert fitting(run, 4, "adamw", 10) is None


def test_a_plan_names_what_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run(tmp_path)
    limits = "{title: Small, flops: {float32: 1e12}, bandwidth: 1e9, memory: 1.6e5}"
    (tmp_path / "small_device.yaml").write_text(limits)
    words = ["train", str(tmp_path / "small.yaml"), "--no-plugins", "--plan", "--processes", "2"]
    sets = ["--set", "machine.shard=1", "--set", "batch.length=12"]
    assert main([*words, *sets, "--device", str(tmp_path / "small_device.yaml")]) == 0
    out = capsys.readouterr().out
    assert "each of 2 processes" in out
    assert out.splitlines()[-1].endswith("; the largest part is activations: machine: {micro_batch: 1}")
    assert main([*words, *sets, "--device", "h100"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "each process fits h100"
    assert main(["train", str(tmp_path / "small.yaml"), "--no-plugins", "--processes", "2"]) == 2
    capsys.readouterr()
    assert main([*words, "--device", "nope"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: invalid value for --device: there are no figures for `nope`; known: "
    )
