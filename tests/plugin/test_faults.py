"""Plugins whose code fails: the error names the plugin and the file, without a traceback or an error of the spec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from pydantic import field_validator
from torch import nn

import tfkit
from tests.run.training.runs import RUN, trained, write_run
from tfkit.cli import main
from tfkit.component import BlockConfig, Component, FFNConfig, Make, Signal, Signals, Wire
from tfkit.errors import SpecWarning
from tfkit.plugin.manager import Plugins
from tfkit.plugin.registry import Registry
from tfkit.run.checked_run import load_run
from tfkit.run.contract import (
    IGNORE_INDEX,
    Batch,
    Callback,
    CallbackConfig,
    DataConfig,
    DecodedMetric,
    LogitMetric,
    LossConfig,
    MetricConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrackedRun,
    TrackerConfig,
)
from tfkit.run.run_spec import SplitConfig
from tfkit.run.training.evaluate import evaluate_splits
from tfkit.tools.train.train import train_run

from ..sampling import some

BUILT_IN = tfkit.load_plugins(entry_points=False)
HEAD = "tfkit: 1\nname: m\nd_model: 8\nvocab_size: 11\n"
STACK = (
    HEAD
    + """\
graph:
  embedding: {block: embedding}
  body: {block: encoder, n_layers: 1, ffn: FFN}
"""
)


def plugins(*configs: type[Any]) -> Plugins:
    registry = Registry()
    for slot in BUILT_IN.registry.slots():
        for component in BUILT_IN.registry.kinds(slot).values():
            registry.add(component.config, component.plugin)
    for config in configs:
        registry.add(config, "tfkit-odd 0.1")
    return Plugins(registry, ())


def refusal(text: str, *configs: type[Any]) -> tfkit.SpecError:
    with pytest.raises(tfkit.SpecError) as caught:
        tfkit.build(tfkit.loads(text, plugins=plugins(*configs)), device="meta")
    assert len(caught.value.diagnostics) == 1
    return caught.value


class Odd(FFNConfig):
    """Fails where it is told to."""

    kind: Literal["odd"] = "odd"
    where: str = ""
    wrong: ClassVar[Any] = TypeError("unsupported operand")
    number: int = 0

    @field_validator("number")
    @classmethod
    def _number(cls, number: int) -> int:
        if number == 1:
            raise KeyError("in a validator")
        if number == 2:
            raise ValueError("`number` is 2 for once")
        return number

    def check(self) -> None:
        super().check()
        if self.where == "check":
            raise self.wrong
        if self.where == "plain":
            raise ValueError("a plain ValueError is the plugin's own words")
        if self.where == "assert":
            raise AssertionError("cannot be")

    def build(self, make: Make) -> nn.Module:
        if self.where == "build":
            raise self.wrong
        if self.where == "dtype":
            torch.set_default_dtype(torch.float64)
        if self.where == "nothing":
            return None  # type: ignore[return-value]
        return nn.Identity()


class OddBlock(BlockConfig):
    """Fails where it is told to."""

    block: Literal["odd"] = "odd"
    input: Wire | None = None
    where: str = ""

    def output(self, inputs: Signals) -> Signal:
        if self.where == "output":
            raise ZeroDivisionError
        if self.where == "exit":
            raise SystemExit(0)
        return inputs["input"]  # type: ignore[no-any-return]

    def table(self) -> Signal | None:
        if self.where == "table":
            raise AttributeError("no such thing")
        return None

    def build(self, make: Make, inputs: Signals) -> nn.Module:
        return nn.Identity()


def test_it_works_when_nothing_fails() -> None:
    text = STACK.replace("FFN", "odd") + "  last: {block: odd}\n"
    tfkit.build(tfkit.loads(text, plugins=plugins(Odd, OddBlock)), device="meta")


@pytest.mark.parametrize(
    ("ffn", "message", "cause"),
    [
        (
            "{kind: odd, where: check}",
            "ffn kind `odd` failed in the check of its config",
            "TypeError: unsupported operand",
        ),
        ("{kind: odd, number: 1}", "ffn kind `odd` failed in the check of its config", "KeyError: 'in a validator'"),
        ("{kind: odd, where: build}", "ffn kind `odd` failed in `build`", "TypeError: unsupported operand"),
        (
            "{kind: odd, where: nothing}",
            "ffn kind `odd` failed in `build`",
            "TypeError: it must return an nn.Module; got NoneType",
        ),
    ],
)
def test_a_component_that_fails(ffn: str, message: str, cause: str) -> None:
    error = refusal(STACK.replace("FFN", ffn), Odd).diagnostics[0]
    assert error.message == message
    assert error.notes[0].startswith(cause)
    assert all(note.startswith(f"{__file__}:") for note in error.notes[1:])
    assert len(error.notes) == 1 + ("nothing" not in ffn)
    assert error.help == f"correct the component instead of the spec: it is written in {__name__}"
    assert error.path.startswith("graph.body")
    assert error.span is not None
    assert error.span.line == 7


class Stop(BaseException):
    """No `Exception`, and no interrupt."""


@pytest.mark.parametrize("invalid", [SystemExit(0), Stop("now"), GeneratorExit()])
@pytest.mark.parametrize("where", ["check", "build"])
def test_a_component_that_ends_the_process(where: str, invalid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Odd, "wrong", invalid)
    error = refusal(STACK.replace("FFN", f"{{kind: odd, where: {where}}}"), Odd).diagnostics[0]
    assert error.notes[0] == f"{type(invalid).__name__}: {invalid}".removesuffix(": ")
    assert error.help == f"correct the component instead of the spec: it is written in {__name__}"


@pytest.mark.parametrize("where", ["check", "build"])
def test_an_interrupt_in_a_component_stays_one(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Odd, "wrong", KeyboardInterrupt())
    text = STACK.replace("FFN", f"{{kind: odd, where: {where}}}")
    with pytest.raises(KeyboardInterrupt):
        tfkit.build(tfkit.loads(text, plugins=plugins(Odd)), device="meta")


def test_a_component_cannot_change_the_default_dtype() -> None:
    error = refusal(STACK.replace("FFN", "{kind: odd, where: dtype}"), Odd).diagnostics[0]
    assert error.notes[0] == "RuntimeError: it must not change torch's default dtype"
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("where", "cause"),
    [("output", "ZeroDivisionError"), ("table", "AttributeError: no such thing"), ("exit", "SystemExit: 0")],
)
def test_a_block_that_fails(where: str, cause: str) -> None:
    text = STACK.replace("FFN", "{kind: relu, d_ff: 3}") + f"  last: {{block: odd, where: {where}}}\n"
    error = refusal(text, OddBlock).diagnostics[0]
    assert error.message == f"block `odd` failed in `{where.replace('exit', 'output')}`"
    assert error.notes[0] == cause
    assert error.path == "graph.last"


@pytest.mark.parametrize(
    ("ffn", "message", "path"),
    [
        ("{kind: odd, where: plain}", "a plain ValueError is the plugin's own words", "graph.body.ffn"),
        ("{kind: odd, number: 2}", "`number`: `number` is 2 for once", "graph.body.ffn.number"),
    ],
)
def test_a_plain_value_error_is_for_the_user(ffn: str, message: str, path: str) -> None:
    error = refusal(STACK.replace("FFN", ffn), Odd).diagnostics[0]
    assert (error.message, error.path) == (message, path)


def test_one_mistake_hides_what_a_check_makes_of_it() -> None:
    """A check that fails because a value is wrong already is no second error."""
    error = refusal(STACK.replace("FFN", "{kind: odd, where: check, nmber: 1}"), Odd).diagnostics[0]
    assert error.message == "unknown key `nmber`"


# ---- data ----


class OddData(DataConfig):
    """Data that fail where they are told to, or return what breaks their contract."""

    kind: Literal["odd"] = "odd"
    where: str = ""

    @property
    def takes_length(self) -> bool:
        return True

    def build(self, length: int | None) -> Any:
        return OddRows(self.where)._at("build", OddRows(self.where))


class OddRows:
    vocab_size, length, splits, tokenizer = 11, 4, ("train", "val"), None

    def __init__(self, where: str) -> None:
        self.where = where

    @property
    def fingerprint(self) -> str:
        return self._at("fingerprint", "odd")

    def examples(self, split: str, order: str) -> Any:
        return self._at("examples", self)

    def __len__(self) -> int:
        return self._at("len", 20)

    def batch(self, indices: Any) -> Any:
        ids = np.zeros((len(indices), 4), np.int64)
        inputs = {"above": ids + 11, "below": ids - 1, "floats": ids * 0.5, "flat": ids[0], "list": ids.tolist()}
        targets = {"target": ids + 11, "ignored": np.full_like(ids, IGNORE_INDEX)}
        batch = Batch({"tokens": inputs.get(self.where, ids)}, targets.get(self.where, ids))
        return self._at("batch", "rows" if self.where == "text" else batch)

    def _at(self, path: str, value: Any) -> Any:
        if self.where == path:
            raise SystemExit(0)
        return value


DATA_RUN = (
    RUN.replace("data.vocab_size", "11").replace("{kind: text, files: sheep.txt}", "{kind: odd, where: WHERE}")
).replace("length: 12", "length: 4")


def _trained(path: Path) -> None:
    run = load_run(path, plugins(OddData))
    assert run.digest
    trained(run)


@pytest.mark.parametrize(
    ("where", "method", "cause"),
    some(
        [
            *((where, where, "SystemExit: 0") for where in ("build", "examples", "batch", "fingerprint")),
            ("len", "__len__", "SystemExit: 0"),
            ("below", "batch", "ValueError: `tokens` must have ids from 0 to 10; got -1 to -1"),
            ("above", "batch", "ValueError: `tokens` must have ids from 0 to 10; got 11 to 11"),
            ("target", "batch", "ValueError: `targets` must have ids from 0 to 10; got 11 to 11"),
            (
                "floats",
                "batch",
                "TypeError: `tokens` must be an array of integers with 1 rows and two axes; got float64 [1, 4]",
            ),
            (
                "flat",
                "batch",
                "TypeError: `tokens` must be an array of integers with 1 rows and two axes; got int64 [4]",
            ),
            ("list", "batch", "TypeError: `tokens` must be an array of integers with 1 rows and two axes; got list"),
            ("text", "batch", "TypeError: it must return a Batch; got str"),
        ],
        6,
    ),
)
def test_data_that_fail(where: str, method: str, cause: str, tmp_path: Path) -> None:
    path = write_run(tmp_path, DATA_RUN.replace("WHERE", where))
    with pytest.raises(tfkit.SpecError) as caught:
        _trained(path)
    (error,) = caught.value.diagnostics
    assert error.message.startswith(f"data kind `odd` failed in `{method}`")
    assert error.notes[0] == cause
    assert (error.path, error.span and error.span.line) == ("data", 11)
    assert error.help == f"correct the component instead of the spec: it is written in {__name__}"


@pytest.mark.parametrize("where", ["", "ignored"])
def test_data_that_do_not_fail(where: str, tmp_path: Path) -> None:
    _trained(write_run(tmp_path, DATA_RUN.replace("WHERE", f'"{where}"')))


# ---- other slots of a run ----


class OddOptimizer(OptimizerConfig):
    """Fails to build."""

    kind: Literal["odd"] = "odd"

    def build(self, groups: Any) -> Any:
        raise SystemExit(0)


class OddLoss(LossConfig):
    """Fails to build."""

    kind: Literal["odd"] = "odd"

    def build(self, model: Any) -> Any:
        raise KeyError("no such head")


class OddCallback(CallbackConfig):
    """Fails to build."""

    kind: Literal["odd"] = "odd"

    def build(self) -> Any:
        raise RuntimeError("no display")


@pytest.mark.parametrize(
    ("change", "config", "cause"),
    [
        ("optimizer={kind: odd, lr: 1}", OddOptimizer, "SystemExit: 0"),
        ("loss=odd", OddLoss, "KeyError: 'no such head'"),
        ("callbacks=odd", OddCallback, "RuntimeError: no display"),
    ],
)
def test_another_kind_of_a_run_that_fails(change: str, config: type[Any], cause: str, tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path), plugins(config), sets=[change])
    with pytest.raises(tfkit.SpecError) as caught:
        trained(run)
    (error,) = caught.value.diagnostics
    assert error.message == f"{config.slot} kind `odd` failed in `build`"
    assert error.notes[0] == cause
    assert error.path.startswith(change.partition("=")[0])
    assert error.span


# ---- kinds that fail while a run trains ----


def _fails(*names: str) -> Any:
    """Methods of these names, each of which fails if `where` is its name."""

    def method(name: str) -> Any:
        def call(self: Any, *values: Any, **options: Any) -> Any:
            if self.where == name:
                raise self.error
            return {}

        return call

    return {name: method(name) for name in names}


class Fails:
    """An object of a plugin, one method of which fails."""

    def __init__(self, where: str, error: BaseException) -> None:
        self.where, self.error = where, error


EVENTS = ("on_start", "on_step", "on_eval", "on_end", "state")
FailingCallback = type("FailingCallback", (Fails, Callback), _fails(*EVENTS))
FailingTracker = type("FailingTracker", (Fails,), _fails("log", "text", "close"))


class FailingMetric(Fails, LogitMetric):
    """A metric of logits."""

    def values(self, logits: Any, targets: Any) -> Any:
        if self.where == "values":
            raise self.error
        return torch.zeros(len(targets))

    def sums(self, values: Any, targets: Any) -> Any:
        if self.where == "sums":
            raise self.error
        return [0.0] if self.where != "+" else object()

    def compute(self, sums: Any) -> float:
        if self.where == "compute":
            raise self.error
        return 0.5


class FailingDecodedMetric(Fails, DecodedMetric):
    """A metric of decoded tokens."""

    def values(self, model: Any, inputs: Any, targets: Any, *, seed: int, first: int) -> Any:
        if self.where == "model":
            model.get_submodule("head").register_forward_pre_hook(lambda *_: model.no_such_module)
            return model(**inputs)
        raise self.error


class _Where(Component):
    kind: Literal["odd"] = "odd"
    where: str = ""
    text: ClassVar[BaseException] = RuntimeError("no display")


class LateCallback(_Where, CallbackConfig):
    """A callback."""

    def build(self) -> Any:
        return FailingCallback(self.where, self.text)


class LateTracker(_Where, TrackerConfig):
    """A tracker."""

    def build(self, run: TrackedRun) -> Any:
        if self.where == "build":
            raise self.text
        return FailingTracker(self.where, self.text)


class LateMetric(_Where, MetricConfig):
    """A metric."""

    decoded: bool = False

    def build(self, data: Any) -> Any:
        if self.where == "build":
            raise self.text
        return (FailingDecodedMetric if self.decoded else FailingMetric)(self.where, self.text)


class LateLoss(_Where, LossConfig):
    """A loss."""

    def build(self, model: Any) -> Any:
        if self.where == "build":
            raise self.text
        return FailingLoss(model, self)


class FailingLoss(torch.nn.Module):
    """A loss that is wrong in one way."""

    def __init__(self, model: Any, config: LateLoss) -> None:
        super().__init__()
        self.model, self.config = model, config

    def forward(self, inputs: Any, targets: Any) -> Any:
        loss = torch.nn.functional.cross_entropy(self.model(**inputs).mT, targets, reduction="none")
        if self.config.where == "forward":
            raise KeyError("no display")
        return {"detached": loss.detach().sum(), "positions": loss, "number": 0.5}[self.config.where]


class LateSchedule(_Where, ScheduleConfig):
    """A schedule."""

    def after(self, done: int, left: int) -> Any:
        if self.where == "factor":
            raise self.text
        return None if self.where == "none" else 1.0

    def check_steps(self, steps: int) -> None:
        if self.where == "check_steps":
            raise self.text


EVAL = "eval={every: 4, splits: {val: {batches: 2}}, metrics: [loss, {kind: odd, where: WHERE}]}"
DECODED = EVAL.replace("kind: odd", "kind: odd, decoded: true")
CALLBACK, TRACKER = "callbacks=[spikes, {kind: odd, where: WHERE}]", "track=[{kind: odd, where: WHERE}]"
NUMBERS = "eval={every: 4, splits: {val: {batches: 2}}, metrics: [loss]}"
NO_DISPLAY = "RuntimeError: no display"


SAMPLES = "callbacks={kind: samples, every: 4, prompt: '3', tokens: 5}"
SCHEDULE = "schedule={kind: odd, where: WHERE}"
LOSS = "loss={kind: odd, where: WHERE}"


def _train(folder: Path, config: type[Any], sets: list[str]) -> None:
    run = load_run(write_run(folder), plugins(config), sets=sets)
    train_run(run, folder / "out", plugins(config), command="")


@pytest.mark.parametrize(
    ("sets", "config", "path", "where", "method", "cause"),
    some(
        [
            *(([CALLBACK, NUMBERS], LateCallback, "callbacks.1", name, name, NO_DISPLAY) for name in EVENTS),
            *(
                ([EVAL], LateMetric, "eval.metrics.1", name, name, NO_DISPLAY)
                for name in ("build", "values", "sums", "compute")
            ),
            ([EVAL], LateMetric, "eval.metrics.1", "+", "+", "TypeError: unsupported operand type(s) for +"),
            ([DECODED], LateMetric, "eval.metrics.1", "values", "values", NO_DISPLAY),
            *(([SCHEDULE], LateSchedule, "schedule", name, name, NO_DISPLAY) for name in ("factor", "check_steps")),
            ([SCHEDULE], LateSchedule, "schedule", "none", "factor", "TypeError: float()"),
            ([TRACKER], LateTracker, "track.0", "build", "build", NO_DISPLAY),
            ([LOSS], LateLoss, "loss", "build", "build", NO_DISPLAY),
            ([LOSS], LateLoss, "loss", "forward", "forward", "KeyError: 'no display'"),
        ],
        9,
    ),
)
def test_a_kind_that_fails_while_a_run_trains(
    sets: list[str], config: type[Any], path: str, where: str, method: str, cause: str, tmp_path: Path
) -> None:
    with pytest.raises(tfkit.SpecError) as caught:
        _train(tmp_path, config, [text.replace("WHERE", where) for text in sets])
    (error,) = caught.value.diagnostics
    assert error.message == f"{config.slot} kind `odd` failed in `{method}`"
    assert error.notes[0].startswith(cause)
    assert error.path == path
    assert error.span
    lines = () if cause.startswith("TypeError") else (f"{__file__}:",)  # tfkit itself calls `+` and `float`
    assert all(note.startswith(line) for note, line in zip(error.notes[1:], lines, strict=True))
    assert error.help == f"correct the component instead of the spec: it is written in {__name__}"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("detached", "the loss `odd` must have a gradient; got a value that depends on no trained weight"),
        ("positions", "the loss `odd` must return a sum; got [6, 12]"),
        ("number", "the loss `odd` must return a sum; got float"),
    ],
)
def test_a_loss_that_returns_no_sum_with_a_gradient(where: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(tfkit.SpecError) as caught:
        _train(tmp_path, LateLoss, [LOSS.replace("WHERE", where)])
    (error,) = caught.value.diagnostics
    assert (error.message, error.path) == (message, "loss")
    assert error.help


@pytest.mark.parametrize("where", ["log", "text", "close"])
def test_a_tracker_that_fails_is_dropped_with_a_warning(where: str, tmp_path: Path) -> None:
    second = f"track=[{{kind: odd, where: {where}}}, {{kind: odd}}]"
    with pytest.warns(SpecWarning) as caught:
        _train(tmp_path, LateTracker, [SAMPLES, second])
    (warning,) = [str(each.message) for each in caught if each.category is SpecWarning]
    assert f"tracker kind `odd` failed in `{where}`" in warning
    assert "(track.0)" in warning
    assert "RuntimeError: no display" in warning
    assert "the run continues without it: metrics.jsonl has all numbers" in warning
    lines = (tmp_path / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines if "grad_norm" in line] == [*range(1, 9)]
    assert (tmp_path / "out" / "step-8" / "state.json").exists()


def test_an_error_of_the_model_is_not_that_of_a_metric(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path), plugins(LateMetric), sets=[DECODED.replace("WHERE", "model")])
    with pytest.raises(AttributeError, match="no_such_module"):
        trained(run)


def test_a_metric_that_runs_out_of_memory_reads_fewer_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Where, "text", torch.OutOfMemoryError("CUDA out of memory"))
    run = load_run(write_run(tmp_path), plugins(LateMetric), sets=[EVAL.replace("WHERE", "values")])
    with pytest.raises(tfkit.SpecError, match="an evaluation with 6 sequences does not fit into the memory"):
        trained(run)


def test_a_metric_that_the_run_does_not_list_has_no_place(tmp_path: Path) -> None:
    odd = plugins(LateMetric)
    run = load_run(write_run(tmp_path), odd)
    with pytest.raises(tfkit.SpecError) as caught:
        evaluate_splits(tfkit.build(run.graph), run, {"val": SplitConfig(batches=1)}, [LateMetric(where="sums")])
    (error,) = caught.value.diagnostics
    assert (error.message, error.span, error.path) == ("metric kind `odd` failed in `sums`", None, "")


# ---- the command line ----


@pytest.mark.parametrize(("where", "status"), [("raise SystemExit(0)", 1), ("raise KeyboardInterrupt", 130)])
@pytest.mark.parametrize("method", ["build", "forward"])
def test_a_command_never_ends_with_success_for_a_plugin(
    method: str, where: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"build": where, "forward": "return Ends()"}[method]
    (tmp_path / "ends.py").write_text(
        f"""
from typing import Literal
from torch import nn
from tfkit.component import FFNConfig
from tfkit.plugin.hookspecs import hookimpl

class Ends(nn.Module):
    def forward(self, x):
        {where}

class EndsConfig(FFNConfig):
    kind: Literal["ends"] = "ends"
    def build(self, make):
        {body}

@hookimpl
def tfkit_register(register):
    register(EndsConfig)
"""
    )
    (tmp_path / "spec.yaml").write_text(STACK.replace("FFN", "ends"))
    arguments = ["cost", str(tmp_path / "spec.yaml"), "--plugin-dir", str(tmp_path / "ends.py"), "--no-plugins"]
    assert main(arguments) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "interrupted\n" if status == 130 else "ends.py:9" in err or "ends.py:14" in err
    assert err.count("error:") == (status == 1)
