"""Muon for the matrices inside a model, and another optimizer for everything else."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from tfkit.component import Count, OptimizerConfig, Probability
from tfkit.errors import Invalid


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
        """Refuse rules of `others`: names are looked up in one place."""
        super().check()
        if self.others.groups:
            raise Invalid("others.groups", "`others` has no rules of its own", help="give them as `optimizer.groups`")
        if self.others.rest is not None:
            raise Invalid("others", f"`{self.others.kind_name()}` does not take all parameters")

    @property
    def rest(self) -> OptimizerConfig:
        return self.others

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        own = [group for group in groups if "matrices" in group]
        if not own:
            raise Invalid("", "the model has no matrices inside, which `muon` is for")
        options = {
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "ns_steps": self.iterations,
            "adjust_lr_fn": self.scale,
        }
        return Muon(own, self.others.build([group for group in groups if group not in own]), options)


class Muon(torch.optim.Optimizer):
    """torch's Muon on every matrix by itself, beside an optimizer of other parameters.

    The matrices share the memory of the parameter that they are rows of, and so do their states.
    """

    def __init__(self, groups: list[dict[str, Any]], others: torch.optim.Optimizer, options: dict[str, Any]) -> None:
        super().__init__(groups, {})
        self._own, self._others = self.param_groups, others
        self._matrices = {
            parameter: list(map(nn.Parameter, _split(parameter.detach(), rows)))
            for group in self._own
            for parameter, rows in zip(group["params"], group["matrices"], strict=True)
        }
        inner = [{**group, "params": [one for p in group["params"] for one in self._matrices[p]]} for group in groups]
        self._muon = torch.optim.Muon(inner, **options)
        self.param_groups = [*self._own, *others.param_groups]
        self.state = others.state
        for parameter in self._matrices:
            self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        for group, inner in zip(self._own, self._muon.param_groups, strict=True):
            inner["lr"] = group["lr"]
            for parameter, rows in zip(group["params"], group["matrices"], strict=True):
                self._give(parameter, rows)
        self._muon.step()
        self._others.step()

    def _give(self, parameter: Tensor, rows: tuple[int, ...]) -> None:
        """Hand the gradient and the momentum of a parameter to its matrices."""
        matrices = self._matrices[parameter]
        momenta = _split(self.state[parameter]["momentum_buffer"], rows)
        gradients = [None] * len(matrices) if parameter.grad is None else _split(parameter.grad, rows)
        for matrix, gradient, momentum in zip(matrices, gradients, momenta, strict=True):
            matrix.grad = gradient
            self._muon.state[matrix]["momentum_buffer"] = momentum


def _split(tensor: Tensor, rows: tuple[int, ...]) -> list[Tensor]:
    """Views of the matrices in a tensor [..., rows, columns]."""
    return list(tensor.flatten(0, -2).split(rows))
