"""Padded examples: their loss and gradients are the sums over each example alone, without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tfkit.errors import SpecError
from tfkit.run.checked_run import Run, check_run
from tfkit.run.contract import IGNORE_INDEX, Batch, Ids
from tfkit.run.guarded_data import GuardedData
from tfkit.run.read_run import read_run
from tfkit.run.run_spec import SplitConfig
from tfkit.run.training.evaluate import evaluate_splits
from tfkit.run.training.loop import Trainer

from .runs import PLUGINS, Memory, write_run

LENGTHS = np.array([[3, 5], [7, 2], [1, 6], [4, 4]])
IDS = np.random.default_rng(0).integers(1, 20, size=(2, 4, 7))
CLASSES = np.array([2, 0, 1, 2])
_ATTENTION = "attention: {kind: mha, n_heads: 2, position: rope}, ffn: {kind: relu, d_ff: 24}"
PAIRS = f"""model={{
  vocab_size: 20, d_model: 16, inputs: {{source: tokens, target: tokens}},
  graph: {{
    embedding: {{block: embedding, input: source}},
    encoder: {{block: encoder, n_layers: 1, {_ATTENTION}}},
    prefix: {{block: embedding, input: target}},
    decoder: {{block: decoder, n_layers: 1, memory: encoder, cross_attention: {{kind: mha, n_heads: 2}}, {_ATTENTION}}},
    head: lm_head}}}}"""
CLASSIFIER = f"""model={{
  vocab_size: 20, d_model: 16,
  graph: {{
    embedding: embedding,
    encoder: {{block: encoder, n_layers: 1, {_ATTENTION}}},
    pooler: {{block: pooler, select: mean}},
    classes: {{block: classifier, n_classes: 3}}}}}}"""


class Padded:
    """Four examples, padded at the end with 0; a pair's target has one position more than counts."""

    vocab_size, length, splits, fingerprint, tokenizer = 20, 7, ("train", "val"), "", None

    def __init__(self, change: Callable[[Batch], Batch] = lambda batch: batch, *, pairs: bool) -> None:
        self.change, self.pairs = change, pairs
        self.positions: int | None = int((LENGTHS.max(axis=1) if pairs else LENGTHS[:, 0]).sum())

    def examples(self, split: str, order: str) -> Padded:
        return self

    def __len__(self) -> int:
        return len(LENGTHS)

    def batch(self, indices: Ids) -> Batch:
        sizes = LENGTHS[indices]
        masks = [np.arange(size.max()) < size[:, None] for size in sizes.T]
        source, target = (
            np.where(mask, ids[indices, : mask.shape[1]], 0) for mask, ids in zip(masks, IDS, strict=True)
        )
        if not self.pairs:
            return self.change(Batch({"tokens": source}, CLASSES[indices], masks={"tokens": masks[0]}))
        targets = np.where(masks[1], np.roll(target, -1, axis=1), IGNORE_INDEX)
        inputs, by_input = {"source": source, "target": target}, dict(zip(("source", "target"), masks, strict=True))
        return self.change(Batch(inputs, targets, masks=by_input))


def padded_run(folder: Path, change: Callable[[Batch], Batch] = lambda batch: batch, *, pairs: bool) -> Run:
    sets = (PAIRS if pairs else CLASSIFIER, "batch={sequences: 4, length: 7}", "machine.micro_batch=3")
    file = read_run(write_run(folder), PLUGINS, sets=[*sets, "data.order=sequential"])

    def fault(method: str, error: BaseException) -> SpecError:
        raise error

    return check_run(replace(file, data=GuardedData(Padded(change, pairs=pairs), fault)))


@pytest.mark.parametrize("pairs", [True, False])
def test_padded_examples_have_the_loss_and_the_gradients_of_each_alone(pairs: bool, tmp_path: Path) -> None:
    trainer = Trainer(padded_run(tmp_path, pairs=pairs), Memory())
    trainer.model.double()  # float32 alone would differ by 1.4e-6
    batch = trainer.batch(1)
    loss, _ = trainer._gradients(batch, 1)
    gradients = {
        name: weight.grad.clone() for name, weight in trainer.model.named_parameters() if weight.grad is not None
    }
    trainer.model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for row, sizes in enumerate(LENGTHS):
        alone = {
            name: torch.from_numpy(ids[row : row + 1, :size])
            for (name, ids), size in zip(batch.inputs.items(), sizes, strict=False)
        }
        targets = torch.from_numpy(batch.targets[row, : sizes[1]] if pairs else batch.targets[row : row + 1])
        logits = trainer.model(**alone)
        total = total + F.cross_entropy(logits.flatten(0, -2), targets, reduction="sum")
    total = total / (LENGTHS[:, 1].sum() if pairs else len(LENGTHS))
    total.backward()
    assert loss.item() == pytest.approx(total.item(), abs=1e-6)
    assert len(gradients) == len(dict(trainer.model.named_parameters()))
    for name, parameter in trainer.model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12, msg=name)


def test_metrics_of_a_classifier_count_examples(tmp_path: Path) -> None:
    run = padded_run(tmp_path, pairs=False)
    trainer = Trainer(run, Memory())
    logits = torch.cat(
        [trainer.model(torch.from_numpy(IDS[0][row : row + 1, :size])) for row, (size, _) in enumerate(LENGTHS)]
    )
    kinds = PLUGINS.registry.kinds("metric")
    metrics: Any = [kinds[name].config() for name in ("loss", "accuracy", "exact_match", "constant_accuracy")]
    numbers = evaluate_splits(trainer.model, run, {"val": SplitConfig(batches="all")}, metrics)
    right = (logits.argmax(-1).numpy() == CLASSES).mean()
    assert numbers["val.loss"] == pytest.approx(F.cross_entropy(logits, torch.from_numpy(CLASSES)).item(), abs=1e-6)
    assert numbers["val.accuracy"] == numbers["val.exact_match"] == right
    assert numbers["val.constant_accuracy"] == 0.5


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda mask: {"other": mask}, "a mask must belong to an input: tokens; got `other`"),
        (lambda mask: {"tokens": mask[:, :1]}, "the mask of `tokens` must have the shape of the input"),
        (lambda mask: {"tokens": mask & False}, "the mask of `tokens` must have the shape of the input, and a token"),
        (lambda mask: {"tokens": mask.astype(np.int64)}, "must be an array of bool with 1 rows and two axes"),
    ],
)
def test_a_mask_that_fits_no_input_is_an_error(change: Callable[[Any], Any], error: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        padded_run(tmp_path, lambda batch: replace(batch, masks=change(batch.masks["tokens"])), pairs=False)
    assert error in str(raised.value)


def test_padded_examples_must_have_their_number_of_positions(tmp_path: Path) -> None:
    run = padded_run(tmp_path, pairs=True)
    assert run.tokens_of_step == sum([5, 7, 6, 4])
    padded = Padded(pairs=True)
    for positions, error in ((None, "must have `positions`, their number"), (3, "at least the number of examples, 4")):
        padded.positions = positions
        with pytest.raises(ValueError, match=error):
            GuardedData(padded, run.data._fault).examples("train", "shuffled").batch(np.arange(4))  # type: ignore[attr-defined]
