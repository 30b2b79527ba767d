"""Copying and recall: every example satisfies the rules of its task, as an independent checker verifies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tfkit.run.contract import IGNORE_INDEX, Data

from .small import refused, small_run

ANSWERS: dict[str, Callable[[list[int]], list[int]]] = {
    "copy": list,
    "reverse": lambda items: list(reversed(items)),
    "sort": sorted,
}
STACK = "n_layers: 1, attention: {kind: mha, n_heads: 2}, ffn: {kind: relu, d_ff: 32}"
PAIR = f"""model={{inputs: [source, target], vocab_size: data.vocab_size, d_model: 16, graph: {{
  source_embedding: {{block: embedding, input: source, position: sinusoidal}},
  encoder: {{block: encoder, {STACK}}},
  target_embedding: {{block: embedding, input: target, position: sinusoidal}},
  decoder: {{block: decoder, input: target_embedding, memory: encoder, {STACK}}},
  logits: lm_head}}}}"""


def rows_of(data: Data, split: str) -> tuple[dict[str, list[list[int]]], list[list[int]]]:
    """The inputs and targets of a whole split."""
    examples = data.examples(split, "sequential")
    batch = examples.batch(np.arange(len(examples)))
    return {name: ids.tolist() for name, ids in batch.inputs.items()}, batch.targets.tolist()


@pytest.mark.parametrize("task", ANSWERS)
def test_a_decoder_reads_the_sequence_and_writes_its_answer(task: str, tmp_path: Path) -> None:
    run = small_run(tmp_path, f"{{kind: copy, task: {task}, symbols: 7, items: 5, sequences: 400}}")
    assert (run.data.vocab_size, run.data.length) == (8, 10)
    inputs, targets = rows_of(run.data, "train")
    for tokens, expected in zip(inputs["tokens"], targets, strict=True):
        answer = ANSWERS[task](tokens[:5])
        assert tokens[5:] == [7, *answer[:-1]]
        assert expected == [IGNORE_INDEX] * 5 + answer


@pytest.mark.parametrize("task", ANSWERS)
def test_an_encoder_decoder_gets_source_and_target(task: str, tmp_path: Path) -> None:
    data = f"{{kind: copy, task: {task}, symbols: 7, items: 5, sequences: 40, layout: pair}}"
    run = small_run(tmp_path, data, PAIR)
    inputs, targets = rows_of(run.data, "train")
    for source, target, expected in zip(inputs["source"], inputs["target"], targets, strict=True):
        assert expected == ANSWERS[task](source)
        assert target == [7, *expected[:-1]]


def test_no_sequence_is_in_two_splits(tmp_path: Path) -> None:
    data = small_run(tmp_path, "{kind: copy, symbols: 3, items: 3, sequences: 500}").data
    records, held_out = (
        {tuple(tokens[:3]) for tokens in rows_of(data, split)[0]["tokens"]} for split in ("train", "val")
    )
    assert len(records) + len(held_out) == 27
    assert not records & held_out


def test_recall_asks_every_key_once_for_its_value(tmp_path: Path) -> None:
    run = small_run(tmp_path, "{kind: mqar, symbols: 64, positions: 40, pairs: 6, examples: 300}")
    inputs, targets = rows_of(run.data, "train")
    distances = []
    for tokens, expected in zip(inputs["tokens"], targets, strict=True):
        names = dict(zip(tokens[0:12:2], tokens[1:12:2], strict=True))
        assert len(names) == len(set(names.values())) == 6
        assert all(0 < key < 32 <= value < 64 for key, value in names.items())
        calls = [index for index, target in enumerate(expected) if target != IGNORE_INDEX]
        assert sorted(tokens[index] for index in calls) == sorted(names)
        assert all(names[tokens[index]] == expected[index] for index in calls)
        assert all(index >= 12 and index % 2 == 0 for index in calls)
        distances += [(index - 12) // 2 for index in calls]
    counts = np.bincount(distances, minlength=14)
    assert counts[0] > 1.5 * counts[5] > 1.5 * counts[13]  # near ones are more frequent
    fillers = {token for tokens in inputs["tokens"] for token in tokens[12:]}
    assert len(fillers) > 60


def test_an_example_depends_on_its_number_alone(tmp_path: Path) -> None:
    data = small_run(tmp_path, "{kind: mqar, symbols: 64, positions: 40, pairs: 6, examples: 300}").data
    examples = data.examples("train", "shuffled")
    several, single = examples.batch(np.array([5, 17, 250])), examples.batch(np.array([17]))
    assert (several.rows(1, 2).inputs["tokens"] == single.inputs["tokens"]).all()
    assert not (several.inputs["tokens"][0] == several.inputs["tokens"][1]).all()


def test_errors(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    data = [
        "{kind: copy, task: repeat}",
        "{kind: copy, sequences: 1}",
        "{kind: copy, layout: pair, items: 4}",
        "{kind: mqar, pairs: 20, positions: 64}",
        "{kind: mqar, pairs: 5, symbols: 10}",
        "{kind: mqar, positions: 200}",
    ]
    golden("runs/task_errors", "\n\n".join(refused(tmp_path, fields) for fields in data))
