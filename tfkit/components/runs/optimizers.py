"""Updates of weights, by torch's own optimizers."""

from __future__ import annotations

from typing import Any, Literal

import torch

from tfkit.component import OptimizerConfig, PositiveFloat, Probability
from tfkit.errors import Invalid


class _Moments(OptimizerConfig):
    """The settings that Adam and AdamW share."""

    betas: tuple[Probability, Probability] = (0.9, 0.999)
    """The memory of the mean gradient, and of its square."""
    eps: PositiveFloat = 1e-8
    """The least scale."""


class AdamConfig(_Moments):
    """Adam (https://arxiv.org/abs/1412.6980): a step for each weight by its own scale; decay is added to gradients."""

    kind: Literal["adam"] = "adam"

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Adam(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)


class AdamWConfig(_Moments):
    """AdamW (https://arxiv.org/abs/1711.05101): a step for each weight by its own scale, and a separate decay."""

    kind: Literal["adamw"] = "adamw"

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)


class SGDConfig(OptimizerConfig):
    """Steps along the gradient."""

    kind: Literal["sgd"] = "sgd"

    momentum: Probability = 0.0
    """The share of the former step in the next one."""
    nesterov: bool = False
    """If true, the gradient is taken ahead of the momentum."""

    def check(self) -> None:
        """Refuse Nesterov's rule without momentum."""
        super().check()
        if self.nesterov and not self.momentum:
            raise Invalid("nesterov", "`nesterov` has no effect without `momentum`")

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)
