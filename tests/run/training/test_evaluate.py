"""Evaluation: equal metrics for any micro-batch and number of processes, and no more memory than a training step."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit.errors import SpecError
from tfkit.learning import chunked_loss
from tfkit.run.checked_run import Run, load_run
from tfkit.run.contract import IGNORE_INDEX
from tfkit.run.training.evaluate import batch_tensors, evaluate_splits
from tfkit.run.training.loop import Trainer
from tfkit.run.training.memory import MicroBatch
from tfkit.run.training.processes import Processes
from tfkit.tools.eval_.evaluation import evaluate_run
from tfkit.tools.train.train import train_run

from ...plugin.test_faults import plugins as plugins_with
from .losses import CentredConfig
from .runs import Live, Memory, small_run, trained, write_run

METRICS = "[loss, bits_per_byte, accuracy, exact_match, constant_accuracy, constant_exact_match]"
TEXT = ("data.split={train: 0.9, val: 0.013}",)
ANSWERS = ("data={kind: copy, symbols: 20, items: 3, sequences: 70}", "batch={sequences: 6}")
DECODED = "[accuracy, exact_match, {kind: decoded_accuracy, temperature: 1}]"
CASES = {"text": (TEXT, METRICS), "answers": (ANSWERS, DECODED)}


def evaluated(tmp_path: Path, *sets: str, metrics: str = METRICS) -> Run:
    """A run whose split `val` has one example more than a batch."""
    run = small_run(tmp_path, *(sets or TEXT), f"eval={{every: 8, splits: {{val: all}}, metrics: {metrics}}}")
    assert len(run.data.examples("val", "sequential")) == 7
    return run


def numbers_of(run: Run, **options: Any) -> dict[str, float]:
    assert run.config.eval is not None
    return evaluate_splits(
        tfkit.build(run.graph, seed=1), run, run.config.eval.splits, run.config.eval.metrics, **options
    )


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 5 rows of logits, as for a large vocabulary."""
    monkeypatch.setattr(chunked_loss, "MIN_LOGITS", 1)
    monkeypatch.setattr(chunked_loss, "MAX_ROWS", 5)


@pytest.mark.parametrize(("size", "case"), [(1, "text"), (4, "text"), (4, "answers")])
def test_metrics_do_not_depend_on_the_micro_batch(size: int, case: str, tmp_path: Path) -> None:
    sets, metrics = CASES[case]
    together = numbers_of(evaluated(tmp_path, *sets, metrics=metrics))
    parts = numbers_of(evaluated(tmp_path, *sets, f"machine.micro_batch={size}", metrics=metrics))
    assert parts == pytest.approx(together, abs=1e-6)
    assert together["val.accuracy"] != together["val.exact_match"]


@pytest.mark.usefixtures("short_chunks")
def test_metrics_do_not_depend_on_chunks_of_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, rows = evaluated(tmp_path), []
    model = tfkit.build(run.graph, seed=1)
    model.get_submodule("head").register_forward_hook(lambda module, args, logits: rows.append(len(logits)))
    assert run.config.eval is not None
    results = evaluate_splits(model, run, run.config.eval.splits, run.config.eval.metrics)
    assert max(rows) == 5
    monkeypatch.undo()
    assert results == pytest.approx(numbers_of(run), abs=1e-6)


def test_a_single_position_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = evaluated(tmp_path)
    batch = run.data.examples("val", "sequential").batch(np.arange(1))
    targets = np.full_like(batch.targets, IGNORE_INDEX)
    targets[0, 0] = batch.targets[0, 0]
    monkeypatch.setattr("tfkit.run.training.evaluate.evaluation_batches", lambda *_: [replace(batch, targets=targets)])
    assert numbers_of(run)["val.loss"] > 0


# ---- memory ----


@pytest.mark.usefixtures("short_chunks")
def test_an_evaluation_needs_no_more_memory_than_a_step(tmp_path: Path) -> None:
    large = (
        "data={kind: copy, symbols: 500, items: 8, sequences: 70}",
        "model.embedding.position.max_len=17",
        "model.d_model=8",
        "batch={sequences: 6}",
        "machine.micro_batch=2",
    )
    run = evaluated(tmp_path, *large, metrics=f"[loss, {DECODED[1:]}")
    trainer = Trainer(run, Memory())
    with Live() as step:
        trainer._gradients(trainer.batch(1), 1)
    trainer.optimizer.zero_grad()
    with Live() as evaluation:
        trainer._evaluate()
    assert evaluation.memory.peak <= step.memory.peak


def out_of_memory(model: nn.Module, limit: int) -> None:
    """Let a forward of more than `most` sequences fail."""

    def check(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if len(args[0]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    model.get_submodule("embedding").register_forward_pre_hook(check)


def test_an_evaluation_that_runs_out_of_memory_takes_fewer_sequences(tmp_path: Path) -> None:
    memory, run = Memory(), evaluated(tmp_path, *TEXT, "machine.micro_batch=auto")
    trainer = Trainer(run, memory)
    out_of_memory(trainer.model, 2)
    trainer.train()
    assert [line for line in memory.lines if "micro_batch" in line] == [
        {"step": 0, "micro_batch": f"{size}, since more do not fit into memory"} for size in (3, 2)
    ]
    assert memory.lines[2:] == trained(evaluated(tmp_path, *TEXT, "machine.micro_batch=2"))[0].lines
    fixed = Trainer(evaluated(tmp_path), Memory())
    out_of_memory(fixed.model, 2)
    with pytest.raises(SpecError, match="an evaluation with 6 sequences does not fit into the memory of `cpu`"):
        fixed.train()


# ---- processes ----


class Part(Processes):
    """One of several processes, which run one after the other; the last one adds the sums of all."""

    def __init__(self, rank: int, count: int, sums: list[list[list[Any]]]) -> None:
        self.rank, self.count, self._sums, self._split = rank, count, sums, 0

    def total(self, sums: Sequence[Any]) -> list[Any]:
        if self.rank == 0:
            self._sums.append([])
        split, self._split = self._sums[self._split], self._split + 1
        split.append(list(sums))
        return [reduce(operator.add, parts) for parts in zip(*split, strict=True)]


@pytest.mark.parametrize(("count", "case"), [(2, "text"), (4, "text"), (2, "answers")])
def test_processes_add_their_sums(count: int, case: str, tmp_path: Path) -> None:
    """In the last batch of a split, processes have fewer rows or none; each must call the model equally often."""
    sets, metrics = CASES[case]
    run, sums, calls = evaluated(tmp_path, *sets, "machine.micro_batch=2", metrics=metrics), [], []
    assert run.config.eval is not None
    for rank in range(count):
        model, lengths = tfkit.build(run.graph, seed=1), []
        model.get_submodule("decoder").register_forward_hook(lambda *args, lengths=lengths: lengths.append(1))
        results = evaluate_splits(
            model, run, run.config.eval.splits, run.config.eval.metrics, processes=Part(rank, count, sums)
        )
        calls.append(len(lengths))
    assert len(set(calls)) == 1
    assert results == pytest.approx(numbers_of(run), abs=1e-6)


def test_a_micro_batch_is_that_of_the_run(tmp_path: Path) -> None:
    assert MicroBatch(small_run(tmp_path, "machine.micro_batch=4")).size == 4
    assert MicroBatch(small_run(tmp_path, "machine.micro_batch=auto")).size == 6


def test_an_evaluation_is_in_the_precision_of_the_run(tmp_path: Path) -> None:
    run = evaluated(tmp_path, *TEXT, "precision=bfloat16", metrics="[loss]")
    model, examples = tfkit.build(run.graph, seed=1), run.data.examples("val", "sequential")
    inputs, targets = batch_tensors(
        examples.batch(np.arange(len(examples))), model, torch.device("cpu"), run.config.loss
    )
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.eval()(**inputs).float()
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX).item()
    assert numbers_of(run) == {"val.loss": pytest.approx(expected, abs=1e-6)}
    assert numbers_of(evaluated(tmp_path, *TEXT, metrics="[loss]"))["val.loss"] != pytest.approx(expected, abs=1e-5)


# ---- losses that are not cross-entropy ----


@pytest.mark.parametrize("metric", ["loss", "bits_per_byte"])
def test_cross_entropy_is_refused_for_a_loss_that_does_not_predict_the_targets(metric: str, tmp_path: Path) -> None:
    path, plugins = write_run(tmp_path), plugins_with(CentredConfig)
    evaluation = f"eval={{every: 8, splits: {{val: all}}, metrics: [accuracy, {metric}]}}"
    with pytest.raises(SpecError) as caught:
        load_run(path, plugins, sets=["loss=centred", evaluation])
    (error,) = caught.value.diagnostics
    assert error.path == "eval.metrics.1"
    assert error.message == (
        f"the metric `{metric}` is the cross-entropy of the data's targets, which `centred` does not predict"
    )
    load_run(path, plugins, sets=["loss=cross_entropy", evaluation])
    load_run(path, plugins, sets=["loss={kind: distillation, teacher: small.yaml}", evaluation])
    with pytest.raises(SpecError, match="the cross-entropy of the data's targets") as caught:
        load_run(path, plugins, sets=["loss=centred", "eval={every: 8, splits: {val: all}}"])
    assert caught.value.diagnostics[0].path == "eval.metrics.0"


def test_a_folder_is_not_evaluated_by_cross_entropy_either(tmp_path: Path) -> None:
    plugins = plugins_with(CentredConfig)
    run = load_run(write_run(tmp_path), plugins, sets=["loss=centred", "steps=2"])
    train_run(run, tmp_path / "out", plugins, command="test")
    weights = tmp_path / "out" / "step-2" / "model.safetensors"
    assert evaluate_run(run, weights, plugins, ("val",), ("accuracy",), allow_change=False).numbers["val.accuracy"] < 1
    with pytest.raises(SpecError, match="the metric `loss` is the cross-entropy of the data's targets"):
        evaluate_run(run, weights, plugins, ("val",), (), allow_change=False)
