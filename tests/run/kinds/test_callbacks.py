"""Callbacks that average weights, reject updates, or wait for an improvement, compared with loops of a few lines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import tfkit
from tests.tools.train.test_folder import contents
from tfkit.errors import SpecError
from tfkit.run.contract import Data, Training
from tfkit.run.guarded_data import GuardedData
from tfkit.run.kinds.callbacks import Ema, PatienceConfig, SamplesConfig, SpikesConfig
from tfkit.run.training.loop import Trainer
from tfkit.tools.train.train import train

from ..training.runs import Memory, same, small_run, trained, write_run

EMA = ("callbacks={kind: ema, decay: 0.6}", "eval={every: 4, splits: {val: all}}")


class Weights:
    """A watcher that keeps the weights after each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_step(self, training: Training, numbers: Mapping[str, float]) -> None:
        self.steps.append({name: weight.detach().clone() for name, weight in training.model.named_parameters()})

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def test_ema_averages_the_weights_and_changes_nothing_of_the_training(tmp_path: Path) -> None:
    memory, weights, watcher = Memory(), None, Weights()
    trainer = Trainer(small_run(tmp_path, *EMA), memory, watchers=[cast(Any, watcher)])
    average = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    plain, weights = trained(small_run(tmp_path, EMA[1]))
    assert same(weights, trainer.model.state_dict())
    assert memory.losses == plain.losses
    for step, current in enumerate(watcher.steps, 1):
        decay = min(0.6, (1 + step) / (10 + step))
        average = {name: decay * value + (1 - decay) * current[name] for name, value in average.items()}
    for name, value in average.items():
        torch.testing.assert_close(memory.models["ema"][name], value, atol=1e-6, rtol=0)
    evaluated = [line["ema.val.loss"] for line in memory.lines if "ema.val.loss" in line]
    expected = [line["val.loss"] for line in plain.lines if "val.loss" in line]
    assert len(evaluated) == len(expected) == 3
    assert evaluated[0] == expected[0]
    assert evaluated[1] > expected[1]  # the averages lag behind


def test_ema_resumes_to_the_bit(tmp_path: Path) -> None:
    memory, _ = trained(small_run(tmp_path, *EMA))
    parts, _ = trained(small_run(tmp_path, *EMA), until=3)
    parts = Memory(parts.saved)
    trained(small_run(tmp_path, *EMA), parts)
    assert same(memory.models["ema"], parts.models["ema"])
    assert memory.lines[-1] == parts.lines[-1]


def test_the_folder_of_a_run_holds_its_averages(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    train(path, output=tmp_path / "out", sets=EMA, stop_after=5, quiet=True)
    train(path, output=tmp_path / "out", sets=EMA, quiet=True)
    uninterrupted = train(path, output=tmp_path / "whole", sets=EMA, quiet=True)
    averages = [tfkit.build(folder / "ema").state_dict() for folder in (tmp_path / "out", uninterrupted.folder)]
    assert same(*averages)
    assert not same(averages[0], tfkit.build(uninterrupted.folder).state_dict())


def test_averages_are_written_after_the_process_was_killed_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint says that the run has finished; its folder does not yet."""
    path, folder = write_run(tmp_path), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Ema, "on_end", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(path, output=folder, sets=EMA, quiet=True)
    assert not (folder / "ema").exists()
    checkpoints = {file: file.stat().st_mtime_ns for file in folder.rglob("step-*/*")}
    train(path, output=folder, sets=EMA, quiet=True)
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("step-*/*")} == checkpoints
    uninterrupted = train(path, output=tmp_path / "whole", sets=EMA, quiet=True)
    assert contents(str(folder)) == contents(str(uninterrupted.folder))


def test_spikes_may_leave_out_the_update(tmp_path: Path) -> None:
    rejecting = "callbacks={kind: spikes, window: 2, deviations: 1e-6, skip: true}"
    watcher = Weights()
    memory = Memory()
    Trainer(small_run(tmp_path, rejecting), memory, watchers=[cast(Any, watcher)]).train()
    rejected = [line["step"] for line in memory.lines if "rejected" in line]
    assert rejected
    assert [line["step"] for line in memory.lines if "loss" in line] == [*range(1, 9)]
    steps = watcher.steps
    assert [n + 1 for n in range(1, 8) if same(steps[n - 1], steps[n])] == rejected
    assert not any("spike" in line for line in memory.lines)  # the reason is in `rejected`


class Evaluated:
    """A run as far as `patience` sees it."""

    reason: str | None = None

    def stop(self, reason: str) -> None:
        self.reason = reason


@pytest.mark.parametrize(
    ("fields", "values", "stops_at"),
    [
        ({}, [3.0, 2.0, 2.5, 2.1], 4),
        ({}, [3.0, 2.0, 2.5, 1.9, 2.0], None),
        ({"min_delta": 0.5}, [3.0, 2.9, 2.8], 3),
        ({"better": "higher"}, [0.1, 0.3, 0.2, 0.3], 4),
        ({}, [3.0, math.nan, math.nan], 3),
        ({}, [math.inf, math.nan], 2),
    ],
)
def test_patience_ends_a_run_that_no_longer_improves(
    fields: dict[str, Any], values: list[float], stops_at: int | None
) -> None:
    training = Evaluated()
    config = PatienceConfig(evaluations=2, **fields)
    callback = config.build()
    stopped = None
    for number, value in enumerate(values, 1):
        callback.on_eval(cast(Training, training), {"val.loss": value})
        if training.reason:
            stopped = number
            break
        state, callback = callback.state(), config.build()
        callback.restore(state)
    assert stopped == stops_at


@pytest.mark.parametrize(("loss", "spike"), [(4.8, False), (4.9, True), (-9.0, False)])
def test_a_spike_is_above_the_mean_of_the_window_by_several_deviations(loss: float, spike: bool) -> None:
    """The window 1, 2, 4 has the mean 2.333 and the deviation 1.247, so the limit is 4.828."""
    callback = SpikesConfig(window=3, deviations=2.0, skip=True).build()
    for previous in (9.0, 1.0, 2.0, 4.0):
        callback.on_step(cast(Training, None), {"loss": previous})
    assert (callback.reject(cast(Training, None), {"loss": loss}) is not None) == spike
    only_noting = SpikesConfig(window=3, deviations=2.0).build()
    only_noting.restore(callback.state())
    assert only_noting.reject(cast(Training, None), {"loss": loss}) is None
    texts: list[str] = []
    training = cast(Training, SimpleNamespace(text=lambda name, text: texts.append(f"{name}: {text}")))
    only_noting.on_step(training, {"loss": loss})  # compared with the losses before it, not with itself
    assert texts == (["spike: the loss 4.9 is 2.1 deviations above its mean"] if spike else [])
    only_noting.on_step(training, {"loss": 9.5})  # the window is now 2, 4 and this loss
    assert [text.partition(" is ")[0] for text in texts[spike:]] == (["spike: the loss 9.5"] if loss > 0 else [])


def test_samples_stop_at_the_end_of_the_data(tmp_path: Path) -> None:
    run = small_run(tmp_path, "data.tokenizer=bytes")
    assert isinstance(run.data, GuardedData)
    model, prompt = tfkit.build(run.graph, seed=1).eval(), list(b"so")
    ids = tfkit.generate(model, [prompt], max_new_tokens=9, temperature=2.0, seed=5).rows()[0]
    run.data.end = ids[4]
    config = SamplesConfig(every=1, prompt="so", tokens=9, temperature=2.0)
    samples, training = config.build(), TextTraining(model, run.data)
    samples.on_start(cast(Training, training))
    samples.on_step(cast(Training, training), {})
    assert training.texts == ["so" + tfkit.ByteTokenizer().decode(ids[: ids.index(ids[4])])]


@dataclass
class TextTraining:
    """The part of a run that samples use, at step 5."""

    model: torch.fx.GraphModule
    data: Data
    step: int = 5
    texts: list[str] = field(default_factory=list)

    def text(self, name: str, text: str) -> None:
        self.texts.append(text)


# ---- several of a kind ----

TWO = "callbacks=[{kind: ema, decay: 0.6}, {kind: ema, decay: 0.2, name: fast}]"


def test_two_averages_have_two_names(tmp_path: Path) -> None:
    memory, _ = trained(small_run(tmp_path, TWO, EMA[1]))
    for name, decay in (("ema", 0.6), ("ema_fast", 0.2)):
        single, _ = trained(small_run(tmp_path, f"callbacks={{kind: ema, decay: {decay}}}", EMA[1]))
        assert same(memory.models[name], single.models["ema"])
        expected = [line["ema.val.loss"] for line in single.lines if "val.loss" in line]
        assert [line[f"{name}.val.loss"] for line in memory.lines if "val.loss" in line] == expected
    assert not same(memory.models["ema"], memory.models["ema_fast"])


def test_an_average_keeps_its_state_if_another_is_removed(tmp_path: Path) -> None:
    path, fast = write_run(tmp_path), "callbacks={kind: ema, decay: 0.2, name: fast}"
    train(path, output=tmp_path / "out", sets=[TWO], stop_after=5, quiet=True)
    train(path, output=tmp_path / "out", sets=[fast], quiet=True)
    train(path, output=tmp_path / "whole", sets=[fast], quiet=True)
    averages = [tfkit.build(tmp_path / name / "ema_fast").state_dict() for name in ("out", "whole")]
    assert same(*averages)


@pytest.mark.parametrize(
    ("change", "path", "message"),
    [
        (TWO.replace(", name: fast", ""), "callbacks.1", "`ema` must be listed once: both callbacks would have"),
        (TWO.replace("0.6}", "0.6, name: fast}"), "callbacks.1", "`ema_fast` must be listed once"),
        ("callbacks=[components, spikes, components]", "callbacks.2", "`components` must be listed once"),
        (TWO.replace("fast", "../fast"), "callbacks.1.name", "`name` must"),
        (TWO.replace("fast", "a.b"), "callbacks.1.name", "`name` must"),
    ],
)
def test_equal_names_are_an_error(change: str, path: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        small_run(tmp_path, change)
    (error,) = caught.value.diagnostics
    assert error.path == path
    assert error.message.startswith(message)


def test_a_metric_may_be_listed_twice_with_a_name(tmp_path: Path) -> None:
    metrics = "[{kind: choice_accuracy}, {kind: choice_accuracy, normalize: true, name: normalized}]"
    pairs = [("abc"[number % 3], "abc"[(number + 1) % 3]) for number in range(30)]
    quiz = [{"prompt": "q", "choices": [other, letter * 7], "answer": 1} for letter, other in pairs]
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps(row) + "\n" for row in quiz), encoding="utf-8")
    data = f"data={{kind: choices, files: {tmp_path / 'quiz.jsonl'}}}"
    values = {}
    for name, listed in {"both": metrics, "normalized": "[{kind: choice_accuracy, normalize: true}]"}.items():
        sets = (data, f"eval={{every: 9, splits: {{train: all}}, metrics: {listed}}}", "steps=1")
        values[name] = trained(small_run(tmp_path, *sets))[0].lines[0]
    assert values["both"]["train.choice_accuracy_normalized"] == values["normalized"]["train.choice_accuracy"]
    assert values["both"]["train.choice_accuracy"] != values["both"]["train.choice_accuracy_normalized"]
    metrics = metrics.replace(", name: normalized", "")
    with pytest.raises(SpecError, match="`choice_accuracy` must be listed once: both metrics would have the same name"):
        small_run(tmp_path, data, f"eval={{every: 9, splits: {{train: all}}, metrics: {metrics}}}")
