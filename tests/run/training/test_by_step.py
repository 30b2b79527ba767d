"""Numbers of the model and of the loss, and lengths, that change by step."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tfkit
from tests.run.training.launches import forked, options
from tests.run.training.runs import PLUGINS, Memory, same, small_run, trained, write_run
from tfkit.building.builder import build
from tfkit.cli import main
from tfkit.components.context import AttentionContext
from tfkit.errors import SpecError
from tfkit.run.checked_run import Run, load_run
from tfkit.run.contract import Callback, Training
from tfkit.run.training.changing import ChangingValues
from tfkit.run.training.loop import Trainer
from tfkit.run.training.order import indices_of
from tfkit.run.training.processes import check_count
from tfkit.tools.check.check import outcomes_of
from tfkit.tools.trace.attention_weights import attention_weights
from tfkit.tools.train.check.data import epoch_order
from tfkit.tools.train.check.run_under_test import Half, reduced_run
from tfkit.tools.train.check.step import numbers_of_steps
from tfkit.tools.train.plan import run_plan

MODEL = (
    "model.decoder.attention={kind: mha, n_heads: 2, mask: {left: 8, right: 0}, position: rope}",
    "model.graph.embedding=embedding",
    "model.decoder.ffn.dropout=0.05",
    "loss={kind: cross_entropy, outputs: {head: {weight: 1.0}}}",
)
BATCH = "batch={sequences: {at: {0: 2, 3: 4, 5: 6}}, length: {at: {0: 5, 2: 12, 6: 8}}}"
WINDOW = "model.decoder.attention.mask.left: {at: {0: 3, 4: 7, 6: 5}}"
DROPOUT = "model.dropout: {from: 0.2, to: 0, over: 5}"
WEIGHTS = "loss.outputs.head.weight: {from: 1.0, to: 0.5, over: 0.5}, loss.z_loss: {at: {0: 0.1, 3: 0, 6: 0.05}}"
SCHEDULES = (
    *MODEL,
    BATCH,
    f"by_step={{{WINDOW}, {DROPOUT}, {WEIGHTS}}}",
    "schedule={kind: wsd, warmup: 2, decay: 3}",
    "eval={every: 2, splits: {val: 2}, metrics: [loss, objective]}",
)
LENGTHS = [5, 5, 12, 12, 12, 12, 8, 8]
SIZES = [2, 2, 2, 4, 4, 6, 6, 6]


def window_of(model: nn.Module) -> int | None:
    (left,) = {module.left for module in model.modules() if isinstance(module, AttentionContext)}
    return left


class Recorder(Callback):
    """The values of the modules after each step."""

    def __init__(self) -> None:
        self.values: list[tuple[Any, ...]] = []

    def on_step(self, training: Training, numbers: Mapping[str, float]) -> None:
        assert isinstance(training, Trainer)
        context = window_of(training.model)
        layer: Any = training.model.decoder.layers[1]  # type: ignore[union-attr, index]
        rates = [training.model.embedding.dropout.p, layer.attention.core.dropout]  # type: ignore[union-attr]
        assert set(rates) == {layer.attention_dropout.p} == {layer.ffn_dropout.p}
        weight = numbers["loss"] / numbers["head.loss"]
        self.values.append((context, round(rates[0], 6), round(weight, 4), training.loss.z_loss))
        assert layer.ffn.dropout.p == 0.05


def test_a_step_has_its_numbers(tmp_path: Path) -> None:
    recorder = Recorder()
    trained(small_run(tmp_path, *SCHEDULES), watchers=[recorder])
    assert recorder.values == [
        (3, 0.2, 1.0, 0.1),
        (3, 0.16, 0.875, 0.1),
        (3, 0.12, 0.75, 0.1),
        (3, 0.08, 0.625, 0.0),
        (7, 0.04, 0.5, 0.0),
        (7, 0.0, 0.5, 0.0),
        (5, 0.0, 0.5, 0.05),  # the weight does not change at this step
        (5, 0.0, 0.5, 0.05),
    ]


def test_a_length_cuts_windows(tmp_path: Path) -> None:
    run = small_run(tmp_path, *SCHEDULES, "data.order=sequential")
    trainer, examples = Trainer(run, Memory()), run.data.examples("train", "sequential")
    for step in range(1, 9):
        batch, full = trainer.batch(step), examples.batch(indices_of("sequential", 3, step, run.sizes, examples=10**6))
        assert (batch.inputs["tokens"] == full.inputs["tokens"][:, : LENGTHS[step - 1]]).all()
        assert (batch.ids == full.ids[:, : LENGTHS[step - 1]]).all()
        assert batch.size == SIZES[step - 1]
    data = tfkit.data({"extends": str(tmp_path / "small.yaml")}, sets=[*MODEL, BATCH]).train
    assert [data.batch(step).inputs["tokens"].shape for step in range(1, 9)] == [*zip(SIZES, LENGTHS, strict=True)]


def test_tokens_and_flops_equal_a_count_by_hand(tmp_path: Path) -> None:
    run = small_run(tmp_path, *SCHEDULES)
    # 2 + 2 examples of 5 positions, 2 + 4 + 4 + 6 of 12, and 6 + 6 of 8.
    tokens = (2 + 2) * 5 + (2 + 4 + 4 + 6) * 12 + (6 + 6) * 8
    # Two layers have four matrices of 16 x 16 and two of 16 x 32, the head has 16 x 27. Scores and values have 2 x 16
    # products for each pair of positions. A product takes 2 FLOPs, and the backward pass twice as many as the forward.
    weights, pairs = 2 * (4 * 16 * 16 + 2 * 16 * 32) + 16 * 27, 2 * 2 * 16
    of_5, of_12, of_8 = (3 * 2 * (weights * n + pairs * n * n) for n in (5, 12, 8))
    plan = run_plan(run)
    assert plan.tokens == tokens == 308
    assert plan.flops == 4 * of_5 + 16 * of_12 + 12 * of_8
    assert run.tokens_before(4) == 2 * 5 + 2 * 5 + 2 * 12
    before = load_run(tmp_path / "small.yaml", PLUGINS, sets=[*MODEL, BATCH, "steps=null", "tokens=213"])
    assert before.steps == 7  # 212 after 6 steps, 48 in the next
    sets, counted = [*MODEL, BATCH, "steps=null", f"flops={4 * of_5 + 16 * of_12 + 1}"], {5: of_5, 12: of_12, 8: of_8}
    flops = load_run(tmp_path / "small.yaml", PLUGINS, sets=sets, count=lambda graph, n, length: n * counted[length])
    assert flops.steps == 7


@pytest.mark.slow
def test_evaluations_use_the_full_length_and_the_numbers_of_the_step_before(tmp_path: Path) -> None:
    run = small_run(tmp_path, *SCHEDULES)
    memory, _ = trained(run)
    objectives = {line["step"]: line["val.objective"] for line in memory.lines if "val.objective" in line}
    losses = {line["step"]: line["val.loss"] for line in memory.lines if "val.loss" in line}
    assert objectives[6] == pytest.approx(0.5 * losses[6])  # no z-loss any more
    fixed = (*MODEL, "model.dropout=0.2", "model.decoder.attention.mask.left=3", "batch={sequences: 6, length: 12}")
    start, _ = trained(small_run(tmp_path, *fixed, "eval={every: 2, splits: {val: 2}, metrics: [loss]}"), until=1)
    assert losses[0] == start.lines[0]["val.loss"]


@pytest.mark.slow
def test_micro_batches_have_equal_losses(tmp_path: Path) -> None:
    sets = (*MODEL[:2], MODEL[3], BATCH, f"by_step={{{WINDOW}, {WEIGHTS}}}")
    single, full = (trained(small_run(tmp_path, *sets, size))[0] for size in ("machine.micro_batch=1", "clip=1e9"))
    assert single.losses == pytest.approx(full.losses, abs=1e-6)


@pytest.mark.slow
def test_a_checkpoint_describes_the_model_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    sets = options(*SCHEDULES, "checkpoint={every: 3, last: 9}")
    assert main(["train", "small.yaml", "-o", "out", *sets]) == 0
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    windows = [tfkit.load(f"out/step-{step}").node("decoder").config.attention.mask.left for step in (3, 6, 8)]
    assert windows == [3, 7, 5]
    assert tfkit.load("out/step-8").node("decoder").config.dropout == 0
    numbers = {step: tfkit.evaluate("out/run.yaml", weights=f"out/step-{step}") for step in (3, 6, 8)}
    assert numbers[8] == tfkit.evaluate("out")
    ratios = {step: number["val.objective"] / number["val.loss"] for step, number in numbers.items()}
    assert ratios[6] == pytest.approx(0.5)
    assert ratios[8] > 0.55  # with the z-loss
    assert any(line.get("step") == 8 and "val.loss" in line for line in lines)
    run, again = load_run("out/run.yaml", PLUGINS), load_run("small.yaml", PLUGINS, sets=SCHEDULES)
    assert run.semantics.values["by_step.model.graph.decoder.attention.dropout.over"] == 5
    assert load_run("out/run.yaml", PLUGINS, sets=["checkpoint={last: 2}"]).digest == again.digest


def test_values_in_the_spec_are_replaced(tmp_path: Path) -> None:
    change = f"by_step={{{WINDOW}}}"
    runs = [small_run(tmp_path, *MODEL, f"model.decoder.attention.mask.left={n}", change) for n in (2, 9)]
    assert runs[0].digest == runs[1].digest != small_run(tmp_path, *MODEL, "by_step={}").digest
    assert [run.graph.node("decoder").config.attention.mask.left for run in runs] == [7, 7]  # type: ignore[attr-defined]


def test_attention_weights_follow_a_window(tmp_path: Path) -> None:
    run = small_run(tmp_path, *SCHEDULES)
    model = build(run.graph, seed=4)
    values, tokens = ChangingValues(run, model), torch.arange(10)[None]
    for step, window in ((1, 3), (5, 7)):
        values.apply(step)
        weights = attention_weights(model, tokens)["decoder.layers.0.attention"]
        assert ((weights[0, 0, -1] > 0).sum(), int(weights[0, 0, -1].nonzero()[0])) == (window + 1, 9 - window)


KIND = '''"""A kind whose module keeps a rate in another form."""

from typing import Literal

import tfkit
from torch import nn


class KeepsConfig(tfkit.FFNConfig):
    kind: Literal["keeps"] = "keeps"
    rate: tfkit.Changeable[tfkit.PositiveFloat] = 0.5
    fixed: tfkit.PositiveFloat = 0.5

    def build(self, make: tfkit.Make) -> nn.Module:
        return Keeps(self.rate)


class Keeps(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.{name} = {value}

    def forward(self, x):
        return x * self.{name}


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    register(KeepsConfig)
'''


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rate", "rate", None),
        ("_twice", "2 * rate", "with 0.45 in place of 0.9, `decoder.layers.0.ffn._twice` of the model changes as well"),
        ("rates", "[rate]", "with 0.45 in place of 0.9, more of the model changes: decoder.layers.0.ffn.rates"),
    ],
)
def test_modules_must_keep_the_number(tmp_path: Path, name: str, value: str, words: str | None) -> None:
    (tmp_path / "keeps.py").write_text(KIND.format(name=name, value=value), encoding="utf-8")
    plugins = tfkit.load_plugins(plugin_dirs=[tmp_path / "keeps.py"], entry_points=False)
    path, sets = (
        write_run(tmp_path),
        ["model.decoder.ffn=keeps", "by_step={model.decoder.ffn.rate: {at: {0: 0.9, 2: 0.3}}}"],
    )
    run = load_run(path, plugins, sets=sets)
    if words is not None:
        with pytest.raises(SpecError) as error:
            ChangingValues(run, build(run.graph, device="meta"))
        assert words in str(error.value)
    with pytest.raises(SpecError, match=r"`model.decoder.ffn.fixed` cannot change by step"):
        load_run(path, plugins, sets=[sets[0], "by_step={model.decoder.ffn.fixed: {at: {0: 0.9, 2: 0.3}}}"])


def test_a_flag_is_not_the_number_that_it_equals(tmp_path: Path) -> None:
    """True equals 1: a flag of the module would become a number, and true for every later value but 0."""
    text = KIND.format(name="rate, self.flag", value="rate, rate > 0").replace("tfkit.PositiveFloat] = 0.5", "int] = 1")
    (tmp_path / "keeps.py").write_text(text, encoding="utf-8")
    plugins = tfkit.load_plugins(plugin_dirs=[tmp_path / "keeps.py"], entry_points=False)
    sets = ["model.decoder.ffn=keeps", "by_step={model.decoder.ffn.rate: {at: {0: 1, 2: 0}}}"]
    run = load_run(write_run(tmp_path), plugins, sets=sets)
    with pytest.raises(SpecError, match=r"with 0 in place of 1, `decoder.layers.0.ffn.flag` of the model changes"):
        ChangingValues(run, build(run.graph, device="meta"))


def test_a_loss_must_have_the_number_as_an_attribute(tmp_path: Path) -> None:
    run = small_run(tmp_path, *MODEL, "by_step={loss.z_loss: {at: {0: 0.1, 4: 0.2}}}")
    model = build(run.graph)
    loss = run.config.loss.build(model)
    del loss.z_loss
    with pytest.raises(SpecError, match="the loss `cross_entropy` must have the attribute `z_loss`"):
        ChangingValues(run, model).follow(loss)


def test_a_copy_of_the_model_in_the_loss_follows(tmp_path: Path) -> None:
    run = small_run(tmp_path, *SCHEDULES)
    model, loss = build(run.graph), torch.nn.Module()
    loss.teacher, loss.z_loss = tfkit.frozen_copy(model), 0.1
    values = ChangingValues(run, model)
    values.follow(loss)
    values.apply(7)
    assert window_of(loss.teacher) == window_of(model) == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model.decoder.n_layers: {at: {0: 2, 4: 3}}", "`model.decoder.n_layers` cannot change by step"),
        ("model.d_model: {at: {0: 16, 4: 32}}", "it decides `model.graph.embedding.d_model`"),
        ("model.decoder.dropot: {at: {0: 0.1, 4: 0.2}}", "unknown key `dropot`"),
        ("optimizer.lr: {at: {0: 0.1, 4: 0.2}}", "use `schedule` for rates"),
        ("batch.length: {at: {0: 4, 4: 8}}", "write a change of the batch in its place"),
        ("clip: {at: {0: 4, 4: 8}}", "numbers that may change: batch.sequences, batch.length, loss.label_smoothing"),
        ("loss: {at: {0: 4, 4: 8}}", "`loss` cannot change by step"),
        ("model.decoder.dropout: {at: {0: 0.1, 4: 1.5}}", "must be a number of at least 0 and below 1; got 1.5"),
        ("model.decoder.attention.mask.left: {from: 3.5, to: 7, over: 3}", "must be an integer from 0"),
        ("model.decoder.dropout: {at: {0: 0.1, 4: 0.1}}", "has no effect"),
        ("model.decoder.dropout: {at: {0: 0.1, 14: 0.2}}", "the change after 14 steps has no effect"),
        ("model.decoder.dropout: {from: 0.1, to: 0.2, over: 9}", "the change after 9 steps has no effect"),
        ("model.decoder.dropout: {at: {0: 0.1, 4: x}}", "the value must be a number of at most 1,048,576; got x"),
        ("model.decoder.dropout: {from: 0.1, to: 0.2}", "must have `at`, or `from`, `to` and `over`"),
        ("model.decoder.dropout: {at: {0: 0.1, 4: 0.2, 0.5: 0.3}}", "steps must increase; got 4 after 4"),
        ("model.decoder.dropout: 3", "must be a mapping; got 3"),
        (
            "model.decoder.dropout: {at: {0: 0.1, 4: 0.2}}, model.graph.decoder.dropout: {at: {0: 0.1, 4: 0.3}}",
            "must change by a single entry; got `model.decoder.dropout` and `model.graph.decoder.dropout`",
        ),
    ],
)
def test_errors(change: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as error:
        small_run(tmp_path, *MODEL, f"by_step={{{change}}}")
    assert words in str(error.value).replace("\n     ", " ")


@pytest.mark.parametrize("step", ["4", "0.5"])
def test_the_value_of_a_step_is_located(step: str, tmp_path: Path) -> None:
    change = f"by_step={{model.decoder.dropout: {{at: {{0: 0.1, {step}: wide}}}}}}"
    with pytest.raises(SpecError) as error:
        small_run(tmp_path, *MODEL, change)
    assert f"--set:1:{change.index(f'{step}: wide') + 1} " in str(error.value)


def test_limits(tmp_path: Path) -> None:
    small_run(tmp_path, *MODEL, "by_step={model.decoder.dropout: {from: 0, to: 0.1, over: 1.0}}")
    for sets, words in [
        (
            ["data={kind: addition, digits: 2}", "batch={sequences: 2, length: {at: {0: 4, 2: 6}}}"],
            "`length` has no eff",
        ),
        (["batch.length={at: {0: 4, 9: 6}}"], "the change after 9 steps has no effect"),
        (["batch.length={from: 4, to: 90, over: 6}", "steps=200"], None),
        (["batch.length={from: 4, to: 90, over: 160}", "steps=200"], "at most 64 different values; got 87"),
        (["batch.length={at: {0: 4, 0.5: 6}}", "steps=null", "tokens=99"], "must be combined with `steps`"),
        ([f"by_step={{{WEIGHTS}}}", "steps=null", "tokens=99"], "must be combined with `steps`"),
        ([f"by_step={{{DROPOUT}}}", "machine.compile=true"], "more than 4 different values of `by_step`"),
        ([f"by_step={{{WINDOW}}}", "machine.compile=layers"], None),
    ]:
        if words is None:
            small_run(tmp_path, *MODEL, *sets)
            continue
        with pytest.raises(SpecError) as error:
            small_run(tmp_path, *MODEL, *sets)
        assert words in str(error.value).replace("\n     ", " ")
    with pytest.raises(SpecError, match="`by_step` has no effect in a training loop outside of tfkit"):
        tfkit.data({"extends": str(tmp_path / "small.yaml")}, sets=SCHEDULES).build_model()
    with pytest.raises(SpecError, match="a batch of 2 sequences cannot be divided among 3"):
        check_count(small_run(tmp_path, *SCHEDULES), 3)


def test_processes_share_cut_examples(tmp_path: Path) -> None:
    halves = [Trainer(small_run(tmp_path, *SCHEDULES), Memory(), processes=Half(rank)) for rank in (0, 1)]
    assert [[half.batch(step).inputs["tokens"].shape for half in halves] for step in (1, 4, 7)] == [
        [(1, 5)] * 2,
        [(2, 12)] * 2,
        [(3, 8)] * 2,
    ]


@pytest.mark.slow
def test_check_measures_the_numbers_of_steps(tmp_path: Path) -> None:
    subject = reduced_run(small_run(tmp_path, *SCHEDULES), PLUGINS)
    assert subject.run.config.batch.length == {"at": {"0": 12, "3": 6}}
    left = ("model", "graph", "decoder", "attention", "mask", "left")
    assert subject.run.by_step[left].values[0] == subject.run.by_step[left].values[1] + 1
    assert [outcome.status for outcome in outcomes_of(subject, [numbers_of_steps])] == ["ok"]
    assert [outcome.status for outcome in outcomes_of(subject, [epoch_order])] == ["ok"]
    constant = reduced_run(small_run(tmp_path, *MODEL), PLUGINS)
    assert [outcome.status for outcome in outcomes_of(constant, [numbers_of_steps])] == ["does not apply"]


def run_of_20_steps(folder: Path) -> Run:
    changes = f"by_step={{{WINDOW}, model.dropout: {{from: 0.2, to: 0, over: 15}}, {WEIGHTS}}}"
    batch = "batch={sequences: {from: 2, to: 6, over: 12}, length: {at: {0: 5, 7: 12, 0.8: 8}}}"
    return small_run(folder, *SCHEDULES[:4], *SCHEDULES[6:], changes, batch, "steps=20")


@pytest.mark.slow
def test_a_run_that_stops_at_random_steps_has_equal_bits(tmp_path: Path) -> None:
    run = run_of_20_steps(tmp_path)
    full, weights = trained(run)
    stops = sorted(random.Random(5).sample(range(1, 20), 9))
    memory, lines = Memory(), []
    for stop in (*stops, None):
        memory, resumed = trained(run, Memory(memory.saved), until=stop)
        lines += memory.lines
    assert lines == full.lines
    assert same(resumed, weights)


@pytest.mark.slow
def test_two_processes_have_equal_losses(tmp_path: Path) -> None:
    write_run(tmp_path)
    sets = options(
        *MODEL[:2], MODEL[3], BATCH, *SCHEDULES[6:], f"by_step={{{WINDOW}, {WEIGHTS}}}", "checkpoint.every=5"
    )
    losses = []
    for processes in (1, 2):
        forked(tmp_path, processes, "small.yaml", "-o", f"of-{processes}", *sets)
        text = (tmp_path / f"of-{processes}" / "metrics.jsonl").read_text(encoding="utf-8")
        losses.append([value for line in text.splitlines() for value in json.loads(line).values()])
        assert tfkit.load(tmp_path / f"of-{processes}" / "step-5").node("decoder").config.attention.mask.left == 7
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


def test_positions_that_the_loss_adds_are_counted_at_each_length(tmp_path: Path) -> None:
    sets = ["model.vocab_size=data.vocab_size + 1", "model.decoder.block=encoder", "loss=masked_diffusion"]
    run = small_run(tmp_path, *sets, "batch={sequences: 4, length: {at: {0: 6, 3: 11}}}", "steps=5")
    assert run.examples_by_length == {7: 12, 12: 8}
    assert run.tokens_before(6) == 3 * 4 * 6 + 2 * 4 * 11


def test_packed_windows_are_cut_with_their_documents(tmp_path: Path) -> None:
    write_run(tmp_path)
    packed = f'data={{kind: packed, of: {{kind: text, files: {tmp_path / "sheep.txt"}}}, separator: " "}}'
    run = small_run(tmp_path, *MODEL[:2], packed, "batch={sequences: 3, length: {at: {0: 5, 2: 12}}}", "steps=3")
    batch = run.data.examples("train", "sequential").batch(np.arange(3))
    documents = run.cut(batch, 1).documents
    assert batch.documents is not None
    assert np.array_equal(documents, batch.documents[:, :5])
    assert len(np.unique(batch.documents[0, :5])) > 1
    assert len([line for line in trained(run)[0].lines if "loss" in line]) == 3
