"""Updates of weights: torch's own optimizers; and Muon for the matrices inside a model."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from tfkit.component import Count, PositiveFloat, Probability
from tfkit.errors import Invalid
from tfkit.nn import part, whole
from tfkit.run.contract import OptimizerConfig


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
        """Raise `Invalid` for Nesterov's rule without momentum."""
        super().check()
        if self.nesterov and not self.momentum:
            raise Invalid("nesterov", "`nesterov` has no effect without `momentum`")

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)


class MuonConfig(OptimizerConfig):
    """Muon (https://kellerjordan.github.io/posts/muon/): steps along a momentum whose singular values are made equal.

    It is for the matrices inside the model. Fused layers are taken apart, so that q, k and v are a matrix each, and so
    is every expert of a stack. Heads, tables, norms and biases are left to `others`. The `groups` are rules for both.
    """

    kind: Literal["muon"] = "muon"

    others: OptimizerConfig
    """The optimizer of all other parameters."""
    momentum: Probability = 0.95
    """The share of the former direction in the next one."""
    nesterov: bool = True
    """If true, the gradient is taken ahead of the momentum."""
    iterations: Count = 5
    """Iterations that make the singular values equal."""
    scale: Literal["original", "match_rms_adamw"] = "original"
    """original: the rate times sqrt(max(1, rows / columns)); match_rms_adamw: times 0.2 sqrt(max(rows, columns))."""

    def check(self) -> None:
        """Raise `Invalid` if `others` has rules: names are looked up in one place."""
        super().check()
        if self.others.groups:
            raise Invalid("others.groups", "`others` cannot have `groups`", help="write them as `optimizer.groups`")
        if self.others.rest is not None:
            raise Invalid("others", f"`{self.others.kind_name()}` cannot optimize all parameters")

    @property
    def rest(self) -> OptimizerConfig:
        return self.others

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        matrix_groups = [group for group in groups if "matrices" in group]
        if not matrix_groups:
            raise Invalid("", "the model has no hidden matrices, which `muon` requires")
        options = {
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "ns_steps": self.iterations,
            "adjust_lr_fn": self.scale,
        }
        return Muon(matrix_groups, self.others.build([group for group in groups if "matrices" not in group]), options)


class Muon(torch.optim.Optimizer):
    """torch's Muon on each matrix separately, and another optimizer for all other parameters.

    The state of a parameter is the momentum of all matrices in it. Where several processes have parts of a parameter,
    each gathers it, computes the whole update, and keeps its part.
    """

    def __init__(self, groups: list[dict[str, Any]], rest: torch.optim.Optimizer, options: dict[str, Any]) -> None:
        super().__init__(groups, {})
        self._groups, self._rest, self._options = self.param_groups, rest, options
        self.param_groups = [*self._groups, *rest.param_groups]
        self.state = rest.state
        for parameter in (weight for group in self._groups for weight in group["params"]):
            self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        for group in self._groups:
            for parameter, rows in zip(group["params"], group["matrices"], strict=True):
                if parameter.grad is not None:
                    self._update(parameter, rows, group)
        self._rest.step()

    def _update(self, parameter: Tensor, rows: tuple[int, ...], group: dict[str, Any]) -> None:
        """Update the matrices in a parameter."""
        stored = parameter.detach(), self.state[parameter]["momentum_buffer"]
        weight, momentum, gradient = map(whole, (*stored, parameter.grad))
        matrices = list(map(nn.Parameter, _split(weight, rows)))
        muon = torch.optim.Muon(matrices, lr=group["lr"], weight_decay=group["weight_decay"], **self._options)
        for matrix, gradient_part, former in zip(matrices, _split(gradient, rows), _split(momentum, rows), strict=True):
            matrix.grad, muon.state[matrix]["momentum_buffer"] = gradient_part, former
        muon.step()
        for tensor, updated in zip(stored, (weight, momentum), strict=True):
            tensor.copy_(part(updated, tensor))  # onto itself, it does nothing


def _split(tensor: Tensor, rows: tuple[int, ...]) -> list[Tensor]:
    """Return views of the matrices in a tensor [..., rows, columns]."""
    return list(tensor.flatten(0, -2).split(rows))
