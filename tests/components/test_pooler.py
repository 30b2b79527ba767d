"""Pooling of a sequence to a vector, compared with a loop, with padding at any position."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tfkit

SPEC = """
tfkit: 1
name: t
d_model: 4
vocab_size: 9
graph:
  embedding: {block: embedding}
  pooled: {block: pooler, select: %s}
"""
MASKS = {
    "right": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]],
    "left": [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]],
    "in between": [[1, 0, 1, 1, 0], [0, 1, 0, 1, 0], [1, 1, 0, 0, 1]],
}


def selected(rows: Tensor, select: str) -> Tensor:
    """What is selected of the tokens [n, d] of one sequence."""
    return {"first": rows[0], "last": rows[-1], "mean": rows.mean(dim=0)}[select]


@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize("select", ["first", "last", "mean"])
@torch.no_grad()
def test_padding_is_never_selected(select: str, padding: str) -> None:
    model = tfkit.build(tfkit.loads(SPEC % select)).eval()
    tokens, mask = torch.arange(15).remainder(9).view(3, 5), torch.tensor(MASKS[padding]).bool()
    vectors = model.get_submodule("embedding")(tokens)
    want = torch.stack([selected(vectors[row, mask[row]], select) for row in range(3)])
    torch.testing.assert_close(model(tokens, tokens_mask=mask), want)
    torch.testing.assert_close(model(tokens), torch.stack([selected(row, select) for row in vectors]))
