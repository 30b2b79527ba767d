"""The batch of the next step is prepared while a step computes, and at no other time."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tfkit.run.contract import Batch, Callback, Training
from tfkit.run.training.loop import Trainer
from tfkit.run.training.prefetch import Prefetch

from .runs import Memory, small_run


class Steps(Callback):
    """A watcher that appends each step to a list."""

    def __init__(self, events: list[object]) -> None:
        self.events = events

    def on_step(self, training: Training, numbers: Mapping[str, float]) -> None:
        self.events.append(f"step {training.step}")


def test_the_next_batch_is_ready_when_a_step_ends(tmp_path: Path) -> None:
    events: list[object] = []
    trainer = Trainer(small_run(tmp_path, "steps=4"), Memory(), watchers=[Steps(events)], until=3)
    batch = trainer._batches._batch

    def slow_batch(step: int) -> Batch:
        time.sleep(0.05 * (step > 1))  # longer than a step
        events.append((step, threading.current_thread() is threading.main_thread()))
        return batch(step)

    trainer._batches._batch = slow_batch
    trainer.train()
    assert events == [(1, True), (2, False), "step 1", (3, False), "step 2", "step 3"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_an_error_is_raised_at_its_step() -> None:
    def batch(step: int) -> Any:
        if step == 3:
            raise ValueError("step 3")
        return step

    batches = Prefetch(batch, 4)
    assert [batches.take(1), batches.take(2)] == [1, 2]
    batches.wait()
    with pytest.raises(ValueError, match="step 3"):
        batches.take(3)
    assert batches.take(2) == 2  # not the batch that was prepared
    batches.close()
