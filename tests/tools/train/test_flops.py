"""A run whose length is given in FLOPs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import tfkit
from tests.run.training.runs import Live, Memory, small_run, write_run
from tfkit.cli import main
from tfkit.run.checked_run import load_run
from tfkit.run.training.loop import Trainer
from tfkit.tools.cost.of_run import flops_of_step
from tfkit.tools.train.plan import run_plan

from ...sampling import some

PLUGINS = tfkit.load_plugins(entry_points=False)
FLOPS = 1e9
SETS = (f"flops={FLOPS:g}",)


def test_whole_steps_of_what_cost_counts(tmp_path: Path) -> None:
    graph = small_run(tmp_path).graph
    total = tfkit.cost(graph, batch=6, length=12).total
    expected = math.ceil(FLOPS / (total.flops_forward + total.flops_backward))
    for machine in ("machine.micro_batch=1", "machine.threads=1"):
        run = load_run(tmp_path / "small.yaml", PLUGINS, sets=(*SETS, machine), count=flops_of_step)
        assert run.steps == expected > 1
        same = load_run(tmp_path / "small.yaml", PLUGINS, sets=(f"steps={expected}", machine))
        assert same.digest == run.digest  # the same steps, however they are said


def test_the_plan_has_at_least_these_flops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = [word for change in SETS for word in ("--set", change)]
    assert main(["train", "small.yaml", "--plan", "--json", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert FLOPS <= report["flops"] < FLOPS * (1 + 1 / (report["steps"] - 1))


def test_the_plan_counts_the_examples_that_evaluations_read(tmp_path: Path) -> None:
    run = small_run(tmp_path, "eval={every: 3, splits: {val: all, train: {batches: 2}}}")
    trainer, rows = Trainer(run, Memory()), []
    embedding = trainer.model.get_submodule("embedding")
    embedding.register_forward_hook(lambda module, args, out: None if module.training else rows.append(len(out)))
    trainer.train()
    flops_per_example = tfkit.cost(run.graph, batch=6, length=12).total.flops_forward / 6
    assert run_plan(run).flops_of_evaluations == round(sum(rows) * flops_per_example) > 0
    assert run_plan(small_run(tmp_path)).flops_of_evaluations == 0


def test_a_folder_in_flops_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "small.yaml", "-o", "out", "--set", "flops=1e7"]) == 0
    assert main(["eval", "out"]) == 0
    assert "val.loss" in capsys.readouterr().out


@pytest.mark.parametrize(("size", "above"), some([(24, 0.01), (48, 0.01), (1, 0.15)], 1))
def test_the_memory_of_a_plan_is_that_of_a_step(size: int, above: float, tmp_path: Path) -> None:
    sets = ("model.d_model=64", "batch={sequences: 48, length: 12}", f"machine.micro_batch={size}")
    run = small_run(tmp_path, *sets)
    trainer = Trainer(run, Memory())
    trainer._update()  # the optimizer has states
    trainer.optimizer.zero_grad()
    states = [tensor for state in trainer.optimizer.state.values() for tensor in state.values()]
    before = [*trainer.model.parameters(), *trainer.model.buffers(), *states]
    with Live(before) as step:
        trainer._update()
    measured = step.memory.peak + sum(tensor.nbytes for tensor in before)
    assert measured <= run_plan(run).memory * 1.01
    assert run_plan(run).memory <= measured * (1 + above)
