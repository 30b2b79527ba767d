"""Capacity: an expert admits a limited number of tokens of a row, the first that choose it.

    admission of token t to expert i  =  1 if at most `capacity` of the tokens up to t chose i, else 0

A token's weight for an expert is multiplied by its admission. A token that no expert admits has the output 0, so its
residual stream stays unchanged. Padding does not count, and each document of a packed row counts from 0. The counts are
a state: tokens that are read in several steps have the outputs that they have in a single forward.

https://arxiv.org/abs/2101.03961, section 2.2.

b batch, t positions, e experts, a experts of one token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfkit.nn import Context, settings


class Capacity(nn.Module):
    """The experts that each token chose [b, t, a] -> its admission to them [b, t, a], float32.

    Its state, [b, 1, 1, e], counts the choices of each expert.

    Args:
        capacity: number of tokens of a row that an expert admits.
        n_experts: number of experts.
    """

    extra_repr = settings

    def __init__(self, capacity: int, n_experts: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.n_experts = n_experts

    def forward(self, chosen: Tensor, context: Context) -> Tensor:
        choices = F.one_hot(chosen, self.n_experts).sum(dim=2)
        padding = context.padding
        if padding is not None:
            choices = choices * padding.unsqueeze(-1)
        counts = choices.cumsum(dim=1)
        documents, cache = context.documents, context.cache
        if cache is not None:
            state = cache.tensors[0]
            counts = counts + state[:, 0].to(counts.dtype)
            state.copy_(counts[:, -1:].unsqueeze(1))
        elif documents is not None:
            counts = counts - _before_document(counts - choices, documents)
        return (counts.gather(2, chosen) <= self.capacity).float()


def _before_document(earlier: Tensor, documents: Tensor) -> Tensor:
    """Return the counts before the first token of each document, [b, t, e], from the counts before each token."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    # Counts never fall, so the latest document has the largest.
    return torch.cummax(earlier * begins.unsqueeze(-1), dim=1)[0]
