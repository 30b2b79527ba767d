"""Packed data: documents in a row do not affect each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.run.training.runs import Memory
from tests.run.training.runs import small_run as training_run
from tfkit.run.checked_run import Run
from tfkit.run.contract import IGNORE_INDEX
from tfkit.run.training.evaluate import batch_tensors, evaluate_splits
from tfkit.run.training.loop import Trainer

from .small import refused, small_run

TEXT = "{kind: text, files: tinyshakespeare}"
PACKED = f'{{kind: packed, of: {TEXT}, separator: "\\n"}}'


def lines(folder: Path, *sets: str) -> Run:
    """A run over lines, each a document."""
    data = f'data={{kind: packed, separator: "\\n", of: {{kind: text, files: {folder / "sheep.txt"}}}}}'
    return training_run(folder, data, *sets)


def test_documents_are_those_of_a_loop(tmp_path: Path) -> None:
    plain, packed = (small_run(tmp_path, data, length=64).data for data in (TEXT, PACKED))
    numbers = np.arange(40)
    reference = plain.examples("train", "shuffled").batch(numbers)
    actual = packed.examples("train", "shuffled").batch(numbers)
    assert packed.vocab_size == plain.vocab_size
    assert packed.fingerprint == plain.fingerprint
    assert (actual.inputs["tokens"] == reference.inputs["tokens"]).all()
    assert actual.documents is not None
    assert plain.tokenizer is not None
    for row, (tokens, targets) in enumerate(zip(reference.inputs["tokens"], reference.targets, strict=True)):
        document, documents, expected = 0, [], []
        for token, target in zip(tokens.tolist(), targets.tolist(), strict=True):
            ends = plain.tokenizer.decode([token]) == "\n"
            documents.append(document)
            expected.append(IGNORE_INDEX if ends else target)
            document += ends
        assert actual.documents[row].tolist() == documents
        assert actual.targets[row].tolist() == expected
    assert actual.documents.max() > 2


def test_a_step_has_the_loss_and_gradients_of_separate_rows(tmp_path: Path) -> None:
    trainer = Trainer(lines(tmp_path, "batch.length=12", "machine.micro_batch=4"), Memory())
    batch = trainer.batch(1)
    assert batch.documents is not None
    assert batch.documents.max() >= 1
    loss, _ = trainer._gradients(batch, 1)
    actual = {
        name: parameter.grad.clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.grad is not None
    }
    trainer.model.zero_grad()
    total = torch.zeros(())
    for tokens, targets, documents in zip(batch.inputs["tokens"], batch.targets, batch.documents, strict=True):
        for number in np.unique(documents):
            tokens_of = documents == number
            logits = trainer.model(torch.from_numpy(tokens[tokens_of])[None])[0]
            total = total + F.cross_entropy(logits, torch.from_numpy(targets[tokens_of]), reduction="sum")
    total = total / batch.count
    total.backward()
    assert loss.item() == pytest.approx(total.item(), abs=1e-5)
    for name, parameter in trainer.model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(actual[name], parameter.grad, atol=1e-5, rtol=1e-4)


def test_an_evaluation_reads_documents_apart(tmp_path: Path) -> None:
    run = lines(tmp_path, "eval={every: 8, splits: {val: all}}")
    trainer = Trainer(run, Memory())
    assert run.config.eval is not None
    splits, metrics = run.config.eval.splits, run.config.eval.metrics
    results = evaluate_splits(trainer.model, run, splits, metrics)
    other = run.data.examples("val", "sequential")
    batch = other.batch(np.arange(len(other)))
    inputs, targets = batch_tensors(batch, trainer.model, trainer.device, run.config.loss)
    assert inputs["tokens_mask"].shape == (len(other), 12, 12)
    logits = trainer.model.eval()(**inputs)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
    assert results["val.loss"] == pytest.approx(expected.item(), abs=1e-5)


def test_hidden_tokens_of_documents(tmp_path: Path) -> None:
    masked = f"{{kind: masked, of: {PACKED}}}"
    encoder = (
        "model.decoder={block: encoder, n_layers: 1, attention: {kind: mha, n_heads: 2}, ffn: {kind: relu, d_ff: 8}}"
    )
    batch = small_run(tmp_path, masked, encoder, length=64).data.examples("train", "shuffled").batch(np.arange(3))
    assert batch.documents is not None
    assert batch.rows(1, 3).documents is not None


CASES = {
    "two characters": (PACKED.replace("\\n", "ab"), [], "`ab` is not a token of the data"),
    "an id beyond": (PACKED.replace('"\\n"', "65"), [], "65 is not a token: the data has 65 tokens, 0 to 64"),
    "an order inside": (
        PACKED.replace("tinyshakespeare}", "tinyshakespeare, order: sampled}"),
        [],
        "`order` has no effect here",
    ),
    "a pooler": (
        PACKED,
        ["model.head={block: pooler, select: mean}"],
        "cannot separate the documents of a row: `head` ignores the pairwise mask",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_errors(case: str, tmp_path: Path) -> None:
    data, sets, words = CASES[case]
    assert words in refused(tmp_path, data, *sets, length=64)


def test_padding_is_a_separate_document(tmp_path: Path) -> None:
    trainer = Trainer(lines(tmp_path, "batch.length=12"), Memory())
    batch = trainer.batch(1)
    (name,) = batch.inputs
    mask = np.broadcast_to(np.arange(12) < 8, batch.targets.shape).copy()
    padded = replace(batch, documents=np.zeros_like(batch.targets), masks={name: mask})
    inputs, _ = batch_tensors(padded, trainer.model, torch.device("cpu"), trainer.config.loss)
    (pairs,) = (tensor for tensor in inputs.values() if tensor.dim() == 3)
    assert pairs[:, :8, :8].all()
    assert not pairs[:, :8, 8:].any()
