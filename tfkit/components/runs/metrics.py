"""Metrics of the logits of a model."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from tfkit.component import IGNORED, Data, LogitMetric, Metric, MetricConfig, Ratio
from tfkit.errors import Invalid


class LossMetricConfig(MetricConfig):
    """Cross-entropy in nats for each position that counts."""

    kind: Literal["loss"] = "loss"

    def build(self, data: Data) -> Metric:
        return CrossEntropy(None)


class BitsPerByteConfig(MetricConfig):
    """Cross-entropy in bits for each byte of the text: comparable between tokenizers."""

    kind: Literal["bits_per_byte"] = "bits_per_byte"

    def build(self, data: Data) -> Metric:
        tokenizer = data.tokenizer
        if tokenizer is None:
            raise Invalid("", "`bits_per_byte` needs text: the data has no tokenizer")
        try:
            return CrossEntropy(torch.tensor(tokenizer.byte_counts(), device="cpu"))
        except ValueError as error:
            raise Invalid("", f"`bits_per_byte` cannot count the bytes of the tokenizer: {error}") from error


class AccuracyConfig(MetricConfig):
    """The share of positions whose likeliest token is the target."""

    kind: Literal["accuracy"] = "accuracy"

    def build(self, data: Data) -> Metric:
        return Accuracy()


class ExactMatchConfig(MetricConfig):
    """The share of examples in which the likeliest token is the target at all positions that count.

    These are the examples whose counted part a model writes without an error when it always takes the likeliest token.
    """

    kind: Literal["exact_match"] = "exact_match"

    def build(self, data: Data) -> Metric:
        return ExactMatch()


class CrossEntropy(LogitMetric):
    """Nats for each position; or, if the bytes of each token are given, bits for each byte."""

    def __init__(self, sizes: Tensor | None) -> None:
        self._sizes = sizes

    def values(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="none")

    def sums(self, values: Tensor, targets: Tensor) -> Ratio:
        nats = super().sums(values, targets)
        if self._sizes is None:
            return nats
        return Ratio(nats.total / math.log(2), int(self._sizes[targets[targets != IGNORED].cpu()].sum()))


class Accuracy(LogitMetric):
    """The share of positions whose most likely token is the target."""

    def values(self, logits: Tensor, targets: Tensor) -> Tensor:
        return logits.argmax(-1) == targets


class ExactMatch(Accuracy):
    """The share of examples that are right at all positions that count."""

    def sums(self, values: Tensor, targets: Tensor) -> Ratio:
        return exact_matches(values, targets)


def exact_matches(values: Tensor, targets: Tensor) -> Ratio:
    """Return the number of examples, [b, t], with a true value wherever they count; and of all that count anywhere."""
    counted = targets != IGNORED
    examples = counted.any(-1)
    matches = (values | ~counted).all(-1) & examples
    return Ratio(int(matches.sum()), int(examples.sum()))
