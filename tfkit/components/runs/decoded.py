"""Numbers of what a model writes by itself, token after token; and of the best constant, to compare them with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.nn import functional as F

import tfkit
from tfkit.component import IGNORED, Data, Metric, MetricConfig, NonNegative
from tfkit.components.runs.metrics import Hits
from tfkit.components.runs.tokenizers import id_of
from tfkit.errors import Invalid


class _Decoded(MetricConfig):
    """The settings of both metrics of decoding, and what they take."""

    temperature: NonNegative = 0.0
    """Randomness; 0 takes the likeliest token."""
    stop: str | None = None
    """The text of the token that ends an answer; all places behind it count as this token."""

    def written(
        self, model: fx.GraphModule, data: Data, inputs: Mapping[str, Tensor], targets: Tensor, *, seed: int
    ) -> Tensor:
        if any(one.dim() > 2 for one in inputs.values()):
            raise Invalid("", "what a model writes cannot be measured in rows with several documents")
        *others, (_, tokens) = inputs.items()
        start = _start(targets, least=0 if others else 1)
        given: dict[str, Any] = dict(others)
        stop = None if self.stop is None else id_of(self.stop, data, "stop")
        made = tfkit.generate(
            model,
            tokens[:, : start + 1],
            max_new_tokens=targets.size(1) - start,
            temperature=self.temperature,
            stop=() if stop is None else [stop],
            pad=stop or 0,
            seed=seed,
            **given,
        )
        answer = F.pad(made.tokens, (start, targets.size(1) - start - made.tokens.size(1)), value=stop or 0)
        answer[:, :start] = 0
        n_tokens = max(data.vocab_size, int(answer.max()) + 1)  # a model may have more tokens than the data
        return F.one_hot(answer, n_tokens).float()


class DecodedAccuracyConfig(_Decoded):
    """The share of right tokens in the answers that the model writes, each token from those it wrote before."""

    kind: Literal["decoded_accuracy"] = "decoded_accuracy"

    def build(self, data: Data) -> Metric:
        return Hits(whole=False)


class DecodedExactMatchConfig(_Decoded):
    """The share of answers that the model writes without an error; at temperature 0, `exact_match` is the same."""

    kind: Literal["decoded_exact_match"] = "decoded_exact_match"

    def build(self, data: Data) -> Metric:
        return Hits(whole=True)


def _start(targets: Tensor, *, least: int) -> int:
    """The place of the first target; raises `Invalid` unless all answers end their examples and begin at one place.

    Before `least` there is a question.
    """
    counted = targets != IGNORED
    start = int(counted[0].int().argmax())
    if start < least or not bool(counted[:, start:].all()) or bool(counted[:, :start].any()):
        message = "what a model writes can be measured if every example ends in an answer, all of them at one place"
        raise Invalid("", message, help="for instance data `addition`, or the split `test` of `calculator`")
    return start


class ConstantAccuracyConfig(MetricConfig):
    """The accuracy of always writing the most frequent token of each place: a floor, without a model."""

    kind: Literal["constant_accuracy"] = "constant_accuracy"

    def build(self, data: Data) -> Metric:
        return ConstantTokens(data.vocab_size)


class ConstantExactMatchConfig(MetricConfig):
    """The share of the most frequent answer: a floor of `exact_match`, without a model."""

    kind: Literal["constant_exact_match"] = "constant_exact_match"

    def build(self, data: Data) -> Metric:
        return ConstantAnswer()


class ConstantTokens:
    """Counts of the tokens of each place."""

    def __init__(self, vocab_size: int) -> None:
        self._counts: Tensor = torch.zeros(0, vocab_size, dtype=torch.long, device="cpu")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        targets = targets.cpu()
        places = torch.arange(targets.size(1), device="cpu").expand_as(targets)
        self._counts = F.pad(self._counts, (0, 0, 0, max(targets.size(1) - self._counts.size(0), 0)))
        counted = targets != IGNORED
        found = places[counted], targets[counted]
        self._counts.index_put_(found, torch.ones_like(found[0]), accumulate=True)

    def compute(self) -> float:
        return float(self._counts.amax(-1).sum() / self._counts.sum())


class ConstantAnswer:
    """Counts of whole answers."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, ...]] = Counter()

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self._counts.update(answer for row in targets.tolist() if (answer := _counted(row)))

    def compute(self) -> float:
        return max(self._counts.values()) / self._counts.total()


def _counted(row: list[int]) -> tuple[int, ...]:
    return tuple(one for one in row if one != IGNORED)
