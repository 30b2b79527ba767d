"""Flow matching: the loss from its definition, and runs of models that predict velocities."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tfkit
from tfkit.cli import main
from tfkit.errors import SpecError
from tfkit.run.checked_run import Run, load_run
from tfkit.run.kinds.flow_matching import FlowMatchingConfig
from tfkit.run.training.loop import Trainer
from tfkit.run.training.noise import Noise
from tfkit.tools.check.check import outcomes_of
from tfkit.tools.train.check import options
from tfkit.tools.train.check.run_under_test import reduced_run

from ...decoding.test_flow import SEQUENCES, model_of, velocity_of
from ..training.runs import PLUGIN_OPTIONS, WITH_PLUGINS, Memory, same, trained

X = torch.tensor([[0.3, -1.2, 0.8], [1.5, 0.1, -0.4], [-0.7, 0.9, 2.0], [0.2, 0.6, -1.1]])
TARGETS = torch.tensor([3, 0, 4, 2])


def noise_of(rows: range = range(4)) -> Noise:
    return Noise.of(torch.device("cpu"), 5, "loss", 2, rows)


def expected_rows(model: Any, config: FlowMatchingConfig, labels: list[int | None]) -> Tensor:
    """The squared error of each row, written anew from the same random numbers."""
    noise, rows = noise_of(), []
    if config.levels == "uniform":
        levels = noise.rand().tolist()
    else:
        levels = [1 / (1 + math.exp(-(config.mean + config.std * z))) for z in noise.randn().tolist()]
    points = X.to(next(model.parameters()).dtype)
    for x, level, e, label in zip(points, levels, noise.randn(3).to(points.dtype), labels, strict=True):
        velocity = velocity_of(model, x + level * (e - x), level, label, config.scale)
        rows.append(((velocity + x - e) ** 2).sum() / 3)
    return torch.stack(rows)


@pytest.mark.parametrize(
    "fields", [{}, {"scale": 5.0, "label": "label"}, {"levels": "logit_normal", "mean": 0.4, "std": 0.5, "scale": 3.0}]
)
def test_loss_and_gradients_equal_the_definition(fields: dict[str, Any]) -> None:
    config = FlowMatchingConfig(**{"label": "label", **fields})
    model, x = model_of().double(), X.double()
    loss = config.build(model)
    result = loss({"point": x}, TARGETS, noise_of())
    expected = expected_rows(model, config, TARGETS.tolist()).sum()
    assert result.count == 4
    assert result.total.item() == pytest.approx(expected.item(), rel=1e-6)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(result.total, parameters)
    for actual, gradient in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(actual, gradient, rtol=1e-6, atol=1e-6)
    parts = [loss({"point": x[i : i + 1]}, TARGETS[i : i + 1], noise_of(range(i, i + 1))).total for i in range(4)]
    assert torch.stack(parts).sum().item() == pytest.approx(result.total.item(), rel=1e-6)


def test_a_dropped_class_is_no_class_and_only_in_training() -> None:
    model = model_of()
    config = FlowMatchingConfig(label="label", drop=0.15)
    loss = config.build(model)
    with_class, without = (expected_rows(model, config, labels) for labels in (TARGETS.tolist(), [None] * 4))
    noise = noise_of()
    noise.rand(), noise.randn(3)
    dropped = noise.rand() < 0.15
    assert 0 < dropped.sum() < 4
    expected = torch.where(dropped, without, with_class).sum().item()
    assert loss({"point": X}, TARGETS, noise_of()).total.item() == pytest.approx(expected, rel=1e-5)
    evaluated = loss.eval()({"point": X}, TARGETS, noise_of()).total.item()
    assert evaluated == pytest.approx(with_class.sum().item(), rel=1e-5)


def test_padding_does_not_count() -> None:
    model = tfkit.build(tfkit.load(SEQUENCES, plugins=WITH_PLUGINS), seed=3)
    loss = FlowMatchingConfig(scale=1.0).build(model)
    x = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(4))
    mask = torch.arange(6) < torch.tensor([6, 2, 4, 5])[:, None]
    (name,) = (signal.mask for signal in model.meta["graph"].inputs.values() if signal.mask)
    noise = noise_of()
    levels, ends = noise.rand(), noise.randn(6, 3)
    with torch.no_grad():
        velocities = model(point=torch.lerp(x, ends, levels[:, None, None]), time=levels[:, None], **{name: mask})
    rows = [(v - e + p)[m].square().mean() for v, e, p, m in zip(velocities, ends, x, mask, strict=True)]
    result = loss({"point": x, name: mask}, None, noise_of())
    assert result.total.item() == pytest.approx(float(sum(rows)), rel=1e-5)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (None, "the data must have a class for each example"),
        (TARGETS.float(), "the data must have a class for each example"),
        (TARGETS + 1, "the data has the class 5, but `label` has the width 5"),
    ],
)
def test_classes_that_do_not_fit_are_an_error(targets: Tensor | None, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        FlowMatchingConfig(label="label").build(model_of())({"point": X}, targets, noise_of())


@pytest.mark.parametrize(
    ("fields", "message"), [({"drop": 0.2}, "`drop` has no effect"), ({"std": 0.5}, "`std` has no effect")]
)
def test_a_field_without_effect_is_an_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlowMatchingConfig(**fields)


# ---- runs ----

REDUCED = (
    "data.count=60",
    "model.d_model=16",
    "model.d_condition=16",
    "model.encoder.n_layers=1",
    "model.encoder.ffn.d_ff=24",
    "batch.sequences=6",
    "steps=4",
    "schedule.warmup=1",
    "eval={every: 2, splits: {val: all}, metrics: [objective]}",
)


def shapes_run(*sets: str) -> Run:
    return load_run("dit_shapes", WITH_PLUGINS, sets=[*REDUCED, *sets])


def test_a_run_is_divided_and_resumed(tmp_path: Path) -> None:
    (full, weights), parts = trained(shapes_run("checkpoint={every: 1}")), Memory()
    divided, _ = trained(shapes_run("machine.micro_batch=1"))
    for name in ("loss", "val.objective"):
        values, numbers = ([line[name] for line in memory.lines if name in line] for memory in (full, divided))
        assert len(values) >= 3
        assert numbers == pytest.approx(values, rel=1e-6)
    trained(shapes_run("checkpoint={every: 1}"), parts, until=3)
    resumed, restored = trained(shapes_run("checkpoint={every: 1}"), Memory(parts.saved))
    assert [*parts.losses, *resumed.losses] == full.losses
    assert same(restored, weights)


def test_check_sees_the_effect_of_the_options_of_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modulations of a new model are 0, so that times and classes have no effect in the first step."""
    monkeypatch.setattr(options, "OBSERVED", {"loss": options.OBSERVED["loss"]})
    (outcome,) = outcomes_of(reduced_run(shapes_run(), WITH_PLUGINS), [options.option_effects])
    assert (outcome.status, outcome.fault) == ("ok", "")


@pytest.mark.slow
def test_check_passes_on_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "dit_shapes", "--set", "data.count=100", *PLUGIN_OPTIONS]) == 0, capsys.readouterr().out


def test_sizes_that_differ_are_an_error_before_the_first_step() -> None:
    with pytest.raises(SpecError, match="must return one velocity for `patches`, a sequence of 16 positions of width"):
        Trainer(shapes_run("model.noise.d_model=32"), Memory())
    with pytest.raises(SpecError, match="the data has features of width 16, but `patches` of the model takes"):
        shapes_run("model.inputs.patches.width=32")
    with pytest.raises(SpecError, match="the data has 16 positions, but `patches` of the model takes a sequence of 15"):
        shapes_run("model.inputs.patches.length=15")
