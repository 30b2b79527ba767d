"""Losses and callbacks of plugins that change modules of the model, which no checkpoint could describe."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from torch import nn

import tfkit
from tests.plugin.test_faults import plugins
from tfkit.run.checked_run import Run, load_run
from tfkit.run.contract import Callback, CallbackConfig
from tfkit.run.kinds.metrics import CrossEntropyConfig

from .runs import Memory, trained, write_run


def edit(model: Any) -> None:
    model.decoder.layers[1].ffn.activation = nn.Tanh()


class Editing(Callback):
    """Registers hooks that read values, and changes a module after a step; 0 is the start of the run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_start(self, training: Any) -> None:
        self.on_step(training, {})

    def on_step(self, training: Any, numbers: Any) -> None:
        if training.step in (0, 2):
            training.model.decoder.layers[0].register_forward_hook(lambda module, inputs, output: None)
            training.model.decoder.layers[1].register_forward_pre_hook(lambda module, inputs: None)
        if training.step == self.step:
            edit(training.model)


class EditingConfig(CallbackConfig):
    """Changes a module after a step."""

    kind: Literal["editing"] = "editing"
    step: int = 0

    def build(self) -> Callback:
        return Editing(self.step)


class EditingLossConfig(CrossEntropyConfig):
    """Changes a module."""

    kind: Literal["editing"] = "editing"  # type: ignore[assignment]

    def build(self, model: Any) -> nn.Module:
        edit(model)
        return super().build(model)


def run_of(folder: Path, *sets: str) -> Run:
    return load_run(write_run(folder), plugins(EditingConfig, EditingLossConfig), sets=sets)


@pytest.mark.parametrize("step", [0, 3])
def test_a_callback_that_changes_a_module_ends_the_run_before_its_checkpoint(step: int, tmp_path: Path) -> None:
    run, memory = run_of(tmp_path, f"callbacks={{kind: editing, step: {step}}}", "checkpoint={every: 2}"), Memory()
    with pytest.raises(tfkit.SpecError, match=r"the loss or a callback changed its modules") as error:
        trained(run, memory)
    assert "decoder.layers.1.ffn.activation: Tanh, and ReLU by the spec" in str(error.value)
    assert len(memory.losses) == (4 if step else 0)
    assert (memory.saved.step if memory.saved else None) == (2 if step else None)


def test_a_loss_that_changes_a_module_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    with pytest.raises(tfkit.SpecError, match=r"decoder\.layers\.1\.ffn\.activation: Tanh, and ReLU by the spec"):
        trained(run_of(tmp_path, "loss=editing"))


class Doubling(Callback):
    """Registers a hook after a step that returns other values."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_start(self, training: Any) -> None:
        self.on_step(training, {})

    def on_step(self, training: Any, numbers: Any) -> None:
        if training.step == self.step:
            double(training.model)


def double(model: Any) -> None:
    model.decoder.layers[1].register_forward_hook(lambda module, inputs, output: 2 * output)


class DoublingConfig(CallbackConfig):
    """Registers a hook after a step that returns other values."""

    kind: Literal["doubling"] = "doubling"
    step: int

    def build(self) -> Callback:
        return Doubling(self.step)


class DoublingLossConfig(CrossEntropyConfig):
    """Registers a hook that returns other values."""

    kind: Literal["doubling"] = "doubling"  # type: ignore[assignment]

    def build(self, model: Any) -> nn.Module:
        double(model)
        return super().build(model)


@pytest.mark.parametrize(
    ("change", "owner"),
    [
        ("callbacks={kind: doubling, step: 0}", "callback `doubling`"),
        ("callbacks={kind: doubling, step: 3}", "callback `doubling`"),
        ("loss=doubling", "the loss"),
    ],
)
def test_a_hook_of_a_callback_or_a_loss_cannot_change_what_the_model_computes(
    change: str, owner: str, tmp_path: Path
) -> None:
    run, memory = load_run(write_run(tmp_path), plugins(DoublingConfig, DoublingLossConfig), sets=[change]), Memory()
    with pytest.raises(tfkit.SpecError, match=f"a forward hook of {owner} must return None; got Tensor"):
        trained(run, memory)
    assert memory.saved is None


@pytest.mark.parametrize("machine", ["machine={recompute: full}", "machine={threads: 1}"])
def test_hooks_of_a_callback_and_settings_of_the_machine_are_no_edits(machine: str, tmp_path: Path) -> None:
    memory, _ = trained(run_of(tmp_path, "callbacks={kind: editing, step: 100}", machine))
    assert memory.saved is not None
