"""The loss, and metrics: of logits, of the answers that a model generates, and of the best constant answer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, fx, nn
from torch.nn import functional as F

import tfkit
from tfkit.component import Changeable, Probability
from tfkit.errors import Invalid
from tfkit.run.contract import (
    IGNORE_INDEX,
    ChoiceMetric,
    Data,
    DecodedMetric,
    LogitMetric,
    LossConfig,
    Metric,
    MetricConfig,
    Name,
    NonNegative,
    OutputConfig,
    PositiveCount,
    Ratio,
)
from tfkit.run.kinds.text import id_of


class CrossEntropyConfig(LossConfig):
    """Cross-entropy, its logits computed in chunks: `tfkit.Loss`."""

    kind: Literal["cross_entropy"] = "cross_entropy"

    label_smoothing: Changeable[Probability] = 0.0
    """The fraction of every target that is distributed evenly over the vocabulary."""
    z_loss: Changeable[Annotated[float, Field(ge=0, le=1)]] = 0.0
    """The weight of log(Z)^2, Z the sum of the exponentials of a position's logits (https://arxiv.org/abs/2204.02311)."""
    outputs: dict[str, OutputConfig] = Field(default_factory=dict)
    """The outputs in the loss, the main output first, each with its weight or `{weight: 0.3, shift: 2}`: a shift of 2
    predicts the token after the next token (https://arxiv.org/abs/2404.19737). By default the model's only output."""

    ahead: dict[str, PositiveCount] = Field(default_factory=dict)
    """Inputs of the model that receive the tokens of the data from a number of positions ahead: `{after: 1}`."""

    @property
    def terms(self) -> Mapping[str, OutputConfig]:
        return self.outputs

    @property
    def inputs_ahead(self) -> Mapping[str, int]:
        return self.ahead

    @property
    def predicts_targets(self) -> bool:
        return True

    def build(self, model: fx.GraphModule) -> nn.Module:
        return tfkit.Loss(
            model,
            outputs=self.outputs or None,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            reduction="sum",
        )


class LossMetricConfig(MetricConfig):
    """Cross-entropy in nats for each position that counts."""

    each_output = True
    cross_entropy = True
    kind: Literal["loss"] = "loss"

    def build(self, data: Data) -> Metric:
        return CrossEntropy(None)


class ObjectiveConfig(MetricConfig):
    """The loss of the run, with all of its terms and their weights: comparable between runs of equal losses only.

    It is computed in eval mode, with the same noise in every evaluation, and reported with the further numbers of the
    loss, such as `val.reward_accuracy`. If the loss is `undivided`, batches have the
    size of the run's batches, and a shorter last batch is left out.
    """

    objective = True
    kind: Literal["objective"] = "objective"

    def build(self, data: Data) -> Metric:
        return Objective()


class Objective(Metric):
    """The weighted sum of the means of all terms."""

    def compute(self, sums: Any) -> float:
        return float((sums[:, 0] / np.where(sums[:, 1] == 0, 1, sums[:, 1])).sum())


class BitsPerByteConfig(MetricConfig):
    """Cross-entropy in bits for each byte of the text: comparable between tokenizers."""

    cross_entropy = True
    kind: Literal["bits_per_byte"] = "bits_per_byte"

    def build(self, data: Data) -> Metric:
        tokenizer = data.tokenizer
        if tokenizer is None or getattr(data, "n_classes", None) is not None:
            reason = "has no tokenizer" if tokenizer is None else "has classes as targets"
            raise Invalid("", f"`bits_per_byte` needs text: the data {reason}")
        try:
            return CrossEntropy(torch.tensor(tokenizer.byte_counts(), device="cpu"))
        except ValueError as error:
            raise Invalid("", f"`bits_per_byte` cannot count the bytes of the tokenizer: {error}") from error


class AccuracyConfig(MetricConfig):
    """The fraction of positions whose most likely token is the target."""

    each_output = True
    kind: Literal["accuracy"] = "accuracy"

    def build(self, data: Data) -> Metric:
        return Accuracy()


class ExactMatchConfig(MetricConfig):
    """The fraction of examples in which the most likely token is the target at all positions that count.

    Greedy decoding generates the targets of exactly these examples without an error.
    """

    each_output = True
    kind: Literal["exact_match"] = "exact_match"

    def build(self, data: Data) -> Metric:
        return ExactMatch()


class CrossEntropy(LogitMetric):
    """Nats per position; or, with the number of bytes of each token, bits per byte."""

    def __init__(self, sizes: Tensor | None) -> None:
        self._sizes = sizes

    def values(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="none")

    def sums(self, values: Tensor, targets: Tensor) -> Ratio:
        nats = super().sums(values, targets)
        if self._sizes is None:
            return nats
        return Ratio(nats.total / math.log(2), int(self._sizes[targets[targets != IGNORE_INDEX].cpu()].sum()))


class Accuracy(LogitMetric):
    """Fraction of positions whose most likely token is the target."""

    def values(self, logits: Tensor, targets: Tensor) -> Tensor:
        return logits.argmax(-1) == targets


class ExactMatch(Accuracy):
    """Fraction of examples that are correct at all positions that count."""

    def sums(self, values: Tensor, targets: Tensor) -> Ratio:
        return exact_matches(values, targets)


def exact_matches(values: Tensor, targets: Tensor) -> Ratio:
    """Return the number of examples, [b, t], that are true at all positions that count, and of all that have any."""
    counted = targets != IGNORE_INDEX
    examples = counted.any(-1)
    matches = (values | ~counted).all(-1) & examples
    return Ratio(int(matches.sum()), int(examples.sum()))


class ChoiceAccuracyConfig(MetricConfig):
    """The fraction of examples of data `choices` whose correct continuation is more likely than every alternative."""

    kind: Literal["choice_accuracy"] = "choice_accuracy"

    name: Name | None = None
    """The end of its name in reports, `choice_accuracy_NAME`, which a run with several such metrics needs."""
    normalize: bool = False
    """If true, divide the log-likelihood of a continuation by its number of tokens."""

    def build(self, data: Data) -> Metric:
        return ChoiceAccuracy(normalize=self.normalize)


class ChoiceAccuracy(CrossEntropy, ChoiceMetric):
    """Compares the summed log-likelihoods of the continuations."""

    def __init__(self, *, normalize: bool) -> None:
        super().__init__(None)
        self._normalize = normalize

    def sums(self, values: Tensor, targets: Tensor) -> Ratio:
        if targets.size(1) < 2 and len(targets):
            raise Invalid("", "`choice_accuracy` needs examples with several continuations", help="use data `choices`")
        nats = values / targets.clamp(min=1) if self._normalize else values
        nats = nats.masked_fill(targets == 0, math.inf)
        return Ratio(int((nats[:, :1] < nats[:, 1:]).all(1).sum()), len(nats))


class _DecodedConfig(MetricConfig):
    """Common settings of the metrics that decode."""

    name: Name | None = None
    """The end of its name in reports, after the kind, which a run with several such metrics needs."""
    temperature: NonNegative = 0.0
    """Sampling temperature; with 0, each token is the most likely token."""
    stop: str | None = None
    """The text of the token that ends an answer; all later positions count as this token. By default, the token `end`
    of the data."""


class DecodedAccuracyConfig(_DecodedConfig):
    """The fraction of correct tokens in the answers that the model generates."""

    kind: Literal["decoded_accuracy"] = "decoded_accuracy"

    def build(self, data: Data) -> Metric:
        return DecodedAccuracy(self, data)


class DecodedExactMatchConfig(_DecodedConfig):
    """The fraction of answers that the model generates without an error; at temperature 0, it equals `exact_match`."""

    kind: Literal["decoded_exact_match"] = "decoded_exact_match"

    def build(self, data: Data) -> Metric:
        return DecodedExactMatch(self, data)


class DecodedAccuracy(DecodedMetric):
    """Fraction of correct tokens in generated answers."""

    def __init__(self, config: _DecodedConfig, data: Data) -> None:
        self._temperature = config.temperature
        end: int | None = getattr(data, "end", None)
        self._stop = end if config.stop is None else id_of(config.stop, data.tokenizer, "stop")
        self._cached: tfkit.CachedModel | None = None
        """The model with its caches, stored because it takes long to prepare."""

    def values(
        self, model: fx.GraphModule, inputs: Mapping[str, Tensor], targets: Tensor, *, seed: int, first: int
    ) -> Tensor:
        if targets.dim() == 1:
            raise Invalid("", "generated answers cannot be scored: the data has one target for each example")
        if any(tensor.dim() > 2 for tensor in inputs.values()):
            raise Invalid("", "generated answers cannot be scored in rows with several documents")
        *sources, (_, tokens) = inputs.items()
        start, stop = _answer_start(targets, minimum=0 if sources else 1), self._stop
        further: dict[str, Any] = dict(sources)
        try:
            if model.meta.get("generation") is None:
                output = model.meta["graph"].outputs[0]
                self._cached = self._cached or tfkit.CachedModel(model, length=targets.size(1) + 1, output=output)
            generated = tfkit.generate(
                self._cached or model,
                tokens[:, : start + 1],
                max_new_tokens=targets.size(1) - start,
                temperature=self._temperature,
                stop=() if stop is None else [stop],
                pad=stop or 0,
                seed=seed,
                first_prompt=first,
                **further,
            ).tokens
        except ValueError as error:
            raise Invalid("", f"the model cannot generate the answers: {error}") from error
        answer = F.pad(generated, (start, targets.size(1) - start - generated.size(1)), value=stop or 0)
        return answer == targets


class DecodedExactMatch(DecodedAccuracy):
    """Fraction of generated answers without an error."""

    def sums(self, values: Tensor, targets: Tensor) -> Ratio:
        return exact_matches(values, targets)


def _answer_start(targets: Tensor, *, minimum: int) -> int:
    """Return the position at which all answers start; raise `Invalid` unless every answer ends its example.

    Answers must start at position `minimum` or later, so that a question precedes them.
    """
    counted = targets != IGNORE_INDEX
    start = int(counted[0].int().argmax())
    if start < minimum or not bool(counted[:, start:].all()) or bool(counted[:, :start].any()):
        message = "every example must end with an answer, and all answers must start at the same position"
        raise Invalid("", message, help="use data such as `addition`, or the split `test` of `calculator`")
    return start


class ConstantAccuracyConfig(MetricConfig):
    """The accuracy of always predicting the most frequent token of each position: a floor that needs no model."""

    kind: Literal["constant_accuracy"] = "constant_accuracy"

    def build(self, data: Data) -> Metric:
        return ConstantTokens()


class ConstantExactMatchConfig(MetricConfig):
    """The fraction of the most frequent answer: a floor of `exact_match` that needs no model."""

    kind: Literal["constant_exact_match"] = "constant_exact_match"

    def build(self, data: Data) -> Metric:
        return ConstantAnswer()


class ConstantTokens(Metric):
    """Counts of the tokens at each position."""

    def sums(self, values: Tensor, targets: Tensor) -> Counter[tuple[int, int]]:
        counted = targets != IGNORE_INDEX
        return Counter(zip(counted.nonzero()[:, 1].tolist(), targets[counted].tolist(), strict=True))

    def compute(self, sums: Counter[tuple[int, int]]) -> float:
        best: Counter[int] = Counter()
        for (position, _), count in sums.items():
            best[position] = max(best[position], count)
        return best.total() / sums.total()


class ConstantAnswer(Metric):
    """Counts of complete answers."""

    def sums(self, values: Tensor, targets: Tensor) -> Counter[tuple[int, ...]]:
        answers = (tuple(token for token in row if token != IGNORE_INDEX) for row in targets.tolist())
        return Counter(answer for answer in answers if answer)

    def compute(self, sums: Counter[tuple[int, ...]]) -> float:
        return max(sums.values()) / sums.total()
