"""Bugs of mixtures of experts."""

from __future__ import annotations

from typing import Any

from tfkit_moe import Router
from torch import Tensor
from torch.nn import functional as F

from .bug import plant

forward = Router.forward


@plant("the router has no bias", "pytorch/torchtitan#2319", "mixture", "gradients", Router, "logits")
def without_bias(self: Any, x: Tensor) -> Tensor:
    return F.linear(x.float(), self.weight.float())


@plant("weights of experts are not renormalized", "pytorch/torchtitan#2319", "mixture", "values", Router, "forward")
def as_scored(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = self.score(self.logits(x))
    chosen = self.choose(scores.detach())
    return scores.gather(-1, chosen), chosen


@plant(
    "experts drop tokens beyond their capacity", "NVIDIA/Megatron-LM#5542", "mixture", "neighbours", Router, "forward"
)
def capacity(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = forward(self, x)
    place = F.one_hot(chosen.flatten(), self.out_features).cumsum(0).gather(1, chosen.flatten()[:, None])
    return weights * (place.view(chosen.shape) <= x.size(0) // 2), chosen
