"""Real numbers as targets: data `measured`, the loss `regression`, and the metrics mse, mae and r2."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tfkit
from tfkit.errors import SpecError
from tfkit.run.checked_run import Run, load_run
from tfkit.run.contract import Batch
from tfkit.run.kinds.measured import MeasuredConfig
from tfkit.run.kinds.regression import R2, MeanError, Regression, RegressionConfig
from tfkit.run.kinds.text import CharactersConfig
from tfkit.run.training.loop import Trainer
from tfkit.tools.check.check import outcomes_of
from tfkit.tools.train.check.data import _equal_rows, example_independence, metric_values
from tfkit.tools.train.check.options import option_effects
from tfkit.tools.train.check.record import resumed_run
from tfkit.tools.train.check.run_under_test import reduced_run
from tfkit.tools.train.check.step import finite_steps, loss_sums, step_targets

from ...sampling import chosen
from ..training.runs import Memory, trained

PLUGINS = tfkit.load_plugins(entry_points=False)
LAYERS = "attention: {kind: mha, n_heads: 2, position: rope}, ffn: {kind: relu, d_ff: 24}"
ENCODER = f"encoder: {{block: encoder, n_layers: 1, {LAYERS}}}"
POOLED = f"project: {{block: linear, input: x}}, {ENCODER}, pooler: {{block: pooler, select: mean}}"
RUN = """\
tfkit: 1
name: numbers
model: {{d_model: 16, inputs: {{x: {{type: features, width: 1}}}}, graph: {{{graph}}}}}
data: {{kind: measured, files: rows.jsonl, features: x, {data}}}
loss: regression
batch: {{sequences: 5, length: 9}}
steps: 4
optimizer: {{kind: adamw, lr: 1e-2}}
eval: {{every: 4, splits: {{val: all, train: all}}, metrics: [mse, mae, r2, objective]}}
"""


def rows(count: int = 40) -> list[dict[str, Any]]:
    """Return rows of unequal length, with a mean and a standard deviation for each column that differ from 0 and 1."""
    generator = np.random.default_rng(3)
    result = []
    for _ in range(count):
        x = generator.normal(0, 1, int(generator.integers(2, 8)))
        y, z = 900 + 7 * x.sum() + generator.normal(), 0.02 * x.mean() - 3
        each = (50 + 4 * x).tolist()
        result.append({"x": x.tolist(), "y": y, "z": z, "both": [y, z], "each": each, "pairs": [[v, -v] for v in each]})
    return result


def run_of(folder: Path, data: str, n: int = 1, *sets: str, graph: str = POOLED) -> Run:
    path = folder / "run.yaml"
    if not (folder / "rows.jsonl").exists():
        write_rows(folder, rows())
    text = RUN.format(graph=f"{graph}, numbers: {{block: classifier, n_classes: {n}}}", data=data)
    path.write_text(text, encoding="utf-8")
    return load_run(path, PLUGINS, sets=sets)


def write_rows(folder: Path, lines: Sequence[dict[str, Any]]) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def scale(data: Any) -> tuple[Any, Any]:
    """Return the mean and the standard deviation of each number of a target."""
    return np.array(data.mean), np.array(data.std)


def error_of(folder: Path, data: str, n: int = 1, *sets: str, lines: Sequence[dict[str, Any]] | None = None) -> str:
    if lines is not None:
        write_rows(folder, lines)
    with pytest.raises(SpecError) as caught:
        trained(run_of(folder, data, n, *sets))
    return str(caught.value)


POSITION_TARGETS = {"target: each, each_position: true": 1, "target: pairs, each_position: true": 2}
POOLED_TARGETS = {"target: y": 1, "target: [y, z]": 2, "target: both": 2}


@pytest.mark.parametrize("data", [*POOLED_TARGETS, *POSITION_TARGETS])
@pytest.mark.parametrize("size", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_metrics_are_those_of_the_outputs_in_the_units_of_the_data(data: str, size: int, tmp_path: Path) -> None:
    graph = POOLED if data in POOLED_TARGETS else f"project: {{block: linear, input: x}}, {ENCODER}"
    n = (POOLED_TARGETS | POSITION_TARGETS)[data]
    run = run_of(tmp_path, data, n, f"machine.micro_batch={size}", graph=graph)
    trainer = Trainer(run, Memory(), until=0)
    numbers = trainer.evaluate()
    for split in ("val", "train"):
        examples = run.data.examples(split, "sequential")
        targets, outputs = [], []
        for index in range(len(examples)):
            batch = examples.batch(np.array([index]))
            assert batch.targets is not None
            outputs.append(trainer.model(torch.from_numpy(batch.inputs["features"])).detach().reshape(-1, n).numpy())
            targets.append(batch.targets.reshape(-1, n))
        mean, std = scale(run.data)
        y, p = (np.concatenate(part).astype(np.float64) * std + mean for part in (targets, outputs))
        assert numbers[f"{split}.mse"] == pytest.approx(((y - p) ** 2).mean(), rel=1e-5)
        assert numbers[f"{split}.mae"] == pytest.approx(np.abs(y - p).mean(), rel=1e-5)
        r2 = (1 - ((y - p) ** 2).sum(0) / ((y - y.mean(0)) ** 2).sum(0)).mean()
        assert numbers[f"{split}.r2"] == pytest.approx(r2, rel=1e-5)
        z, q = ((part - mean) / std for part in (y, p))
        assert numbers[f"{split}.objective"] == pytest.approx(((z - q) ** 2).mean(), rel=1e-5)


def test_targets_are_standardized_by_the_training_split(tmp_path: Path) -> None:
    data = run_of(tmp_path, "target: [y, z], divide: stored, split: {train: 0.6, val: 0.4}", 2).data
    table = np.array([[row["y"], row["z"]] for row in rows()])
    mean, std = scale(data)
    assert np.allclose(mean, table[:24].mean(0), rtol=1e-12)
    assert np.allclose(std, table[:24].std(0), rtol=1e-12)
    batch = data.examples("val", "sequential").batch(np.array([3, 11]))
    assert batch.targets is not None
    assert np.allclose(batch.targets * std + mean, table[[27, 35]], rtol=1e-6)
    plain = run_of(tmp_path, "target: both, standardize: false, divide: stored, split: {train: 0.6, val: 0.4}", 2).data
    batch = plain.examples("val", "sequential").batch(np.array([3, 11]))
    assert np.array_equal(batch.targets, table[[27, 35]].astype(np.float32))


@pytest.mark.parametrize("data", POSITION_TARGETS)
def test_targets_at_padding_do_not_count(data: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, data, POSITION_TARGETS[data], graph=f"project: {{block: linear, input: x}}, {ENCODER}")
    batch = run.data.examples("train", "sequential").batch(np.arange(6))
    assert batch.targets is not None
    mask = batch.masks["features"]
    assert batch.count == mask.sum() < mask.size
    assert np.array_equal(np.isnan(batch.targets).reshape(*mask.shape, -1).any(-1), ~mask)


@pytest.mark.parametrize("form", ["mse", "mae", "{form: huber, delta: 0.3}"])
@pytest.mark.parametrize("data", ["target: [y, z]", "target: pairs, each_position: true"])
def test_the_loss_and_its_gradients_are_those_of_torch(form: str, data: str, tmp_path: Path) -> None:
    graph = POOLED if "[" in data else f"project: {{block: linear, input: x}}, {ENCODER}"
    loss = form.replace("{", "{kind: regression, ") if "{" in form else f"{{kind: regression, form: {form}}}"
    run = run_of(tmp_path, data, 2, f"loss={loss}", "machine.micro_batch=2", "eval=null", graph=graph)
    memory = Memory()
    trainer = Trainer(run, memory, until=1)
    trainer.train()
    gradients = [parameter.grad for parameter in trainer.model.parameters()]
    fresh = Trainer(run, Memory())
    batch = fresh.batch(1)
    assert batch.targets is not None
    masks = {"x_mask": torch.from_numpy(batch.masks["features"])}
    outputs = fresh.model(torch.from_numpy(batch.inputs["features"]), **masks)
    targets = torch.from_numpy(batch.targets)
    real = ~targets.isnan()
    functions = {"mse": F.mse_loss, "mae": F.l1_loss}
    function: Any = functions.get(form, partial(F.huber_loss, delta=0.3))
    expected = function(outputs[real], targets[real])
    expected.backward()
    assert memory.losses == pytest.approx([expected.item()], rel=1e-6)
    for gradient, parameter in zip(gradients, fresh.model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-6)


def test_the_tokenizer_of_texts_has_the_characters_of_all_splits(tmp_path: Path) -> None:
    write_rows(tmp_path, [{"words": "abc" if row < 6 else "xyzw", "y": float(row)} for row in range(10)])
    files: dict[str, Any] = {"files": str(tmp_path / "rows.jsonl"), "split": {"train": 0.6, "val": 0.4}}
    config = MeasuredConfig(**files, divide="stored", text="words", tokenizer=CharactersConfig(), target="y")
    data: Any = config.build(9)
    assert data.vocab_size == 7
    batch = data.examples("val", "sequential").batch(np.array([3]))
    assert data.tokenizer.decode(batch.inputs["tokens"][0]) == "xyzw"


class Outputs(torch.nn.Module):
    """A model that returns its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_position_that_lacks_one_of_its_numbers_counts_nowhere(tmp_path: Path) -> None:
    """The data of a plugin may lack a single number of a position; padding lacks all of them."""
    data = run_of(tmp_path, "target: [y, z]", 2).data
    outputs, targets = torch.randn(2, 4, 5, 2, generator=torch.Generator().manual_seed(4)).unbind()
    targets[0, 1, 0] = targets[2, 3, 1] = targets[1, 2:] = math.nan
    counted = ~(targets.isnan()[..., 0] | targets.isnan()[..., 1])
    errors = (outputs - targets)[counted].square()
    result = Regression(cast(Any, Outputs()), RegressionConfig())({"x": outputs}, targets)
    assert (result.count, result.total.item()) == (15, pytest.approx(errors.mean(-1).sum().item(), rel=1e-5))
    sums = MeanError(data, 2).sums(outputs - targets, targets)
    scaled = errors.double() * torch.tensor(data.std, dtype=torch.float64).square()
    assert (sums.count, sums.total) == (30, pytest.approx(scaled.sum().item(), rel=1e-5))
    assert R2(data).sums(outputs - targets, targets).count == 15


def test_r2_adds_up_over_batches_of_a_large_mean(tmp_path: Path) -> None:
    data = run_of(tmp_path, "target: y").data
    generator = torch.Generator().manual_seed(5)
    numbers = 1e6 + torch.randn(60, 1, 1, generator=generator, dtype=torch.float64)
    errors = 0.4 * torch.randn(60, 1, 1, generator=generator, dtype=torch.float64)
    metric = R2(data)
    parts = [metric.sums(errors[i:j], numbers[i:j]) for i, j in ((0, 7), (7, 7), (7, 40), (40, 60))]
    got = metric.compute(parts[0] + parts[1] + parts[2] + parts[3])
    expected = 1 - errors.square().sum() / (numbers - numbers.mean()).square().sum()
    assert got == pytest.approx(expected.item(), rel=1e-7)


def test_a_run_learns_numbers(tmp_path: Path) -> None:
    graph = f"project: {{block: linear, input: x}}, {ENCODER}"
    sets = ("steps=60", "eval.every=60", "eval.metrics=[r2]")
    memory = Memory()
    trained(run_of(tmp_path, "target: each, each_position: true", 1, *sets, graph=graph), memory)
    scores = [line["val.r2"] for line in memory.lines if "val.r2" in line]
    assert scores[-1] > 0.9 > scores[0]


PROPERTIES = [finite_steps, step_targets, loss_sums, resumed_run, metric_values, example_independence]
QUICK_CASES = [*product(["pooled"], PROPERTIES), ("positions", step_targets), ("positions", example_independence)]


@pytest.mark.parametrize(("graph", "check"), chosen(product(["pooled", "positions"], PROPERTIES), QUICK_CASES))
def test_the_properties_of_a_run_hold_for_real_targets(graph: str, check: Any, tmp_path: Path) -> None:
    if graph == "pooled":
        run = run_of(tmp_path, "target: [y, z]", 2)
    else:
        layers = f"project: {{block: linear, input: x}}, {ENCODER}"
        run = run_of(tmp_path, "target: each, each_position: true", 1, graph=layers)
    (outcome,) = outcomes_of(reduced_run(run, PLUGINS), [check])
    assert (outcome.status, outcome.fault) == ("ok", ""), outcome


def test_check_reads_rows_that_are_longer_than_a_reduced_run(tmp_path: Path) -> None:
    line = {"x": [0.5] * 17, "y": 3.25}
    write_rows(tmp_path, [*rows(), line])
    run = run_of(tmp_path, "target: y", 1, "batch.length=20")
    subject = reduced_run(run, PLUGINS)
    assert subject.run.data.length == 20
    (outcome,) = outcomes_of(subject, [option_effects])
    assert (outcome.status, outcome.fault) == ("ok", ""), outcome


def test_check_compares_rows_with_different_padding() -> None:
    def row(targets: Sequence[float], values: Sequence[float], length: int) -> Batch:
        target, x = np.full((1, length), np.nan, np.float32), np.zeros((1, length, 1), np.float32)
        target[0, :3], x[0, :3, 0] = targets, values
        mask = np.arange(length)[None] < 3
        return Batch({"x": x}, target, masks={"x": mask} if length > 3 else {}, counted=mask)

    assert _equal_rows(row([2, 5, 3], [7, 8, 9], 3), row([2, 5, 3], [7, 8, 9], 5))
    assert not _equal_rows(row([2, 5, 3], [7, 8, 9], 3), row([2, 5, 4], [7, 8, 9], 5))
    assert not _equal_rows(row([2, 5, 3], [7, 8, 9], 3), row([2, 5, 3], [7, 8, 6], 5))
    assert _equal_rows(row([2, 5, 3], [7, 8, 9], 5), row([2, 5, 3], [7, 8, 9], 5))


def changed(index: int, **values: Any) -> list[dict[str, Any]]:
    lines = rows()
    lines[index] |= values
    return lines


@pytest.mark.parametrize(
    ("data", "n", "sets", "lines", "message"),
    [
        ("target: y", 1, (), changed(4, y="tall"), "line 5: column `y` must be a number, or a list of numbers; got"),
        ("target: y", 1, (), changed(4, y=float("nan")), "line 5"),
        ("target: y", 1, (), changed(4, y=1e39), "line 5: column `y` must be a number"),
        ("target: y", 1, (), changed(4, y=[3.5]), "line 5: column `y` must be a number, as in the first row"),
        ("target: both", 2, (), changed(4, both=[3.5]), "line 5: column `both` must be 2 numbers, as in the first row"),
        ("target: each, each_position: true", 1, (), changed(4, each=[3.5]), "one for each position"),
        ("target: y", 1, (), [row | {"y": 0.1} for row in rows()], "must have different numbers in the split `train`"),
        ("target: [y, z], each_position: true", 2, (), None, "`target` must be a single column"),
        ("target: y", 1, ("eval.metrics=[accuracy]",), None, "`accuracy` needs targets that are ids; the data"),
        ("target: y", 1, ("eval.metrics=[loss]",), None, "the metric `loss` needs targets that are ids"),
        ("target: y", 2, (), None, "target numbers in a batch, but the model returns"),
        ("target: y", 2, ("eval=null",), None, "the targets have the shape [5], but the model returns [5, 2]"),
        ("target: y", 1, ("model.graph.numbers.squeeze=true",), None, "with an axis for the numbers of a target"),
        ("target: y", 1, ("loss={kind: regression, delta: 2}",), None, "`delta` has no effect: `form` is mse"),
        ("target: y", 1, ("loss=cross_entropy", "eval=null"), None, "the loss `cross_entropy` needs targets"),
    ],
)  # fmt: skip
def test_errors(data: str, n: int, sets: tuple[str, ...], lines: Any, message: str, tmp_path: Path) -> None:
    assert message in error_of(tmp_path, data, n, *sets, lines=lines)


def test_ids_are_an_error_when_the_run_is_read(tmp_path: Path) -> None:
    write_rows(tmp_path, [row | {"word": "tall" if row["y"] > 900 else "short"} for row in rows()])
    data = f"data={{kind: labelled, files: {tmp_path}/rows.jsonl, features: x, target: word}}"
    with pytest.raises(SpecError, match="the loss `regression` needs targets that are real numbers; the data has ids"):
        run_of(tmp_path, "target: y", 2, data, "eval=null")
