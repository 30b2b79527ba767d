"""Masked data: the published fractions, no unintended masks, and reproducible examples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tfkit.building.builder import build
from tfkit.errors import SpecError
from tfkit.run.contract import IGNORE_INDEX
from tfkit.run.training.evaluate import evaluate_splits

from .small import refused, small_run

UNMASKED = "{kind: text, files: tinyshakespeare}"
TEXT = f"{{kind: masked, of: {UNMASKED}}}"
MASK = 65


def read(folder: Path, split: str = "train") -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Tokens, what a model reads of them, and its targets."""
    data, plain = small_run(folder, TEXT, length=128).data, small_run(folder, UNMASKED, length=128).data
    assert data.vocab_size == plain.vocab_size + 1 == MASK + 1
    numbers = np.arange(600)
    batch = data.examples(split, "shuffled").batch(numbers)
    tokens = plain.examples(split, "shuffled").batch(numbers).inputs["tokens"]
    return tokens, batch.inputs["tokens"], batch.targets


def test_shares_are_those_of_bert(tmp_path: Path) -> None:
    tokens, records, targets = read(tmp_path)
    selected = targets != IGNORE_INDEX
    assert abs(selected[:, 1:].mean() - 0.15) < 0.006
    assert (targets[selected] == tokens[selected]).all()
    assert (records[~selected] == tokens[~selected]).all()
    assert abs((records[selected] == MASK).mean() - 0.8) < 0.02
    assert abs((records[selected] == tokens[selected]).mean() - 0.1 - 0.1 / 65) < 0.02
    replaced = records[selected & (records != MASK) & (records != tokens)]
    assert abs(len(replaced) / selected.sum() - 0.1) < 0.02
    assert set(replaced.tolist()) == set(range(65))


def test_the_choice_depends_on_the_number_alone(tmp_path: Path) -> None:
    data = small_run(tmp_path, TEXT, length=128).data
    examples = data.examples("train", "shuffled")
    count = len(examples) // 10
    first, again = examples.batch(np.array([3, 8])), examples.batch(np.array([8]))
    assert (first.rows(1, 2).inputs["tokens"] == again.inputs["tokens"]).all()
    second = examples.batch(np.array([8 + count]))  # the same text, another choice
    assert ((again.targets == IGNORE_INDEX) != (second.targets == IGNORE_INDEX)).any()
    common = (again.targets != IGNORE_INDEX) & (second.targets != IGNORE_INDEX)
    assert (again.targets[common] == second.targets[common]).all()
    assert len(data.examples("val", "sequential")) == -(-111_539 // 128)


def test_nothing_is_asked_for_that_the_data_does_not_ask_for(tmp_path: Path) -> None:
    addition = "{kind: masked, share: 0.9, of: {kind: addition}}"
    batch = small_run(tmp_path, addition).data.examples("train", "shuffled").batch(np.arange(500))
    assert (batch.targets[:, :6] == IGNORE_INDEX).all()  # `12+34=`
    assert (batch.targets[:, 6:] != IGNORE_INDEX).mean() > 0.8
    last = small_run(tmp_path, TEXT, "data.share=0.99", length=128).data.examples("val", "sequential")
    end = last.batch(np.array([len(last) - 1]))
    tokens = 111_540 - 128 * (len(last) - 1)
    assert (end.inputs["tokens"][0, tokens:] == MASK).all()
    assert (end.targets[0, tokens:] == IGNORE_INDEX).all()
    assert (end.targets[0, 1:tokens] != IGNORE_INDEX).mean() > 0.9


def test_errors(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    data = [
        "{kind: masked, of: {kind: addition, order: sampled}}",
        "{kind: masked, of: {kind: addition, split: {train: 1.0}}}",
        "{kind: masked, of: {kind: addition}, share: 0}",
        "{kind: masked, of: {kind: copy, layout: pair}}",
        "{kind: masked, of: {kind: tokens, files: absent.npy}}",
    ]
    lengths = (None, None, None, None, 20)
    texts = [refused(tmp_path, fields, length=length) for fields, length in zip(data, lengths, strict=True)]
    golden("runs/masked_errors", "\n\n".join(texts))


@pytest.mark.parametrize("metric", ["loss", "accuracy", "exact_match", "constant_accuracy", "constant_exact_match"])
def test_nothing_hidden_cannot_be_evaluated(tmp_path: Path, metric: str) -> None:
    evaluated = f"eval={{every: 1, splits: {{val: {{batches: 1}}}}, metrics: [{metric}]}}"
    run = small_run(tmp_path, TEXT.replace("masked,", "masked, share: 1e-9,"), evaluated, length=12)
    assert run.config.eval is not None
    with pytest.raises(
        SpecError, match="the part of the split `val` that is evaluated must have a position that counts"
    ):
        evaluate_splits(build(run.graph), run, run.config.eval.splits, run.config.eval.metrics)
