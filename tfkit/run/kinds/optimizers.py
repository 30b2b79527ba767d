"""Optimizers of torch, and Muon for the matrices inside a model."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tfkit.component import Count, PositiveFloat, Probability
from tfkit.errors import Invalid
from tfkit.nn import full_tensor, part
from tfkit.run.contract import OptimizerConfig


class _Moments(OptimizerConfig):
    """The settings that Adam and AdamW share."""

    update = "adam"

    betas: tuple[Probability, Probability] = (0.9, 0.999)
    """Decay rates of the running averages of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """Term added to the denominator for numerical stability."""


class AdamConfig(_Moments):
    """Adam (https://arxiv.org/abs/1412.6980): adaptive step sizes per weight; decay is added to the gradients."""

    kind: Literal["adam"] = "adam"
    decoupled = False

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Adam(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)


class AdamWConfig(_Moments):
    """AdamW (https://arxiv.org/abs/1711.05101): adaptive step sizes per weight, with decoupled weight decay."""

    kind: Literal["adamw"] = "adamw"

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)


class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent, with optional momentum."""

    kind: Literal["sgd"] = "sgd"
    update = "sgd"

    momentum: Probability = 0.0
    """Factor of the previous update in the next update."""
    nesterov: bool = False
    """If true, use Nesterov momentum."""

    def check(self) -> None:
        """Raise `Invalid` for `nesterov` without momentum."""
        super().check()
        if self.nesterov and not self.momentum:
            raise Invalid("nesterov", "`nesterov` has no effect without `momentum`")

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)


class MuonConfig(OptimizerConfig):
    """Muon (https://kellerjordan.github.io/posts/muon/): momentum updates whose singular values are made equal.

    Muon updates the matrices inside the model. Fused layers are split, so q, k and v are separate matrices, as is each
    expert of a stack. `others` updates heads, embedding tables, norms and biases. The `groups` apply to both.
    """

    kind: Literal["muon"] = "muon"
    update = "matrix"

    others: OptimizerConfig
    """The optimizer of all other parameters."""
    momentum: Probability = 0.95
    """Factor of the previous momentum in the next momentum."""
    nesterov: bool = True
    """If true, use Nesterov momentum."""
    iterations: Count = 5
    """Number of Newton-Schulz iterations, which make the singular values equal."""
    scale: Literal["original", "match_rms_adamw"] = "original"
    """Factor of the learning rate. original: sqrt(max(1, rows / columns)); match_rms_adamw: 0.2 sqrt(max(rows,
    columns))."""

    def check(self) -> None:
        """Raise `Invalid` if `others` has groups, or cannot optimize all parameters."""
        super().check()
        if self.others.groups:
            raise Invalid("others.groups", "`others` cannot have `groups`", help="write them as `optimizer.groups`")
        if self.others.rest is not None:
            raise Invalid("others", f"`{self.others.kind_name()}` cannot optimize all parameters")

    @property
    def rest(self) -> OptimizerConfig:
        return self.others

    def matrix_factor(self, rows: int, columns: int) -> float:
        return math.sqrt(max(1, rows / columns)) if self.scale == "original" else 0.2 * math.sqrt(max(rows, columns))

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

    The state of a parameter is the momentum of all matrices in it. If a parameter is sharded over several processes,
    each process gathers it, computes the full update, and keeps its shard.
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
        weight, momentum, gradient = map(full_tensor, (*stored, parameter.grad))
        matrices = list(map(nn.Parameter, _matrix_views(weight, rows)))
        muon = torch.optim.Muon(matrices, lr=group["lr"], weight_decay=group["weight_decay"], **self._options)
        for matrix, gradient_part, former in zip(
            matrices, _matrix_views(gradient, rows), _matrix_views(momentum, rows), strict=True
        ):
            matrix.grad, muon.state[matrix]["momentum_buffer"] = gradient_part, former
        muon.step()
        for tensor, updated in zip(stored, (weight, momentum), strict=True):
            tensor.copy_(part(updated, tensor))  # no effect if both are the same tensor


def _matrix_views(tensor: Tensor, rows: tuple[int, ...]) -> list[Tensor]:
    """Return views of the matrices in a tensor [..., rows, columns]."""
    return list(tensor.flatten(0, -2).split(rows))
