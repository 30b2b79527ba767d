"""Guarantees of a run: its batches, its gradients, its checkpoints, and the time of its plan."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.nn import functional as F

from tests.run.training.cpu import times_libraries
from tests.run.training.runs import Memory, same, small_run, trained, write_run
from tfkit.cli import main
from tfkit.run.contract import Batch
from tfkit.run.step_values import step_values
from tfkit.run.training.evaluate import batch_tensors
from tfkit.run.training.loop import Trainer
from tfkit.run.training.order import indices_of, indices_to_evaluate
from tfkit.run.training.parallel import Together
from tfkit.run.training.processes import Processes

from ...sampling import some

TIED = ("model.graph.head={block: lm_head, tie: embedding}", "model.dropout=0.2")
EVALUATED = "eval={every: 1, splits: {val: {batches: 3}, train: {batches: 3}}}"
PLAN = [sys.executable, "-m", "tfkit", "train", "minigpt_relu", "--plan", "--json"]


def digest(trainer: Trainer, steps: int) -> str:
    """The content of the first batches."""
    hasher = hashlib.sha256()
    for step in range(1, steps + 1):
        batch = trainer.batch(step)
        hasher.update(batch.inputs["tokens"].tobytes() + batch.targets.tobytes())
    return hasher.hexdigest()


@pytest.mark.parametrize("steps", [40, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("order", some(["sampled", "shuffled", "sequential"], 1))
def test_batches_are_the_same_however_a_run_is_made(order: str, steps: int, tmp_path: Path) -> None:
    sets = [f"data.order={order}", f"steps={steps}"]
    expected = digest(Trainer(small_run(tmp_path, *sets), Memory()), steps)
    for changed in ("machine.micro_batch=1", "machine.micro_batch=4", EVALUATED, "model.decoder.n_layers=1"):
        assert digest(Trainer(small_run(tmp_path, *sets, changed), Memory()), steps) == expected, changed
    part, _ = trained(small_run(tmp_path, *sets, EVALUATED), until=3)
    continued = Trainer(small_run(tmp_path, *sets, EVALUATED), Memory(part.saved), until=5)
    continued.train()
    assert digest(continued, steps) == expected
    if order != "sequential":
        assert digest(Trainer(small_run(tmp_path, *sets, "seed=4"), Memory()), steps) != expected


class Share(Processes):
    """A process of several, which never speaks to the others."""

    rows = Together.rows

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count


def read_by(trainers: Sequence[Trainer], steps: int) -> str:
    """The content of the first batches, as several processes read them together."""
    hasher = hashlib.sha256()
    for step in range(1, steps + 1):
        parts = [trainer.batch(step) for trainer in trainers]
        hasher.update(np.concatenate([part.inputs["tokens"] for part in parts]).tobytes())
        hasher.update(np.concatenate([part.targets for part in parts]).tobytes())
    return hasher.hexdigest()


@pytest.mark.parametrize("steps", [40, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("order", some(["sampled", "shuffled", "sequential"], 1))
def test_batches_are_the_same_for_any_number_of_processes(order: str, steps: int, tmp_path: Path) -> None:
    run = small_run(tmp_path, "batch.sequences=16", f"data.order={order}", f"steps={steps}")
    expected = digest(Trainer(run, Memory()), steps)
    for count in (1, 2, 4, 16):
        trainers = [Trainer(run, Memory(), processes=Share(rank, count)) for rank in range(count)]
        assert read_by(trainers, steps) == expected, count


@pytest.mark.parametrize("size", [1, 4, 5, 16])
def test_micro_batches_are_all_of_a_batch(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Batch] = []

    def spy(batch: Batch, *rest: Any) -> Any:
        calls.append(batch)
        return batch_tensors(batch, *rest)

    monkeypatch.setattr("tfkit.run.training.evaluate.batch_tensors", spy)
    trainer = Trainer(small_run(tmp_path, "batch.sequences=16", f"machine.micro_batch={size}"), Memory())
    for step in (1, 2):
        calls.clear()
        batch = trainer.batch(step)
        trainer._gradients(batch, step)
        assert [len(call.targets) for call in calls] == [min(size, 16 - start) for start in range(0, 16, size)]
        assert (np.concatenate([call.inputs["tokens"] for call in calls]) == batch.inputs["tokens"]).all()
        assert (np.concatenate([call.targets for call in calls]) == batch.targets).all()


def test_an_evaluation_draws_numbers_of_its_own() -> None:
    """No seed and no step of training has the examples of an evaluation."""
    read = [
        indices_to_evaluate(split, number, sequences=8, examples=10**9)
        for split in ("train", "val")
        for number in range(20)
    ]
    drawn = [
        indices_of("sampled", seed, step, step_values(8), examples=10**9) for seed in range(5) for step in range(60)
    ]
    assert len({array.tobytes() for array in [*read, *drawn]}) == len(read) + len(drawn)


@pytest.mark.parametrize("size", [1, 4, 6])
def test_the_gradient_is_that_of_the_sum_over_all_tokens(size: int, tmp_path: Path) -> None:
    """Ragged targets in micro-batches: by automatic differentiation of the entire batch at once."""
    ragged = "data.split={train: 0.007, val: 0.5}"
    trainer = Trainer(small_run(tmp_path, ragged, f"machine.micro_batch={size}"), Memory())
    batch = trainer.batch(1)
    assert len(set((batch.targets >= 0).sum(1))) > 1
    loss, _ = trainer._gradients(batch, 1)
    actual = {
        name: parameter.grad.clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.grad is not None
    }
    trainer.model.zero_grad()
    inputs, targets = batch_tensors(batch, trainer.model, trainer.device, trainer.config.loss)
    logits = trainer.model(**inputs)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / int((targets >= 0).sum())
    total.backward()
    assert loss.item() == pytest.approx(total.item(), abs=1e-6)
    for name, parameter in trainer.model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(actual[name], parameter.grad, atol=1e-6, rtol=1e-5)


def test_a_tied_table_is_one_weight_when_a_run_continues(tmp_path: Path) -> None:
    uninterrupted, weights = trained(small_run(tmp_path, *TIED))
    part, _ = trained(small_run(tmp_path, *TIED), until=3)
    rest, continued = trained(small_run(tmp_path, *TIED), Memory(part.saved))
    assert "embedding.tokens.weight" in weights
    assert "head.output.weight" not in weights
    assert part.losses + rest.losses == uninterrupted.losses
    assert same(weights, continued)


def test_a_checkpoint_has_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "small.yaml", "-o", "out"]) == 0
    files = sorted(path.name for path in Path("out/step-8").iterdir())
    assert files == ["chars.json", "model.safetensors", "optimizer.safetensors", "spec.yaml", "state.json"]
    for path in Path("out/step-8").glob("*.safetensors"):
        with safe_open(path, "numpy") as opened:
            assert all(np.isfinite(opened.get_tensor(name)).all() for name in opened.keys())  # noqa: SIM118
    assert set(json.loads(Path("out/step-8/state.json").read_text(encoding="utf-8"))) == {
        "format", "step", "meaning", "position", "ended", "skipped", "callbacks",
        "model", "optimizer", "metrics", "tensors", "digests", "digest",
    }  # fmt: skip


@pytest.mark.slow
def test_a_plan_takes_little_more_time_than_torch(tmp_path: Path) -> None:
    assert times_libraries(PLAN, tmp_path) <= 1.3
