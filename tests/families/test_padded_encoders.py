"""Encoders whose classes count padding: rows with padding, and documents in a row, are the same sequences alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import tfkit
from tfkit.tools.eject.proof import check

from .case import Trial
from .encoders import ENCODERS

NAMES = ("fnet", "convbert")
LENGTH = 11
MASKS = {
    "right": torch.arange(LENGTH) < torch.tensor([[7], [LENGTH], [1]]),
    "left": torch.arange(LENGTH) >= LENGTH - torch.tensor([[7], [LENGTH], [1]]),
    "between": torch.rand(3, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.6,
}
"""Which positions of three rows are tokens."""


def check_alone(trial: Trial, logits: Tensor, ids: Tensor, tokens: Tensor) -> None:
    """Check that the logits of these tokens of a row are the logits of a row with these tokens alone."""
    expected = trial.theirs(input_ids=ids[tokens][None]).logits[0]
    torch.testing.assert_close(logits[tokens], expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_padded_row_and_a_document_are_the_row_alone(name: str, tmp_path: Path) -> None:
    trial = Trial.of(ENCODERS[name], tmp_path)
    ids = torch.randint(3, 61, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    for mask in MASKS.values():
        for row, logits in enumerate(trial.ours(ids, None, mask)):
            check_alone(trial, logits, ids[row], mask[row])
    documents = torch.tensor([1, 1, 2, 2, 2, 0, 2, 2, 3, 3, 3])[None]
    same = (documents[:, :, None] == documents[:, None, :]) & (documents > 0)[:, None, :]
    (logits,) = trial.ours(ids[:1], None, same)
    for number in (1, 2, 3):
        check_alone(trial, logits, ids[0], documents[0] == number)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_exported_and_ejected_models_are_the_model(name: str, tmp_path: Path) -> None:
    trial = Trial.of(ENCODERS[name], tmp_path)
    assert tfkit.export(trial.ours, tmp_path / "model.ts").difference <= 1e-5
    graph = trial.ours.meta["graph"]
    assert check(graph, tfkit.eject(graph)).ran
