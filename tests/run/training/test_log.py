"""Numbers that callbacks log: on the line of their step, and in every report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import tfkit
from tfkit.errors import SpecError
from tfkit.run.contract import Callback, Training
from tfkit.run.kinds.callbacks import SpikesConfig, TensorBoardConfig
from tfkit.run.training.loop import Trainer
from tfkit.tools.train.progress import TrainingProgress

from .runs import Memory, small_run, write_run

EVALUATED = "eval={every: 2, splits: {val: {batches: 1}}}"


class Logs(Callback):
    """Calls a function after each step, after each evaluation, and at the start."""

    def __init__(self, **calls: Callable[[Training], None]) -> None:
        self._calls = calls

    def on_start(self, training: Training) -> None:
        self._calls.get("start", lambda training: None)(training)

    def on_step(self, training: Training, numbers: Mapping[str, float]) -> None:
        self._calls.get("step", lambda training: None)(training)

    def on_eval(self, training: Training, numbers: Mapping[str, float]) -> None:
        self._calls.get("eval", lambda training: None)(training)


def logged(tmp_path: Path, *callbacks: Callback, **options: Any) -> Memory:
    """The record of a run of 2 steps with callbacks."""
    memory = Memory()
    spikes = ", ".join(["spikes"] * len(callbacks))  # entries of the file, which errors point at
    trainer = Trainer(small_run(tmp_path, "steps=2", EVALUATED, f"callbacks=[{spikes}]"), memory, **options)
    trainer._callbacks = list(callbacks)
    trainer.train()
    return memory


def test_numbers_are_in_the_line_of_their_step(tmp_path: Path) -> None:
    def step(training: Training) -> None:
        training.log("twice", 2 * training.step)
        training.log("tensor", torch.tensor(0.5))  # type: ignore[arg-type]

    memory = logged(tmp_path, Logs(step=step, eval=lambda training: training.log("seen", training.step)))
    names = ("step", "twice", "tensor", "seen")
    assert [{name: line[name] for name in line if name in names} for line in memory.lines] == [
        {"step": 0, "seen": 0},
        {"step": 1, "twice": 2, "tensor": 0.5},
        {"step": 2, "twice": 4, "tensor": 0.5},
        {"step": 2, "seen": 2},
    ]
    assert all(("loss" in line) == ("twice" in line) for line in memory.lines)
    json.dumps(memory.lines)


def test_observers_see_what_earlier_ones_log_and_change_nothing(tmp_path: Path) -> None:
    calls: list[dict[str, float]] = []

    class Sees(Callback):
        def on_step(self, training: Training, numbers: Mapping[str, float]) -> None:
            calls.append(dict(numbers))
            with pytest.raises(TypeError):
                numbers["loss"] = 0.0  # type: ignore[index]

    memory = logged(tmp_path, Logs(step=lambda training: training.log("mine", 1.0)), watchers=[Sees()])
    assert [{"step": number, **line} for number, line in enumerate(calls, 1)] == [
        line for line in memory.lines if "loss" in line
    ]
    assert all("mine" in line for line in calls)


def test_the_bar_shows_them() -> None:
    watch, lines = TrainingProgress(float, quiet=True), []
    watch._bar = cast(Any, SimpleNamespace(update=lambda task, **fields: lines.append(fields["loss"])))
    watch.on_step(cast(Training, SimpleNamespace(step=1)), {"loss": 2.5, "lr": 0.01, "grad_norm": 1.0, "gain": 0.25})
    assert lines == ["loss 2.500  lr 1.0e-02  gain 0.25"]


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ({"step": lambda training: training.log("loss", 1.0)}, "`loss` is already logged"),
        ({"step": lambda training: training.log("step", 1.0)}, "`step` is already logged"),
        ({"step": lambda training: training.log("val.loss", 1.0)}, "`val.loss` is already logged"),
        ({"eval": lambda training: training.log("grad_norm", 1.0)}, "`grad_norm` is already logged"),
        ({"step": lambda training: training.log("a", "b")}, "the value of `a` must be a number; got `b`"),
        ({"step": lambda training: training.log("a", torch.ones(2))}, "the value of `a` must be a number; got"),
        ({"start": lambda training: training.log("a", 1.0)}, "`a` cannot be logged here"),
    ],
)
def test_errors_name_the_callback(calls: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as error:
        logged(tmp_path, Logs(), Logs(**calls))
    assert words in str(error.value)
    assert "callbacks.1" in str(error.value)


def test_two_callbacks_cannot_log_one_name(tmp_path: Path) -> None:
    callbacks = [Logs(step=lambda training: training.log("mine", 1.0)) for _ in range(2)]
    with pytest.raises(SpecError, match=r"`mine` is already logged(.|\n)*choose a different name"):
        logged(tmp_path, *callbacks)


def test_the_line_of_a_step_is_written_if_a_callback_fails(tmp_path: Path) -> None:
    memory = Memory()
    trainer = Trainer(small_run(tmp_path, "steps=2", "callbacks=[spikes]"), memory)
    trainer._callbacks = [Logs(step=lambda training: training.log("lr", 0.0))]
    with pytest.raises(SpecError):
        trainer.train()
    assert [line["step"] for line in memory.lines if "loss" in line] == [1]


def test_they_are_in_the_folder_the_trackers_the_progress_and_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values, tracked = iter([1.0, math.nan, 3.0, 4.0]), []
    callback = Logs(
        step=lambda training: training.log("gain", next(values)),
        eval=lambda training: training.log("extra", training.step / 2),
    )
    tracker = SimpleNamespace(log=lambda step, numbers: tracked.append((step, *numbers)), close=lambda: None)
    monkeypatch.setattr(SpikesConfig, "build", lambda config: callback)
    monkeypatch.setattr(TensorBoardConfig, "build", lambda *args: tracker)
    monkeypatch.chdir(tmp_path)
    sets = ["steps=4", EVALUATED, "callbacks=[spikes]", "track=tensorboard"]
    done = tfkit.train(write_run(tmp_path), output="out", sets=sets)
    assert done.history.curves["gain"] == [(1, 1.0), (3, 3.0), (4, 4.0)]  # a number that is not finite has no place
    assert done.history.curves["extra"] == [(0, 0.0), (2, 1.0), (4, 2.0)]
    assert [step for step, *names in tracked if "gain" in names and "loss" in names] == [1, 2, 3, 4]
    assert "extra 2.0000" in capsys.readouterr().err
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert 'aria-label="gain over' in page
    assert "gain 4" in page
