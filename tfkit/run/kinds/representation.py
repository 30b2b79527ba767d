"""Metrics of the vectors that a model computes without labels: a linear probe, and the rank of the vectors.

b examples, m width of vectors, n classes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from tfkit.component import PositiveFloat
from tfkit.errors import Invalid, listing
from tfkit.run.contract import IGNORE_INDEX, Data, DecodedMetric, Metric, MetricConfig


class _VectorConfig(MetricConfig):
    """Common settings of the metrics of vectors."""

    output: str | None = None
    """The output of the model with the vectors, by default the last output. Of a sequence, the mean over its positions
    is the vector of an example."""


class LinearProbeConfig(_VectorConfig):
    """The fraction of examples whose class a linear map of their vectors predicts, fitted to all other examples.

    The map is a ridge regression on the classes of the split, with an intercept, of standardized vectors.
    """

    kind: Literal["linear_probe"] = "linear_probe"

    ridge: PositiveFloat = 1.0
    """The weight of the squared coefficients."""

    def build(self, data: Data) -> Metric:
        if getattr(data, "n_classes", None) is None and data.vocab_size == 0:
            raise Invalid("", "`linear_probe` needs data with a class for each example")
        return LinearProbe(self.output, self.ridge)


class RankMeConfig(_VectorConfig):
    """The effective rank of the vectors of a split, from 1, if they collapse, to their width.

    It is the exponential of the entropy of their singular values (https://arxiv.org/abs/2210.02885).
    """

    kind: Literal["rankme"] = "rankme"

    def build(self, data: Data) -> Metric:
        return RankMe(self.output)


@dataclass(frozen=True)
class Vectors:
    """Vectors of examples, [b, m], and their classes, [b]."""

    vectors: Tensor
    classes: Tensor

    def __add__(self, other: Vectors) -> Vectors:
        return Vectors(torch.cat([self.vectors, other.vectors]), torch.cat([self.classes, other.classes]))


class VectorMetric(DecodedMetric):
    """A metric of the vectors of all examples of a split."""

    def __init__(self, output: str | None) -> None:
        self._output = output

    def values(
        self, model: fx.GraphModule, inputs: Mapping[str, Tensor], targets: Tensor, *, seed: int, first: int
    ) -> Tensor:
        """Return the vector of each example, [b, m]."""
        graph = model.meta["graph"]
        name = self._output or graph.outputs[-1]
        if name not in graph.outputs:
            raise Invalid("output", f"`output` must be an output of the model, {listing(graph.outputs)}; got `{name}`")
        if targets.dim() != 1:
            raise Invalid("", "metrics of vectors need data with a class for each example")
        signal, outputs = graph.node(name).output, model(**inputs)
        vectors = (outputs if isinstance(outputs, tuple) else (outputs,))[graph.outputs.index(name)].double()
        if signal.type != "sequence":
            return vectors
        mask = inputs.get(signal.mask or "")
        if mask is None:
            return vectors.mean(1)
        return (vectors * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    def sums(self, values: Tensor, targets: Tensor) -> Vectors:
        counted = targets[:, 0].cpu() != IGNORE_INDEX
        return Vectors(values.flatten(0, -2)[counted], targets[:, 0].cpu()[counted])

    @abstractmethod
    def compute(self, sums: Vectors) -> float:
        """Return the metric from the vectors of all examples."""


class LinearProbe(VectorMetric):
    """The accuracy of a ridge regression on the other examples."""

    def __init__(self, output: str | None, ridge: float) -> None:
        super().__init__(output)
        self._ridge = ridge

    def compute(self, sums: Vectors) -> float:
        if len(sums.classes) < 2:
            message = f"`linear_probe` needs at least 2 examples of a split; got {len(sums.classes)}"
            raise Invalid("", message, help="evaluate more examples")
        x, y = F.normalize(sums.vectors - sums.vectors.mean(0), dim=0), F.one_hot(sums.classes).double()
        x = x * len(x) ** 0.5
        x = F.pad(x, (0, 1), value=1.0)
        penalty = torch.full((x.size(1),), self._ridge, dtype=x.dtype).diag()
        penalty[-1, -1] = 0
        hat = x @ torch.linalg.solve(x.T @ x + penalty, x.T)
        # The prediction of a row without this row: https://en.wikipedia.org/wiki/PRESS_statistic
        leverage = hat.diagonal()[:, None]
        predicted = (hat @ y - leverage * y) / (1 - leverage)
        return float((predicted.argmax(1) == sums.classes).double().mean())


class RankMe(VectorMetric):
    """The exponential of the entropy of normalized singular values."""

    def compute(self, sums: Vectors) -> float:
        values = torch.linalg.svdvals(sums.vectors)
        fractions = values / values.sum() + 1e-7
        return float((-(fractions * fractions.log()).sum()).exp())
