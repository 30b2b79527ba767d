"""Faults of training that need a second epoch, parameter group, micro-batch or session to appear."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.run.training.runs import PLUGINS, Memory, same, small_run, trained, write_run
from tfkit.run.checked_run import load_run
from tfkit.run.contract import ScheduleConfig
from tfkit.run.kinds.schedules import ConstantConfig, CosineConfig, InverseSqrtConfig, LinearConfig, WSDConfig
from tfkit.run.step_values import step_values
from tfkit.run.training.loop import Trainer
from tfkit.run.training.order import indices_of


def test_each_epoch_shuffles_all_examples() -> None:
    steps = [indices_of("shuffled", 3, step, step_values(4), examples=10) for step in range(1, 6)]
    first, second = np.concatenate(steps).reshape(2, 10).tolist()
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_all_groups_are_clipped_together(tmp_path: Path) -> None:
    """A step of SGD, divided by the learning rate, is the clipped gradient."""
    rates = {"embedding": 0.5, "decoder": 1.0, "head": 2.0}
    rules = ", ".join(f"{{match: '{name}*', lr: {rate}}}" for name, rate in rates.items())
    optimizer = f"optimizer={{kind: sgd, lr: 1.0, groups: [{rules}]}}"
    trainer = Trainer(small_run(tmp_path, "steps=1", "clip=0.25", optimizer), memory := Memory())
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    assert len(trainer.optimizer.param_groups) == 3
    clipped = [
        (weight.detach() - before[name]) / rates[name.partition(".")[0]]
        for name, weight in trainer.model.named_parameters()
    ]
    assert memory.lines[0]["grad_norm"] > 0.5
    assert nn.utils.get_total_norm(clipped).item() == pytest.approx(0.25, rel=1e-3)


def test_each_micro_batch_draws_its_dropout(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    (tmp_path / "sheep.txt").write_text("abcdefghijkl" * 40, encoding="utf-8")
    sets = ["model.dropout=0.5", "data.order=sequential", "batch.sequences=4", "machine.micro_batch=1"]
    trainer = Trainer(load_run(path, PLUGINS, sets=sets), Memory())
    outputs: list[Tensor] = []
    trainer.model.decoder.register_forward_hook(lambda module, inputs, output: outputs.append(output.detach()))
    trainer.train()
    rows = trainer.batch(1).inputs["tokens"]
    assert (rows == rows[0]).all()
    assert len(outputs) == 4 * 8
    assert not any(torch.equal(outputs[i], outputs[j]) for i in range(4) for j in range(i))


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (ConstantConfig(warmup=2), [0.5, 1, 1, 1, 1, 1, 1, 1]),
        (LinearConfig(warmup=2, end=0.4), [0.5, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]),
        (CosineConfig(warmup=2, end=0.2), [0.5, 1, 0.946410, 0.8, 0.6, 0.4, 0.253590, 0.2]),
        (WSDConfig(warmup=2, decay=4, end=0.2), [0.5, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        (WSDConfig(decay=0.5), [1, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
        (InverseSqrtConfig(warmup=2), [0.5, 1, (2 / 3) ** 0.5, 0.5**0.5, 0.4**0.5, 3**-0.5, (2 / 7) ** 0.5, 0.5]),
    ],
    ids=lambda value: value.kind_name() if isinstance(value, ScheduleConfig) else "",
)
def test_a_schedule_at_each_of_eight_steps(schedule: ScheduleConfig, factors: Sequence[float]) -> None:
    assert [schedule.factor(step, 8) for step in range(1, 9)] == pytest.approx(factors, abs=1e-6)


def test_spikes_keep_all_losses_in_several_sessions(tmp_path: Path) -> None:
    spikes = "callbacks={kind: spikes, window: 7}"
    memory, _ = trained(small_run(tmp_path, spikes))
    resumed = Memory()
    for until in (2, 3, 6, 8):
        resumed = Memory(resumed.saved)
        trained(small_run(tmp_path, spikes), resumed, until=until)
    assert resumed.saved
    assert resumed.saved.callbacks[0] == {"losses": memory.losses[1:]}


def test_clip_is_part_of_the_digest_and_changes_the_weights(tmp_path: Path) -> None:
    runs = [small_run(tmp_path, *sets) for sets in ((), ("clip=1.0",), ("clip=0.5",))]
    assert len({run.digest for run in runs}) == 3
    assert not same(*(trained(run)[1] for run in runs[1:]))
