"""Span corruption: windows are complete, their spans are random, and a run learns to fill them in."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tfkit.errors import SpecError
from tfkit.run.checked_run import Run, load_run
from tfkit.run.contract import Order
from tfkit.run.kinds.spans import SpanExamples, SpanForm, SpansData, random_parts, span_counts
from tfkit.tools.check.check import outcomes_of
from tfkit.tools.train.check.run_under_test import reduced_run
from tfkit.tools.train.check.step import finite_steps, loss_sums, step_targets

from ..training.runs import PLUGINS, TEXT, trained

RUN = """\
tfkit: 1
name: spans
model:
  extends: t5_small
  d_model: 16
  dropout: 0
  vocab_size: data.vocab_size
  graph:
    encoder: &stack {n_layers: 1, attention: {n_heads: 2, d_head: 8}, ffn: {d_ff: 32}}
    decoder: *stack
data: {kind: spans, files: text.txt}
batch: {sequences: 4, length: 20}
steps: 3
optimizer: {kind: adamw, lr: 3e-3}
"""


def run_of(folder: Path, *sets: str) -> Run:
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    (folder / "run.yaml").write_text(RUN, encoding="utf-8")
    return load_run(folder / "run.yaml", PLUGINS, sets=[*sets])


def spans_of(source: list[int], targets: list[int], form: SpanForm) -> list[int]:
    """Return the window of an example: each sentinel of the source stands for the tokens after it in the targets."""
    assert source[-1] == targets[-1] == form.end
    parts: dict[int, list[int]] = {}
    for token in targets[:-1]:
        if token in form.sentinels:
            parts[token] = []
        else:
            parts[[*parts][-1]].append(token)
    assert [*parts] == [*form.sentinels]
    assert [token for token in source if token in form.sentinels] == [*form.sentinels]
    assert all(parts.values())
    return [token for item in source[:-1] for token in parts.get(item, [item])]


@pytest.mark.parametrize("order", ["sampled", "sequential"])
def test_sources_and_targets_contain_their_window(order: Order, tmp_path: Path) -> None:
    data = run_of(tmp_path, "data.rate=0.3").config.data.build(20)
    assert isinstance(data, SpansData)
    examples = data.examples("train", order)
    size = int(0.9 * len(TEXT))
    assert len(examples) == (size - 19 if order == "sampled" else size // 20)
    alphabet = sorted(set(TEXT))
    indices = np.array([0, 1, 5, len(examples) - 1])
    batch = examples.batch(indices)
    form = data.form
    assert (form.replaced, len(form.sentinels)) == (6, 2)
    assert form.sentinels == (len(alphabet) + 3, len(alphabet) + 2)
    assert (data.start, data.end, data.vocab_size) == (len(alphabet), len(alphabet) + 1, len(alphabet) + 4)
    assert (batch.inputs["target"][:, 0] == data.start).all()
    assert np.array_equal(batch.inputs["target"][:, 1:], batch.targets[:, :-1])
    for index, source, targets in zip(indices, batch.inputs["source"].tolist(), batch.targets.tolist(), strict=True):
        start = index * (1 if order == "sampled" else 20)
        window = spans_of(source, targets, form)
        assert "".join(alphabet[token] for token in window) == TEXT[start : start + 20]
        assert len(source) == form.source_size == 20 - 6 + 2 + 1
        assert source[0] not in form.sentinels  # a window begins with a token that is kept, and ends with a span
        assert source[-2] == form.sentinels[-1]


def test_a_window_has_its_spans_in_every_batch_and_order(tmp_path: Path) -> None:
    data = run_of(tmp_path, "data.rate=0.4").data
    sampled, sequential = (data.examples("train", order) for order in ("sampled", "sequential"))
    first, again = sampled.batch(np.array([40, 3])), sequential.batch(np.array([2]))
    assert np.array_equal(first.targets[0], again.targets[0])
    sources = {tuple(sampled.batch(np.array([3])).inputs["source"][0]) for _ in range(2)}
    assert sources == {tuple(first.inputs["source"][1])}


def test_all_partitions_are_equally_likely() -> None:
    generator = np.random.default_rng(0)
    counts = Counter(tuple(random_parts(6, 3, generator)) for _ in range(6000))
    assert set(counts) == {(a, b, 6 - a - b) for a in range(1, 5) for b in range(1, 6 - a)}
    expected = 6000 / len(counts)
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 27.9  # chi-squared, 9 degrees: 0.1%


@pytest.mark.parametrize(
    ("length", "rate", "span", "counts"),
    [
        (568, 0.15, 3.0, (85, 28)),  # of the paper: inputs of 512 tokens, targets of 114
        (512, 0.5, 3.0, (256, 85)),
        (10, 0.01, 3.0, (1, 1)),
        (10, 0.99, 3.0, (9, 1)),
        (10, 0.6, 1.0, (6, 4)),
    ],
)
def test_counts_of_a_window(length: int, rate: float, span: float, counts: tuple[int, int]) -> None:
    assert span_counts(length, rate, span) == counts
    form = SpanForm(length, counts[0], 0, 1, tuple(range(2, 2 + counts[1])))
    source, targets = form.example(np.arange(100, 100 + length), np.random.default_rng(1))
    assert len(source) == form.source_size
    assert len(source) + len(targets) == length + 2 * (counts[1] + 1)
    assert spans_of(source.tolist(), targets.tolist(), form) == [*range(100, 100 + length)]
    assert SpanExamples(np.arange(3 * length), form, stride=length).positions == 3 * max(len(source), len(targets))


def test_examples_of_short_spans_are_longer_than_their_window(tmp_path: Path) -> None:
    data = run_of(tmp_path, "data.rate=0.5", "data.span=1").config.data.build(20)
    examples = data.examples("train", "sequential")
    batch = examples.batch(np.arange(len(examples)))
    assert batch.inputs["source"].shape[1] == batch.targets.shape[1] == data.length == 21
    assert len(examples) == int(0.9 * len(TEXT)) // 20


def test_a_run_trains_and_passes_its_check(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    memory, _ = trained(run)
    assert len(memory.losses) == 3
    properties = [finite_steps, step_targets, loss_sums]
    outcomes = [*outcomes_of(reduced_run(run, PLUGINS), properties)]
    assert [(outcome.status, outcome.fault) for outcome in outcomes] == [("ok", "")] * len(properties)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.sentinel=extra", "`sentinel` must contain `{}` once"),
        ("data.sentinel=<{}>", "is not a token of the data"),
        ("batch.length=1", "a window must have at least 2 tokens"),
        ("data.rate=1", "`rate` must be a number above 0 and below 1"),
    ],
)
def test_errors(change: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        run_of(tmp_path, change)
