"""The kinds of a run's slots, each compared with its documentation."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import tfkit
from tfkit.decoding.text import load_tokenizer
from tfkit.reference import training
from tfkit.run.contract import IGNORE_INDEX
from tfkit.run.step_values import step_values
from tfkit.run.training.optimizer import groups_of
from tfkit.run.training.order import indices_of, indices_to_evaluate, stream_seed

from .runs import PLUGINS, Memory, small_run, trained


def component_of(slot: str, kind: str, **fields: object) -> tfkit.Component:
    component = PLUGINS.registry.find(slot, kind)
    assert component is not None
    return component.config(**fields)


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "wsd", "inverse_sqrt"])
@pytest.mark.parametrize("warmup", [0, 1, 10, 0.2])
def test_schedules(kind: str, warmup: float) -> None:
    schedule = component_of("schedule", kind, warmup=warmup)
    schedule.check_steps(50)
    factors = [schedule.factor(step, 50) for step in range(1, 51)]
    rise = 10 if warmup in (10, 0.2) else 1
    assert factors[0] == pytest.approx(1 / rise)
    assert factors[rise - 1] == 1
    assert max(factors) == 1
    assert all(first >= two for first, two in zip(factors[rise - 1 :], factors[rise:], strict=False))
    last = {"constant": 1, "cosine": 0.1, "linear": 0, "wsd": 0, "inverse_sqrt": math.sqrt(rise / 50)}
    assert factors[-1] == pytest.approx(last[kind])


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_a_schedule_with_an_end_above_0_is_its_formula(kind: str) -> None:
    schedule = component_of("schedule", kind, warmup=6, end=0.3)
    factors = [schedule.factor(step, 50) for step in range(1, 51)]
    assert factors == pytest.approx([getattr(training, kind)(schedule, step, 50) for step in range(1, 51)])
    assert (factors[0], factors[-1]) == (pytest.approx(1 / 6), pytest.approx(0.3))


def test_wsd_is_stable_before_its_decay() -> None:
    schedule = component_of("schedule", "wsd", decay=10)
    assert [schedule.factor(step, 50) for step in (2, 40, 45, 50)] == pytest.approx([1, 1, 0.5, 0])


def test_additions_are_right_and_apart() -> None:
    data = component_of("data", "addition", digits=2).build(None)
    calls = {}
    for split in data.splits:
        examples = data.examples(split, "sequential")
        batch = examples.batch(np.arange(len(examples)))
        rows = np.concatenate([batch.inputs["tokens"], batch.targets[:, -1:]], axis=1)
        texts = [data.tokenizer.decode(row) for row in rows]
        for text in texts:
            left, right, answer = int(text[:2]), int(text[3:5]), int(text[:5:-1])
            assert left + right == answer
            assert text[2] + text[5] == "+="
        assert (batch.targets[:, :-3] == IGNORE_INDEX).all()
        assert (batch.targets[:, -3:] != IGNORE_INDEX).all()
        calls[split] = set(texts)
    assert not calls["train"] & calls["val"]
    assert len(calls["train"] | calls["val"]) == 10_000


def test_windows_cover_a_text_once(tmp_path: Path) -> None:
    data = small_run(tmp_path).data
    windows = data.examples("val", "sequential")
    batch = windows.batch(np.arange(len(windows)))
    counted = batch.targets[batch.targets != IGNORE_INDEX]
    starts = data.examples("val", "sampled")
    text = [int(starts.batch(np.array([i])).inputs["tokens"][0, 0]) for i in range(len(starts))]
    assert counted[: len(text) - 1].tolist() == text[1:]
    assert len(counted) == len(text) + data.length - 1


@pytest.mark.parametrize("order", ["sampled", "shuffled", "sequential"])
def test_orders(order: str) -> None:
    steps = [indices_of(order, 1, step, step_values(4), examples=10) for step in range(1, 6)]
    drawn = np.concatenate(steps)
    assert drawn.min() >= 0
    assert drawn.max() < 10
    if order != "sampled":
        assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert (drawn[:10].tolist() == list(range(10))) == (order == "sequential")
    assert (indices_of(order, 2, 1, step_values(4), examples=10) == steps[0]).all() == (order == "sequential")
    evaluated = [indices_to_evaluate(split, 1, sequences=4, examples=10).tolist() for split in ("val", "test", "val")]
    assert evaluated[0] == evaluated[2] != evaluated[1]
    assert stream_seed(1, "noise", 1) != stream_seed(1, "noise", 2) != stream_seed(1, "data", 2)


@pytest.mark.parametrize("kind", ["characters", "bytes"])
def test_tokenizers_write_the_file_that_generate_reads(kind: str, tmp_path: Path) -> None:
    text = "Grüße, 3 sheep\n\x00"
    tokenizer = component_of("tokenizer", kind).build(text)
    tokenizer.save(tmp_path / tokenizer.file)
    again = load_tokenizer(tmp_path / tokenizer.file)
    assert again.encode(text) == list(tokenizer.encode(text))
    assert again.vocab_size == tokenizer.vocab_size
    assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text)) == text
    assert sum(tokenizer.byte_counts()[token] for token in tokenizer.encode(text)) == len(text.encode())


def test_metrics_are_sums() -> None:
    logits = torch.randn(4, 4, 5)
    targets = torch.randint(5, (4, 4))
    targets[0, 1:] = IGNORE_INDEX
    targets[1] = logits[1].argmax(-1)
    targets[3] = IGNORE_INDEX
    values = {}
    for kind in ("loss", "accuracy", "exact_match"):
        metric = component_of("metric", kind).build(None)
        sums = []
        for row in range(4):
            positions = [metric.values(logits[row, [t]], targets[row, [t]]) for t in range(4)]
            sums.append(metric.sums(torch.stack(positions, dim=1), targets[row : row + 1]))
        values[kind] = metric.compute(sums[0] + sums[1] + sums[2] + sums[3])
    counted = targets != IGNORE_INDEX
    right = (logits.argmax(-1) == targets) | ~counted
    assert values["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits[counted], targets[counted]).item())
    assert values["accuracy"] == pytest.approx((right & counted).sum().item() / 9)
    assert values["exact_match"] == pytest.approx(right[:3].all(-1).sum().item() / 3)  # the last row counts nowhere


def test_groups(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    model = tfkit.build(run.graph, device="meta")
    names = {parameter: name for name, parameter in model.named_parameters()}
    rules = [{"match": "*attention*", "lr": 0.5}, {"match": "*bias", "weight_decay": 0.3}]
    groups = groups_of(
        model, component_of("optimizer", "sgd", lr=0.1, weight_decay=0.2, groups=tuple(map(rule, rules)))
    )
    actual = {names[parameter]: (g["lr"], g["weight_decay"]) for g in groups for parameter in g["params"]}
    assert set(actual) == set(names.values())
    assert actual["embedding.tokens.weight"] == (0.1, 0.0)
    assert actual["head.output.weight"] == (0.1, 0.2)
    assert actual["decoder.layers.0.attention.output.weight"] == (0.5, 0.2)
    assert actual["decoder.layers.0.attention.output.bias"] == (0.5, 0.3)
    with pytest.raises(tfkit.Invalid, match="no trained parameter matches `\\*atention\\*`") as raised:
        groups_of(model, component_of("optimizer", "sgd", lr=0.1, groups=(rule({"match": "*atention*", "lr": 1.0}),)))
    assert raised.value.field == "groups.0.match"
    assert "`attention`" in str(raised.value.help)


def rule(fields: dict[str, object]) -> object:
    from tfkit.run.contract import GroupConfig

    return GroupConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", ["{kind: sgd, lr: 0.1, momentum: 0.9}", "{kind: sgd, lr: 0.1}"])
def test_sgd_continues(tmp_path: Path, optimizer: str) -> None:
    uninterrupted, _ = trained(small_run(tmp_path, f"optimizer={optimizer}"))
    part, _ = trained(small_run(tmp_path, f"optimizer={optimizer}"), until=3)
    rest, _ = trained(small_run(tmp_path, f"optimizer={optimizer}"), Memory(part.saved))
    assert part.losses + rest.losses == uninterrupted.losses


def test_tensorboard_shows_the_numbers(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = component_of("tracker", "tensorboard").build(tfkit.TrackedRun("small", tmp_path, 0, {}, None))
    tracker.log(1, {"val.loss": 2.5})
    tracker.text(1, "sample", "a\nb")
    tracker.close()
    actual = events.EventAccumulator(str(tmp_path / "tb"))
    actual.Reload()
    assert [(scalar.step, scalar.value) for scalar in actual.Scalars("val/loss")] == [(1, 2.5)]
