"""The loss kind `distillation`: a model learns from the targets and from the logits of a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tfkit
from tfkit.component import Changeable, ContentPath, PositiveFloat
from tfkit.run.contract import IGNORE_INDEX, LossConfig

TEACHER = "teacher"
MAX_LOGITS = 2**25
"""Maximum number of logits that are in memory at the same time."""


class DistillationConfig(LossConfig):
    """Cross-entropy, and the divergence of the model's predictions from a teacher's (https://arxiv.org/abs/1503.02531).

    (1 - weight) * cross-entropy + weight * temperature^2 * KL(teacher, model), both distributions at the temperature.
    """

    kind: Literal["distillation"] = "distillation"

    teacher: ContentPath
    """A model folder, or a run folder, whose latest checkpoint is the teacher. The teacher must have the inputs and the
    vocabulary of the model. The digest of the run covers its content."""
    temperature: Changeable[PositiveFloat] = 2.0
    """The divisor of the logits of both models."""
    weight: Changeable[Annotated[float, Field(gt=0, le=1)]] = 0.5
    """The weight of the divergence; the weight of cross-entropy is 1 minus this weight."""

    @property
    def predicts_targets(self) -> bool:
        return True

    def build(self, model: fx.GraphModule) -> nn.Module:
        return DistillationLoss(model, tfkit.build(self.teacher), self)


class DistillationLoss(tfkit.Loss):
    """Inputs and targets -> the sum of the loss over the positions that count.

    The teacher is in eval mode, has no gradient, and is not a submodule, so it is neither trained nor saved.
    """

    def __init__(self, model: fx.GraphModule, teacher: fx.GraphModule, config: DistillationConfig) -> None:
        super().__init__(model, reduction="sum")
        self.temperature, self.weight = config.temperature, config.weight
        weight = next(model.parameters())
        teacher = teacher.to(weight.device, weight.dtype).eval().requires_grad_(False)
        self._teacher = (tfkit.Loss(teacher),)
        inputs, teacher_inputs = (list(module.meta["graph"].inputs) for module in (model, teacher))
        if inputs != teacher_inputs:
            message = f"the teacher must have the inputs {', '.join(inputs)}; it has {', '.join(teacher_inputs)}"
            raise ValueError(message)
        sizes = [next(iter(loss.ends.values())).vocab_size for loss in (self, self._teacher[0])]
        if sizes[0] != sizes[1]:
            raise ValueError(f"the teacher must return {sizes[0]:,} logits for each position; it returns {sizes[1]:,}")

    def read(self, inputs: Any) -> dict[str, Any]:
        """Run both models up to their heads."""
        with torch.no_grad():
            (read,) = self._teacher[0].read(inputs).values()
        return {**super().read(inputs), TEACHER: read}

    def of(self, reads: Mapping[str, Any], targets: Any = None) -> Tensor:
        """Return the loss for a result of `read`; targets as in `tfkit.Loss`."""
        states = dict(reads)
        teacher_read = states.pop(TEACHER)
        ((name, read),) = states.items()
        total = (1 - self.weight) * super().of(states, targets)
        rows, teacher_rows = read.hidden.flatten(0, -2), teacher_read.hidden.flatten(0, -2)
        teacher = self._teacher[0]
        (end,) = teacher.ends.values()
        heads = self.model.get_submodule(self.ends[name].head), teacher.model.get_submodule(end.head)
        chunks = -(-len(rows) * self.ends[name].vocab_size // MAX_LOGITS)
        divergence = partial(self._divergence, *heads, read.extra, teacher_read.extra)
        for part in zip(*(t.tensor_split(chunks) for t in (rows, teacher_rows, targets.flatten())), strict=True):
            # Computed again in the backward pass, so that the logits of a single chunk exist.
            total = total + self.weight * checkpoint(divergence, *part, use_reentrant=False)
        return total

    def _divergence(
        self,
        head: nn.Module,
        teacher_head: nn.Module,
        extra: Mapping[str, Tensor],
        teacher_extra: Mapping[str, Tensor],
        rows: Tensor,
        teacher_rows: Tensor,
        targets: Tensor,
    ) -> Tensor:
        """Return the divergence of some rows, times the square of the temperature."""
        temperature = self.temperature
        with torch.no_grad():
            expected = _log_softmax(teacher_head(teacher_rows, **teacher_extra) / temperature)
        predicted = _log_softmax(head(rows, **extra) / temperature)
        divergences = F.kl_div(predicted, expected, reduction="none", log_target=True).sum(-1)
        return temperature**2 * divergences.masked_fill(targets == IGNORE_INDEX, 0.0).sum()


def _log_softmax(logits: Tensor) -> Tensor:
    return F.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
