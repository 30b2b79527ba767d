"""Numbers of an evaluation, from sums over its batches."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from tfkit.component import IGNORED, Data, Metric, MetricConfig
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
        except ValueError as wrong:
            raise Invalid("", f"`bits_per_byte` cannot count the bytes of the tokenizer: {wrong}") from wrong


class AccuracyConfig(MetricConfig):
    """The share of positions whose likeliest token is the target."""

    kind: Literal["accuracy"] = "accuracy"

    def build(self, data: Data) -> Metric:
        return Hits(whole=False)


class ExactMatchConfig(MetricConfig):
    """The share of examples in which the likeliest token is the target at all positions that count.

    These are the examples whose counted part a model writes without an error when it always takes the likeliest token.
    """

    kind: Literal["exact_match"] = "exact_match"

    def build(self, data: Data) -> Metric:
        return Hits(whole=True)


class CrossEntropy:
    """Nats for each position; or, if the bytes of each token are given, bits for each byte."""

    def __init__(self, sizes: Tensor | None) -> None:
        self._sizes = sizes
        self._total, self._count = 0.0, 0

    def update(self, logits: Tensor, targets: Tensor) -> None:
        wide = logits.flatten(0, -2).float()
        self._total += F.cross_entropy(wide, targets.flatten(), ignore_index=IGNORED, reduction="sum").item()
        counted = targets[targets != IGNORED].cpu()
        self._count += counted.numel() if self._sizes is None else int(self._sizes[counted].sum())

    def compute(self) -> float:
        return self._total / self._count / (1.0 if self._sizes is None else math.log(2))


class Hits:
    """The share of right positions, or of examples that are right as a whole."""

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._right, self._count = 0, 0

    def update(self, logits: Tensor, targets: Tensor) -> None:
        counted = targets != IGNORED
        right = (logits.argmax(-1) == targets) & counted
        if self._whole:
            right, counted = (right == counted).all(-1), counted.any(-1)
            right &= counted
        self._right += int(right.sum())
        self._count += int(counted.sum())

    def compute(self) -> float:
        return self._right / self._count
