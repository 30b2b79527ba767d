"""Bugs of layers with a state, planted into retention: the state is what its keys and values add up to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfkit.components import context
from tfkit.nn import Past

from ..retention import Retention
from .bug import plant

forward = Retention.forward
count_positions = context.count_positions


@plant(
    "the state decays twice in a single step",
    "huggingface/transformers#46190",
    "retention",
    "cached",
    Retention,
    "forward",
)
def twice(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return forward(self, q, k, v, mask * 2 if q.size(2) == 1 else mask)


@plant(
    "the state decays over padding on the right",
    "huggingface/transformers#48256",
    "retention",
    "cached",
    context,
    "count_positions",
)
def over_padding(x: Tensor, mask: Any, past: Past | None) -> Tensor:
    if past is not None and past.lengths is not None:
        past = past._replace(lengths=torch.full_like(past.lengths, past.start))
    return count_positions(x, mask, past)


@plant("padding enters the state", "huggingface/transformers#32677", "retention", "padding", Retention, "forward")
def entered(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    earlier = torch.ones(mask.shape[-2:]).tril(k.size(2) - q.size(2)) > 0
    return forward(self, q, k, v, torch.where(earlier & (mask == -torch.inf), 0.0, mask))
