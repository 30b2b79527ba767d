"""Flow matching: a model learns the velocities from examples to noise, from which `tfkit.sample_flow` draws samples.

https://arxiv.org/abs/2210.02747; the levels of `logit_normal`: https://arxiv.org/abs/2403.03206, section 3.1.

b rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

import tfkit
from tfkit import Diagnostic, Invalid, SpecError
from tfkit.component import PositiveFloat, Probability


class FlowMatchingConfig(tfkit.LossConfig):
    """Predict the velocity e - x of examples x at (1 - s) x + s e, with noise e and a level s from 0 to 1 of each row.

    The loss is the mean squared error over the numbers of a row, per row. The examples are the only input of the data:
    vectors, features or images. The model returns a velocity of the same shape. `tfkit sample` draws samples.
    """

    kind: Literal["flow_matching"] = "flow_matching"

    time: str = "time"
    """The input of the model that receives the level times `scale`: a vector of width 1; or of an even width, for its
    cosines and sines as in DiT."""
    scale: PositiveFloat = 1000.0
    """The time at level 1."""
    label: str | None = None
    """The input of the model that receives the class in the targets of the data: a vector with a number for each class.
    By default, the targets are not used."""
    drop: Probability = 0.0
    """The probability that a row is trained without its class, as guidance requires: `label` is then zeros."""
    levels: Literal["uniform", "logit_normal"] = "uniform"
    """The distribution of s: uniform; or the sigmoid of a normal distribution, which prefers the middle."""
    mean: float = 0.0
    """The mean of that normal distribution."""
    std: PositiveFloat = 1.0
    """The standard deviation of that normal distribution."""

    def check(self) -> None:
        """Raise `Invalid` for fields without effect."""
        super().check()
        if self.drop and self.label is None:
            raise Invalid("drop", "`drop` has no effect without `label`", help="write `label: label`, or remove it")
        for name in ("mean", "std"):
            if self.levels == "uniform" and name in self.model_fields_set:
                message = f"`{name}` has no effect: the levels are uniform"
                raise Invalid(name, message, help="write `levels: logit_normal`, or remove it")

    @property
    def draws_noise(self) -> bool:
        return True

    @property
    def fills(self) -> Mapping[str, str]:
        return dict.fromkeys([self.time, *([] if self.label is None else [self.label])], "vector")

    def build(self, model: fx.GraphModule) -> nn.Module:
        flow = tfkit.FlowModel(model, time=self.time, label=self.label, scale=self.scale)
        return FlowMatchingLoss(model, flow, self)


class FlowMatchingLoss(nn.Module):
    """Inputs, targets and noise -> the sum over the rows of the mean squared error of the velocities."""

    def __init__(self, model: nn.Module, flow: tfkit.FlowModel, config: FlowMatchingConfig) -> None:
        super().__init__()
        self.model, self.flow, self.config = model, flow, config

    def forward(self, inputs: Mapping[str, Any], targets: Tensor | None, noise: tfkit.Noise) -> tfkit.LossSum:
        examples: Tensor = inputs[self.flow.x]
        levels, ends = self._levels(noise).to(examples.dtype), noise.randn(*examples.shape[1:])
        labels = None if self.config.label is None else self._labels(targets, noise)
        fractions = levels[(..., *[None] * (examples.dim() - 1))]
        points = (1 - fractions) * examples + fractions * ends
        mask = inputs.get(str(self.flow.signal.mask))
        errors = (self.flow.velocities(points, levels, labels, mask) - (ends - examples)) ** 2
        if mask is None:
            return tfkit.LossSum(errors.flatten(1).mean(1).sum(), len(errors))
        of_positions = errors.mean(-1) * mask
        return tfkit.LossSum((of_positions.sum(1) / mask.sum(1)).sum(), len(errors))

    def _levels(self, noise: tfkit.Noise) -> Tensor:
        """Return a level for each row, [b]."""
        if self.config.levels == "uniform":
            return noise.rand()
        return torch.sigmoid(self.config.mean + self.config.std * noise.randn())

    def _labels(self, targets: Tensor | None, noise: tfkit.Noise) -> Tensor:
        """Return the class of each row, [b], or -1 for rows without a class."""
        n_classes = self.flow.n_classes
        if targets is None or targets.dim() != 1 or targets.is_floating_point():
            message = "the data must have a class for each example, which the loss passes to the model"
            raise SpecError(Diagnostic(message, path="loss.label", help="use data with classes, or remove `label`"))
        if not torch.compiler.is_compiling() and bool((targets >= n_classes).any()):
            message = (
                f"the data has the class {int(targets.max())}, but `{self.config.label}` has the width {n_classes}"
            )
            help = "set the width of the input to the number of classes, such as `data.vocab_size`"
            raise SpecError(Diagnostic(message, path="loss.label", help=help))
        if not self.training or not self.config.drop:
            return targets
        return targets.masked_fill(noise.rand() < self.config.drop, -1)
