"""Layers that the builder fills, and the softmax of every attention that computes its own."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Linear(nn.Linear):
    """A linear layer whose weights are filled by the spec's `init`, not on construction.

    Args:
        d_in: width of the input.
        d_out: widths of the parts of the output; several for projections that are fused into one.
        bias: whether it has a bias.
        residual: whether the output is added to the residual stream.
    """

    def __init__(self, d_in: int, d_out: int | Sequence[int], *, bias: bool, residual: bool = False) -> None:
        self.parts = [d_out] if isinstance(d_out, int) else list(d_out)
        self.residual = residual
        super().__init__(d_in, sum(self.parts), bias=bias)

    def reset_parameters(self) -> None:
        """Nothing: the builder fills the weights once they have a place in memory."""


class Table(nn.Embedding):
    """An embedding table whose weights are filled by the spec's `init`, not on construction."""

    def reset_parameters(self) -> None:
        """Nothing: the builder fills the weights once they have a place in memory."""


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax of `scores` [b, h, q, k] over the keys that `mask` (see `Context`) lets through.

    A query that may read no key gets zeros, as in `scaled_dot_product_attention`, and no NaN in either direction.
    """
    if mask is None:
        return torch.softmax(scores, dim=-1)
    hidden = ~mask if mask.dtype == torch.bool else mask == -math.inf
    if mask.dtype != torch.bool:
        scores = scores + mask.masked_fill(hidden, 0.0)
    unreadable = hidden.all(dim=-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(hidden & ~unreadable, -math.inf), dim=-1)
    return weights.masked_fill(unreadable, 0.0)
