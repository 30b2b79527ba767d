"""The loss of real targets, and metrics in the units of the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from tfkit.component.config import PositiveFloat
from tfkit.errors import Invalid
from tfkit.run.contract import Data, LogitMetric, LossConfig, LossSum, Metric, MetricConfig, Ratio


class RegressionConfig(LossConfig):
    """Error of real targets; of several numbers, the mean. Positions whose targets are NaN do not count."""

    of_numbers = True
    kind: Literal["regression"] = "regression"

    form: Literal["mse", "mae", "huber"] = "mse"
    """Squared error; absolute error; or Huber loss: half of the squared error up to `delta`, and linear beyond it."""
    delta: PositiveFloat = 1.0
    """The error at which the Huber loss becomes linear, in the units of the targets of the model."""

    def check(self) -> None:
        """Raise `Invalid` for a `delta` without effect."""
        super().check()
        if self.form != "huber" and "delta" in self.model_fields_set:
            raise Invalid("delta", f"`delta` has no effect: `form` is {self.form}", help="write `form: huber`")

    def build(self, model: fx.GraphModule) -> nn.Module:
        graph = model.meta["graph"]
        if len(graph.outputs) != 1 or graph.node(graph.outputs[0]).output.width is None:
            message = (
                "the loss `regression` needs a model with a single output, with an axis for the numbers of a target"
            )
            raise Invalid("", message, help="use a `classifier` without `squeeze` as the output of the model")
        return Regression(model, self)


class Regression(nn.Module):
    """The sum over the positions that count, and their number."""

    def __init__(self, model: fx.GraphModule, config: RegressionConfig) -> None:
        super().__init__()
        self.model = model
        self._config = config

    def forward(self, inputs: Mapping[str, Tensor], targets: Tensor) -> LossSum:
        """Return the loss of outputs [b, n] or [b, t, n]. Without an axis n, the targets have one number each."""
        outputs = self.model(**inputs)
        targets = targets_like(outputs, targets)
        counted = ~targets.isnan().any(-1)
        predictions, targets = outputs.float()[counted], targets[counted]
        if self._config.form == "huber":
            losses = F.huber_loss(predictions, targets, reduction="none", delta=self._config.delta)
        else:
            function = F.mse_loss if self._config.form == "mse" else F.l1_loss
            losses = function(predictions, targets, reduction="none")
        return LossSum(losses.mean(-1).sum(), counted.sum())


def targets_like(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return targets in the shape of the outputs of a model, [..., n]. Raise `Invalid` if they have a different shape.

    Outputs of a single number need no axis for it in the targets.
    """
    if outputs.shape == targets.shape and outputs.dim() > 1:
        return targets
    if outputs.shape == (*targets.shape, 1):
        return targets[..., None]
    message = f"the targets have the shape {list(targets.shape)}, but the model returns {list(outputs.shape)}"
    help = "use a head with one output for each number of a target: `{block: classifier, n_classes: 3}`"
    raise Invalid("", message, help=help)


class _RegressionMetricConfig(MetricConfig):
    of_numbers = True


class MSEConfig(_RegressionMetricConfig):
    """Mean squared error, in the squared units of the data; of several numbers, the mean."""

    kind: Literal["mse"] = "mse"

    def build(self, data: Data) -> Metric:
        return MeanError(data, 2)


class MAEConfig(_RegressionMetricConfig):
    """Mean absolute error, in the units of the data; of several numbers, the mean."""

    kind: Literal["mae"] = "mae"

    def build(self, data: Data) -> Metric:
        return MeanError(data, 1)


class R2Config(_RegressionMetricConfig):
    """Coefficient of determination: 1 without error, 0 for the mean of the split; of several numbers, the mean.

    It does not depend on the units of the data. A number that never changes gives 1 without error, and otherwise 0.
    """

    kind: Literal["r2"] = "r2"

    def build(self, data: Data) -> Metric:
        return R2(data)


class _ErrorMetric(LogitMetric):
    """A metric whose values are the errors of all numbers, [n, v], in the units of the data."""

    def __init__(self, data: Data) -> None:
        self._std = torch.tensor(getattr(data, "std", 1.0), dtype=torch.float64, device="cpu")

    def values(self, logits: Tensor, targets: Tensor) -> Tensor:
        return logits.float() - targets

    def counted(self, values: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return errors and targets of the positions that count, [n, v], as float64 in the units of the data."""
        counted = ~targets.isnan().any(-1)
        errors, numbers = (tensor.cpu()[counted.cpu()].double() * self._std for tensor in (values, targets))
        return errors, numbers


class MeanError(_ErrorMetric):
    """The mean of a power of the absolute error."""

    def __init__(self, data: Data, power: int) -> None:
        super().__init__(data)
        self._power = power

    def sums(self, values: Tensor, targets: Tensor) -> Ratio:
        errors, _ = self.counted(values, targets)
        return Ratio(float((errors.abs() ** self._power).sum()), errors.numel())


@dataclass(frozen=True)
class Moments:
    """Count, mean and summed squared deviations of targets, and summed squared errors, by number, [v]."""

    count: int
    mean: Tensor
    deviations: Tensor
    errors: Tensor

    def __add__(self, other: Moments) -> Moments:
        count, distance = self.count + other.count, other.mean - self.mean
        share = other.count / max(count, 1)
        between = distance.square() * self.count * share
        return Moments(
            count,
            self.mean + distance * share,
            self.deviations + other.deviations + between,
            self.errors + other.errors,
        )


class R2(_ErrorMetric):
    """1 minus the ratio of squared errors to squared deviations from the mean."""

    def sums(self, values: Tensor, targets: Tensor) -> Moments:
        errors, numbers = self.counted(values, targets)
        mean = numbers.mean(0) if len(numbers) else numbers.new_zeros(numbers.size(1))
        return Moments(len(numbers), mean, (numbers - mean).square().sum(0), errors.square().sum(0))

    def compute(self, sums: Any) -> float:
        constant = sums.deviations == 0
        scores = 1 - sums.errors / sums.deviations.masked_fill(constant, 1)
        return float(torch.where(constant, (sums.errors == 0).double(), scores).mean())
