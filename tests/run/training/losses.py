"""Losses with a state, as plugins define them."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

import tfkit
from tfkit.component import ContentPath
from tfkit.nn import full_tensor
from tfkit.run.contract import LossConfig


class AveragedTeacherConfig(LossConfig):
    """Cross-entropy, and the distance from the logits of an average of the weights."""

    kind: Literal["averaged_teacher"] = "averaged_teacher"
    decay: float = 0.8
    hidden: bool = False
    """If true, no module lists the teacher."""

    def build(self, model: fx.GraphModule) -> nn.Module:
        return AveragedTeacher(model, self)


class AveragedTeacher(nn.Module):
    def __init__(self, model: fx.GraphModule, config: AveragedTeacherConfig) -> None:
        super().__init__()
        self.model, self.config = model, config
        self.loss = tfkit.Loss(model, reduction="sum")
        teacher = deepcopy(model).requires_grad_(False)
        self.teacher = {"average": teacher} if config.hidden else nn.ModuleDict({"average": teacher})

    def after_step(self, step: int, steps: int) -> None:
        for average, weight in zip(self.teacher["average"].parameters(), self.model.parameters(), strict=True):
            average.lerp_(weight, 1 - self.config.decay)

    def forward(self, inputs: Mapping[str, Tensor], targets: Tensor) -> Tensor:
        with torch.no_grad():
            expected = self.teacher["average"](inputs["tokens"])
        total: Tensor = self.loss(inputs, targets)
        return total + (self.model(inputs["tokens"]) - expected).square().sum()


class CentredConfig(LossConfig):
    """Cross-entropy, scaled by averages of a weight that grow in number, and by a count."""

    kind: Literal["centred"] = "centred"
    of_rows: bool = False
    """If true, the state depends on the rows of a process."""

    def build(self, model: fx.GraphModule) -> nn.Module:
        return Centred(model, self)


class Centred(nn.Module):
    calls: Tensor
    queue: Tensor | None

    def __init__(self, model: fx.GraphModule, config: CentredConfig) -> None:
        super().__init__()
        self.config, self.loss = config, tfkit.Loss(model, reduction="sum")
        self.register_buffer("calls", torch.tensor(3))
        self.register_buffer("queue", None)

    def after_step(self, step: int, steps: int) -> None:
        weight = full_tensor(next(iter(self.loss.model.parameters())).detach())[:1]
        if self.config.of_rows:
            weight = weight + self.mean
        self.queue = weight.clone() if self.queue is None else torch.cat([self.queue, weight])[-5:]
        self.calls += 1

    def forward(self, inputs: Mapping[str, Tensor], targets: Tensor) -> Tensor:
        self.mean = inputs["tokens"].float().mean()
        total: Tensor = self.loss(inputs, targets)
        return total * (1 + 0.3 * torch.sin(self.calls + (0 if self.queue is None else 40 * self.queue.sum())))


class ReferenceConfig(LossConfig):
    """Cross-entropy, and the distance from the logits of a model that does not change."""

    kind: Literal["reference"] = "reference"
    path: ContentPath

    def build(self, model: fx.GraphModule) -> nn.Module:
        return Reference(model, tfkit.build(self.path).requires_grad_(False))


class Reference(nn.Module):
    offset: Tensor

    def __init__(self, model: fx.GraphModule, reference: fx.GraphModule) -> None:
        super().__init__()
        self.loss, self.model, self.reference = tfkit.Loss(model, reduction="sum"), model, reference
        self.register_buffer("offset", torch.tensor([0.25, -0.5]))

    def after_step(self, step: int, steps: int) -> None:
        self.offset.mul_(0.9)

    def forward(self, inputs: Mapping[str, Tensor], targets: Tensor) -> Tensor:
        distance = (self.model(inputs["tokens"]) - self.reference(inputs["tokens"])).square().sum()
        total: Tensor = self.loss(inputs, targets)
        return total + distance * self.offset.abs().sum()


@tfkit.hookimpl
def tfkit_register(register: Any) -> None:
    register(AveragedTeacherConfig)
    register(CentredConfig)
    register(ReferenceConfig)
