"""Steps that must not change the weights: numbers that are not finite, and failed allocations."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tfkit.errors import SpecError
from tfkit.run.contract import MAX_RATE, Batch, Callback
from tfkit.run.guarded_data import GuardedData
from tfkit.run.training.loop import Trainer
from tfkit.run.training.memory import peak_memory

from .runs import Memory, same, small_run, trained

PATH = "decoder.layers.1.attention.output"


class Planted(Trainer):
    """A run in which a module returns an infinite number at some steps."""

    bad: tuple[int, ...] = ()

    def _gradients(self, *arguments: object) -> tuple[Tensor, dict[str, float]]:
        module = self.model.get_submodule(PATH)

        def spoil(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
            return output * float("inf") if self.step + 1 in self.bad else output

        hook = module.register_forward_hook(spoil, prepend=True)
        try:
            return super()._gradients(*arguments)  # type: ignore[arg-type]
        finally:
            hook.remove()


def planted(tmp_path: Path, memory: Memory, bad: tuple[int, ...], *sets: str, until: int | None = None) -> Planted:
    trainer = Planted(small_run(tmp_path, *sets), memory, until=until)
    trainer.bad = bad
    return trainer


def test_the_first_component_that_is_not_finite_is_named(tmp_path: Path) -> None:
    memory = Memory()
    trainer = planted(tmp_path, memory, (3,))
    with pytest.raises(SpecError) as error:
        trainer.train()
    assert "step 3 has a loss or a gradient that is not finite" in str(error.value)
    assert f"the output of `{PATH}` is the first that is not finite" in str(error.value)
    assert trainer.ended == "diverged"
    assert memory.lines[-1] == {"step": 2, "diverged": str(error.value.diagnostics[0].message)}
    _, before = trained(small_run(tmp_path), until=2)
    assert same(before, trainer.model.state_dict())


RATES = f"lr: {MAX_RATE}, weight_decay: {MAX_RATE}, decay_all: true"


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw", f"muon, others: {{kind: sgd, {RATES}}}"])
def test_the_largest_rate_and_decay_diverge_with_an_error(tmp_path: Path, kind: str) -> None:
    trainer = Trainer(small_run(tmp_path, "precision=bfloat16", f"optimizer={{kind: {kind}, {RATES}}}"), Memory())
    with pytest.raises(SpecError, match="not finite"):
        trainer.train()


def test_a_gradient_that_is_not_finite_is_named(tmp_path: Path) -> None:
    trainer = Trainer(small_run(tmp_path), Memory())
    weight = trainer.model.get_parameter("decoder.layers.0.ffn.up.weight")
    weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(SpecError, match=r"the gradient of `decoder.layers.0.ffn.up.weight` is not finite"):
        trainer.train()


def test_steps_that_are_not_finite_are_left_out_and_counted(tmp_path: Path) -> None:
    skip = "nonfinite={skip: 2}"
    uninterrupted = Memory()
    trainer = planted(tmp_path, uninterrupted, (3, 5), skip)
    assert trainer.train() == "finished"
    texts = [(line["step"], line["skipped"]) for line in uninterrupted.lines if "skipped" in line]
    assert texts == [(step, f"the output of `{PATH}` is the first that is not finite") for step in (3, 5)]
    assert len(uninterrupted.losses) == 6
    assert all(bool(weight.isfinite().all()) for weight in trainer.model.state_dict().values())
    part = Memory()
    planted(tmp_path, part, (3, 5), skip, until=4).train()
    rest = Memory(part.saved)
    continued = planted(tmp_path, rest, (3, 5), skip)
    continued.train()
    assert part.lines + rest.lines == uninterrupted.lines
    assert same(trainer.model.state_dict(), continued.model.state_dict())
    with pytest.raises(SpecError, match="step 6 has a loss"):
        planted(tmp_path, Memory(part.saved), (3, 5, 6), skip).train()


def test_weights_that_are_not_finite_replace_no_checkpoint(tmp_path: Path) -> None:
    memory = Memory()
    trainer = Trainer(small_run(tmp_path, "checkpoint={every: 2}"), memory)

    class Spoil(Callback):
        def on_step(self, training: object, numbers: object) -> None:
            if trainer.step == 8:
                trainer.model.get_parameter("decoder.layers.1.ffn.up.weight").data[3] = torch.inf

    trainer._watchers = (Spoil(),)
    with pytest.raises(SpecError, match=r"after step 8 the weight `decoder.layers.1.ffn.up.weight` is not finite"):
        trainer.train()
    assert memory.saved is not None
    assert memory.saved.step == 6
    assert trainer.ended == "diverged"


@contextmanager
def memory_for(trainer: Trainer, limit: int, error: Callable[[], RuntimeError]) -> Iterator[None]:
    """A machine that has memory for that many sequences."""

    def check(module: nn.Module, options: tuple[object, ...]) -> None:
        tokens = options[0]["tokens"]  # type: ignore[index]
        if len(tokens) > limit:
            raise error()

    hook = trainer.loss.register_forward_pre_hook(check)
    yield
    hook.remove()


def of_cuda() -> RuntimeError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def of_the_cpu() -> RuntimeError:
    return RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried ...")


@pytest.mark.parametrize("error", [of_cuda, of_the_cpu])
def test_a_smaller_micro_batch_computes_the_same_and_is_noted(
    tmp_path: Path, error: Callable[[], RuntimeError]
) -> None:
    auto = Memory()
    trainer = Trainer(small_run(tmp_path, "machine.micro_batch=auto"), auto)
    with memory_for(trainer, 2, error):
        trainer.train()
    assert [line for line in auto.lines if "micro_batch" in line] == [
        {"step": 0, "micro_batch": f"{size}, since more do not fit into memory"} for size in (3, 2)
    ]
    plain, weights = trained(small_run(tmp_path, "machine.micro_batch=2"))
    assert auto.losses == plain.losses
    assert same(weights, trainer.model.state_dict())
    assert small_run(tmp_path, "machine.micro_batch=auto").digest == small_run(tmp_path).digest


@pytest.mark.parametrize(
    ("sets", "limit", "help"),
    [((), 4, "micro_batch: auto"), (("machine.micro_batch=auto",), 0, "make the examples shorter")],
)
def test_out_of_memory_says_what_to_change(tmp_path: Path, sets: tuple[str, ...], limit: int, help: str) -> None:
    trainer = Trainer(small_run(tmp_path, *sets), Memory())
    with memory_for(trainer, limit, of_cuda), pytest.raises(SpecError) as raised:
        trainer.train()
    assert f"{6 if limit else 1} sequences does not fit into the memory of `cpu`" in str(raised.value)
    assert help in str(raised.value)
    assert trainer.step == 0


def test_other_errors_are_not_taken_for_a_lack_of_memory(tmp_path: Path) -> None:
    trainer = Trainer(small_run(tmp_path, "machine.micro_batch=auto"), Memory())
    with (
        memory_for(trainer, 4, lambda: RuntimeError("shapes do not match")),
        pytest.raises(RuntimeError, match="shapes do not match"),
    ):
        trainer.train()


def test_a_batch_of_another_number_of_images_is_an_error() -> None:
    class Data:
        vocab_size, length, splits, fingerprint, tokenizer = 4, 1, ("train",), "", None

    data = GuardedData(Data(), lambda method, error: error)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"`image` must be .* 3 rows and four axes; got float32 \[2, 1, 4, 4\]"):
        data.check(Batch({"image": np.zeros((2, 1, 4, 4), np.float32)}, np.zeros(3, np.int64)), 3)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is compared with /proc")
def test_the_peak_memory_of_a_process_is_in_bytes() -> None:
    """A process inherits the peak of the process that started it, which may be larger."""
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    assert 0.9 < peak_memory(torch.device("cpu")) / (1024 * int(peak[1])) < 50
