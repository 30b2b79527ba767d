"""The contract of a loss: noise for each example, counts, further numbers, its evaluation, and what it must not do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import tfkit
from tfkit.errors import SpecError
from tfkit.run.checked_run import Run, load_run
from tfkit.run.contract import LossConfig, LossSum, Ratio
from tfkit.run.training.checkpoint import loss_tensors
from tfkit.run.training.loop import Trainer
from tfkit.run.training.noise import Noise
from tfkit.run.training.processes import COPY
from tfkit.tools.check.check import outcomes_of
from tfkit.tools.eval_.evaluation import evaluate_run
from tfkit.tools.train.check.data import metric_values
from tfkit.tools.train.check.options import option_effects
from tfkit.tools.train.check.record import resumed_run
from tfkit.tools.train.check.run_under_test import Half, reduced_run
from tfkit.tools.train.check.step import finite_steps, loss_sums, step_targets
from tfkit.tools.train.train import train_run

from ...plugin.test_faults import plugins
from ...sampling import chosen
from .runs import RUN, Memory, same, trained, write_run


class MaskedConfig(LossConfig):
    """Cross-entropy of random positions, each masked with a probability of its row."""

    kind: Literal["masked"] = "masked"
    fault: str = ""
    rate: float = 0.9

    @property
    def draws_noise(self) -> bool:
        return True

    def build(self, model: fx.GraphModule) -> nn.Module:
        return Masked(model, self.fault, self.rate)


class Masked(nn.Module):
    seen: Tensor

    def __init__(self, model: fx.GraphModule, fault: str, rate: float) -> None:
        super().__init__()
        self.model, self.fault, self.rate = model, fault, rate
        self.register_buffer("seen", torch.tensor([3.5, 0.25]))
        if fault == "trained":
            self.scale = nn.Parameter(torch.tensor(1.5))

    def after_step(self, step: int, steps: int) -> None:
        self.seen.mul_(self.rate).add_(step / steps)

    def forward(self, inputs: Mapping[str, Tensor], targets: Tensor, noise: Noise) -> LossSum | Tensor:
        masked = noise.rand(targets.size(1)) < 0.3 + 0.6 * noise.rand(1)
        logits = self.model(**inputs)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.clamp(min=0).flatten(), reduction="none")
        total = (losses.view_as(targets) * masked).sum() * self.seen.sum()
        if self.fault == "evaluation" and not self.training:
            raise ValueError("no teacher")
        if self.fault == "state":
            self.seen += 1
        if self.fault == "mean":
            return losses
        if self.fault == "average":
            return losses.mean()
        if self.fault == "detached":
            return LossSum(total.detach(), masked.sum())
        name = {"taken": "lr", "metric": "accuracy"}.get(self.fault, "masked")
        right = (logits.argmax(-1) == targets) & masked
        numbers = {name: Ratio(masked.sum(), masked.numel()), "right": Ratio(right.sum(), masked.sum())}
        return LossSum(total, masked.sum(), numbers)


class ContrastConfig(LossConfig):
    """A loss of all rows of a step together: the cross-entropy of their order."""

    kind: Literal["contrast"] = "contrast"

    @property
    def undivided(self) -> bool:
        return True

    def build(self, model: fx.GraphModule) -> nn.Module:
        return Contrast(model)


class Contrast(nn.Module):
    def __init__(self, model: fx.GraphModule) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Mapping[str, Tensor], targets: Tensor) -> LossSum:
        vectors = F.normalize(self.model(**inputs).mean(1), dim=-1)  # [b, v]
        total = F.cross_entropy(vectors @ vectors.T, torch.arange(len(vectors)), reduction="sum")
        return LossSum(total, len(vectors))


class ShiftedConfig(LossConfig):
    """Cross-entropy of a model whose input `level` the loss computes, a number for each row."""

    kind: Literal["shifted"] = "shifted"
    level: str = "level"
    type: str = "features"

    @property
    def draws_noise(self) -> bool:
        return True

    @property
    def fills(self) -> Mapping[str, str]:
        return {self.level: self.type}

    def build(self, model: fx.GraphModule) -> nn.Module:
        return Shifted(model, self.level)


class Shifted(nn.Module):
    def __init__(self, model: fx.GraphModule, level: str) -> None:
        super().__init__()
        self.model, self.level = model, level
        self.width = model.meta["graph"].inputs[level].width

    def forward(self, inputs: Mapping[str, Tensor], targets: Tensor, noise: Noise) -> Tensor:
        levels = noise.randn(1, 1).expand(-1, targets.size(1), self.width)
        logits = self.model(**inputs, **{self.level: levels})
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


PLUGINS = plugins(MaskedConfig, ContrastConfig, ShiftedConfig)
FILLED = """\
  inputs: {tokens: tokens, level: {type: features, width: 16}}
  graph:
    embedding: {block: embedding, input: tokens, position: {kind: learned, max_len: 12}}
    sum: {block: add, inputs: [embedding, level]}
    decoder: {block: decoder, input: sum, n_layers: 1, attention: {kind: mha, n_heads: 2}, ffn: {kind: relu, d_ff: 9}}
"""
"""A model with an input `level` that the data lacks."""


def run_of(folder: Path, loss: str = "masked", *sets: str) -> Run:
    evaluation = "eval={every: 2, splits: {val: 3}, metrics: [objective]}"
    return load_run(write_run(folder), PLUGINS, sets=[f"loss={loss}", "steps=4", evaluation, *sets])


def step_of(run: Run, rank: int | None = None, until: int = 1) -> tuple[dict[str, Tensor], Memory]:
    """Return the gradients of step `until`, of a run or of one of two processes, and the record of the run."""
    memory = Memory()
    trainer = Trainer(run, memory, until=until, processes=None if rank is None else Half(rank))
    trainer.train()
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}, memory


def test_an_example_has_its_noise_in_every_division_of_a_step(tmp_path: Path) -> None:
    gradients, memory = step_of(run_of(tmp_path))
    for size in (1, 3):
        parts, other = step_of(run_of(tmp_path, "masked", f"machine.micro_batch={size}"))
        assert other.losses == pytest.approx(memory.losses, rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_step_is_divided_by_the_count_of_the_loss(tmp_path: Path) -> None:
    run = run_of(tmp_path, "masked", "machine.micro_batch=3")
    gradients, memory = step_of(run)
    trainer = Trainer(run, Memory())
    batch = trainer.batch(1)
    noise = Noise.of(torch.device("cpu"), run.config.seed, "loss", 1, range(batch.size))
    masked = noise.rand(batch.ids.shape[1]) < 0.3 + 0.6 * noise.rand(1)
    assert len(noise.rand(2).unique(dim=0)) == batch.size > 1  # each row draws different numbers
    logits = trainer.model(torch.from_numpy(batch.inputs["tokens"]))
    expected = F.cross_entropy(logits[masked], torch.from_numpy(batch.ids)[masked]) * 3.75
    expected.backward()
    assert memory.losses[0] == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)
    line = memory.lines[1]
    assert line["masked"] == pytest.approx(masked.double().mean().item())
    assert line["right"] == pytest.approx((logits.argmax(-1)[masked].numpy() == batch.ids[masked]).mean())


def test_evaluations_compute_the_loss_with_equal_noise(tmp_path: Path) -> None:
    run = run_of(tmp_path, "masked", "optimizer.lr=1e-30")
    memory = Memory()
    trained(run, memory)
    values = [line["val.objective"] for line in memory.lines if "val.objective" in line]
    state = torch.tensor([3.5, 0.25])  # changes after each step
    scales = [3.75, *(float(state.mul_(0.9).add_(step / 4).sum()) for step in range(1, 5))]
    assert len(values) == 3
    assert values[1] / values[0] == pytest.approx(scales[2] / scales[0], rel=1e-5)
    assert values[2] / values[0] == pytest.approx(scales[4] / scales[0], rel=1e-5)


def test_evaluations_report_the_further_numbers_of_the_loss(tmp_path: Path) -> None:
    full, divided = (Memory(), Memory())
    trained(run_of(tmp_path, "masked"), full)
    trained(run_of(tmp_path, "masked", "machine.micro_batch=1"), divided)
    names = ["val.objective", "val.masked", "val.right"]
    rows, parts = (
        [[line.get(name) for name in names] for line in memory.lines if "val.objective" in line]
        for memory in (full, divided)
    )
    assert len(rows) == 3
    assert [row[1] for row in rows] == [rows[0][1]] * 3  # the same noise
    assert 0.3 < rows[0][1] < 0.9
    assert 0 < rows[0][2] < rows[-1][2]
    np.testing.assert_allclose(parts, rows, rtol=1e-5)


def test_the_noise_of_an_evaluation_does_not_depend_on_the_seed_of_the_run(tmp_path: Path) -> None:
    numbers = [Trainer(run_of(tmp_path, "masked", f"seed={seed}"), Memory(), until=0).evaluate() for seed in (3, 8)]
    assert numbers[0]["val.masked"] == numbers[1]["val.masked"]
    assert numbers[0]["val.objective"] != numbers[1]["val.objective"]


def test_a_further_number_with_the_name_of_a_metric_is_an_error(tmp_path: Path) -> None:
    metrics = "eval={every: 4, splits: {val: 3}, metrics: [objective, accuracy]}"
    with pytest.raises(SpecError, match="the loss must not log `accuracy`, which is a metric of the run"):
        trained(run_of(tmp_path, "{kind: masked, fault: metric}", metrics))


def test_the_objective_of_cross_entropy_is_its_loss(tmp_path: Path) -> None:
    plain = "eval={every: 4, splits: {val: 3}, metrics: [loss, objective]}"
    memory = Memory()
    trained(run_of(tmp_path, "cross_entropy", plain, "machine.micro_batch=3"), memory)
    lines = [line for line in memory.lines if "val.loss" in line]
    assert [line["val.objective"] for line in lines] == pytest.approx([line["val.loss"] for line in lines], rel=1e-6)
    smoothed = Memory()
    trained(run_of(tmp_path, "{kind: cross_entropy, label_smoothing: 0.3}", plain), smoothed)
    first = next(line for line in smoothed.lines if "val.loss" in line)
    assert first["val.objective"] > first["val.loss"] * 1.0001


def test_an_undivided_loss_is_evaluated_in_batches_of_the_size_of_the_run(tmp_path: Path) -> None:
    evaluation = "eval={every: 4, splits: {val: all}, metrics: [objective]}"
    run, memory = run_of(tmp_path, "contrast", evaluation), Memory()
    examples = run.data.examples("val", "sequential")
    assert len(examples) % 6  # a short last batch, which is left out
    trainer = Trainer(run, memory, until=0)
    numbers = trainer.evaluate()
    loss, totals = run.config.loss.build(trainer.model), []
    for start in range(0, len(examples) - 5, 6):
        batch = examples.batch(np.arange(start, start + 6))
        with torch.no_grad():
            totals.append(loss({"tokens": torch.from_numpy(batch.inputs["tokens"])}, None).total / 6)
    assert numbers["val.objective"] == pytest.approx(torch.stack(totals).mean().item(), rel=1e-6)


def test_each_step_has_its_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws, rand = list[Tensor](), Noise.rand
    monkeypatch.setattr(Noise, "rand", lambda noise, *shape: draws.append(rand(noise, *shape)) or draws[-1])
    step_of(run_of(tmp_path, "masked", "eval=null"), until=3)
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == len(draws) == 6


def test_a_resumed_run_has_the_noise_and_the_state_of_its_steps(tmp_path: Path) -> None:
    run = run_of(tmp_path, "masked", "checkpoint={every: 1}")
    (full, weights), parts = trained(run), Memory()
    trained(run, parts, until=3)
    resumed, ours = trained(run, Memory(parts.saved))
    assert [*parts.losses, *resumed.losses] == full.losses
    assert same(ours, weights)


def test_a_folder_is_evaluated_with_the_state_of_its_loss(tmp_path: Path) -> None:
    run = run_of(tmp_path, "masked", "eval={every: 4, splits: {val: all}, metrics: [objective]}")
    train_run(run, tmp_path / "out", PLUGINS, command="test")
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    logged = float(lines[-1].split('"val.objective": ')[1].split(",")[0].rstrip("}"))
    options: dict[str, Any] = {"allow_change": False}
    checkpoint = tfkit.spec.folder.model_folder(tmp_path / "out")
    assert evaluate_run(run, checkpoint, PLUGINS, (), (), **options).numbers["val.objective"] == pytest.approx(
        logged, rel=1e-6
    )
    with pytest.raises(SpecError, match="the loss `masked` has a state, which must come from a checkpoint"):
        evaluate_run(run, checkpoint / "model.safetensors", PLUGINS, (), (), **options)
    (checkpoint / "state.json").write_text("{}", encoding="utf-8")
    with pytest.raises(SpecError, match=r"the tensors in .*state\.safetensors` were changed"):
        loss_tensors(checkpoint)


def test_a_frozen_copy_of_a_sharded_model_has_its_weights(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    model = tfkit.build(run.graph, seed=3)
    model.meta[COPY] = lambda: tfkit.build(run.graph, seed=4)
    copy = tfkit.frozen_copy(model.eval())
    assert same(dict(copy.named_parameters()), dict(model.named_parameters()))
    assert not copy.training
    assert not any(parameter.requires_grad for parameter in copy.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("state", "the loss `masked` must change its state only in `after_step`; its `forward` changed `seen`"),
        ("mean", "the loss `masked` must return a sum; got [72]"),
        ("detached", "the loss `masked` must have a gradient; got a value that depends on no trained weight"),
        ("trained", "the loss `masked` must not have trained parameters; got `scale`"),
        ("taken", "the loss must not log `lr`, which the run logs"),
    ],
)
def test_a_loss_that_breaks_its_contract_is_an_error_by_name(fault: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        trained(run_of(tmp_path, f"{{kind: masked, fault: {fault}}}", "eval=null"))
    (error,) = caught.value.diagnostics
    assert error.message.startswith(message) or error.message == message, error.message
    assert error.path == "loss"


def test_a_loss_that_fails_in_an_evaluation_is_an_error_by_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="loss kind `masked` failed in `forward`") as caught:
        trained(run_of(tmp_path, "{kind: masked, fault: evaluation}"))
    assert caught.value.diagnostics[0].notes[0] == "ValueError: no teacher"


def test_check_says_that_a_loss_returns_a_mean(tmp_path: Path) -> None:
    run = run_of(tmp_path, "{kind: masked, fault: average}", "eval=null")
    (outcome,) = outcomes_of(reduced_run(run, PLUGINS), [loss_sums])
    assert outcome.status == "failed"
    assert "a loss must return the sum over what counts, not a mean" in outcome.fault


@pytest.mark.parametrize(
    "prop",
    chosen([finite_steps, step_targets, loss_sums, option_effects, resumed_run, metric_values], [option_effects]),
)
def test_the_properties_of_a_run_hold_for_a_loss_with_noise_and_a_count(prop: Any, tmp_path: Path) -> None:
    (outcome,) = outcomes_of(reduced_run(run_of(tmp_path), PLUGINS), [prop])
    assert (outcome.status, outcome.fault) == ("ok", "")


# ---- inputs of the model that the loss computes ----


def filled_run(folder: Path, *sets: str, loss: str = "shifted") -> Run:
    start, end = RUN.index("  graph:"), RUN.index("    head:")
    path = write_run(folder, RUN[:start] + FILLED + RUN[end:])
    evaluation = "eval={every: 2, splits: {val: 3}, metrics: [objective]}"
    return load_run(path, PLUGINS, sets=[f"loss={loss}", "steps=4", evaluation, *sets])


def test_a_loss_fills_an_input_that_the_data_lacks(tmp_path: Path) -> None:
    run = filled_run(tmp_path)
    gradients, memory = step_of(run)
    assert "val.objective" in memory.lines[0]
    parts, divided = step_of(filled_run(tmp_path, "machine.micro_batch=1"))
    assert divided.losses == pytest.approx(memory.losses, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-6)
    outcomes = [*outcomes_of(reduced_run(filled_run(tmp_path, "eval=null"), PLUGINS), [step_targets, metric_values])]
    assert {(outcome.status, outcome.fault) for outcome in outcomes} == {("ok", "")}


@pytest.mark.parametrize(
    ("loss", "sets", "path", "message", "notes"),
    [
        (
            "{kind: shifted, level: levle}",
            (),
            "loss.level",
            "`levle` must be an input of the model of type `features` that the data lacks",
            ("inputs that the data lacks: level: features",),
        ),
        (
            "{kind: shifted, type: vector}",
            (),
            "loss.level",
            "`level` must be an input of the model of type `vector` that the data lacks",
            ("inputs that the data lacks: level: features",),
        ),
        (
            "masked",
            (),
            "data",
            "the data has the inputs tokens, but the model takes tokens, level",
            (),
        ),
        (
            "shifted",
            ("model.inputs.rest={type: features, width: 16}", "model.sum.inputs=[embedding, level, rest]"),
            "data",
            "the data has the inputs tokens, and the loss `shifted` fills level, but the model takes tokens, level,"
            " rest",
            (),
        ),
        (
            "shifted",
            ("eval.metrics=[objective, accuracy]",),
            "eval.metrics.1",
            "the metric `accuracy` cannot be combined with the loss `shifted`, which alone computes the input `level`"
            " of the model",
            (),
        ),
    ],
)
def test_an_input_that_neither_has_is_one_error(
    loss: str, sets: tuple[str, ...], path: str, message: str, notes: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(SpecError) as caught:
        filled_run(tmp_path, *sets, loss=loss)
    (error,) = caught.value.diagnostics
    assert (error.path, error.message, tuple(error.notes)) == (path, message, notes)


def test_a_callback_does_not_get_the_inputs_that_a_loss_fills(tmp_path: Path) -> None:
    run = filled_run(tmp_path, "callbacks=[{kind: components, every: 2}]")
    with pytest.raises(SpecError, match="only the loss `shifted` computes the input `level` of the model"):
        trained(run)
