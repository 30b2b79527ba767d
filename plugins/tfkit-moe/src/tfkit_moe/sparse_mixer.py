"""SparseMixer: experts are chosen one after another, each with a softmax over the experts near the best.

    best   = the largest logit of the experts that are not chosen yet
    near   = the experts among them with best - logit <= 2 jitter max(|logit|, best)
    weight = softmax over near

Evaluation takes the expert with the largest logit. Training draws it from the softmax. The gradient of the discrete
choice is estimated by Heun's third-order method: an expert that is not the best keeps its full weight with
probability 1/4 and has a third of it otherwise. Its gradient is always the gradient of the full weight.

https://arxiv.org/abs/2310.00811, https://arxiv.org/abs/2409.12136

s tokens, e experts, a experts of one token.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from tfkit import Config, Immaterial
from tfkit.nn import settings


class SparseMixerConfig(Config):
    """Choice of one expert after another, each weighted by a softmax over the experts near the best."""

    training_only = MappingProxyType({"sampled": False})

    jitter: Annotated[float, Field(ge=0)] = 0.01
    """Half of the largest distance of a logit from the best logit, relative to the larger of the two. Experts beyond it
    have no part in the softmax. With 0, every weight is 1, unless logits are equal."""
    sampled: Immaterial[bool] = True
    """If true, training draws each expert from the softmax. Otherwise, it takes the best expert, as evaluation does."""


class SparseMixer(nn.Module):
    """Logits [s, e] -> weights [s, a], and the indices of the experts [s, a] in the order of their choice."""

    extra_repr = settings

    def __init__(self, n: int, *, jitter: float, sampled: bool) -> None:
        super().__init__()
        self.n = n
        self.jitter = jitter
        self.sampled = sampled

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights: list[Tensor] = []
        experts: list[Tensor] = []
        candidates = logits
        for _ in range(self.n):
            weight, expert = self.choose(logits, candidates)
            candidates = candidates.scatter(1, expert, -math.inf)
            weights.append(weight)
            experts.append(expert)
        return torch.cat(weights, dim=1), torch.cat(experts, dim=1)

    def choose(self, logits: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """Choose an expert [s, 1], and its weight, among candidates: logits that are -inf for the chosen experts."""
        # The first of equal logits: `torch.topk` would choose by the shape of its input.
        best, expert = candidates.detach().max(dim=1, keepdim=True)
        distance = 2 * self.jitter * torch.maximum(logits.detach().abs(), best)
        near = candidates.masked_fill(best - candidates.detach() > distance, -math.inf)
        if not (self.training and self.sampled):
            return torch.softmax(near, dim=1).gather(1, expert), expert
        drawn = (near.detach() - torch.empty_like(near).exponential_().log()).argmax(dim=1, keepdim=True)
        weight = torch.softmax(near, dim=1).gather(1, drawn)
        is_full = (drawn == expert) | (torch.rand_like(best) > 0.75)
        return weight - torch.where(is_full, 0.0, weight.detach() * (2 / 3)), drawn
