"""Models with two towers: the blocks that compare images with texts or queries with documents, and a metric.

CLIP: https://arxiv.org/abs/2103.00020. With a bias, SigLIP: https://arxiv.org/abs/2303.15343. ColBERT:
https://arxiv.org/abs/2004.12832.

b pairs of an image and a text, m width of their vectors, s tokens of a query, t tokens of a document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import tfkit
from tfkit import Invalid


class ContrastConfig(tfkit.BlockConfig):
    """Logits of each image and each text of a batch: the cosine of their vectors, times a learned factor."""

    compares_rows = True
    block: Literal["contrast"] = "contrast"
    inputs: tuple[tfkit.Wire, ...]
    """The vectors of the images, and the vectors of the texts."""
    log_scale: float = 2.6592
    """Logarithm of the initial factor."""
    bias: float | None = None
    """Initial value of a learned bias; null for no bias."""

    def output(self, inputs: tfkit.Signals) -> tfkit.Signal:
        signals: list[tfkit.Signal] = inputs["inputs"]
        if len(signals) != 2:
            raise Invalid("inputs", f"`inputs` must name two vectors; got {len(signals)}")
        for index, signal in enumerate(signals):
            if signal.type != "vector" or signal.width != signals[0].width:
                message = f"`inputs` must be vectors of the same width; got {signal.in_words()}"
                raise Invalid(f"inputs.{index}", message)
        return tfkit.Signal("logits")

    def build(self, make: tfkit.Make, inputs: tfkit.Signals) -> nn.Module:
        return Contrast(self.log_scale, self.bias)


class Contrast(nn.Module):
    """Two vectors [b, m] -> [b, b]: images by texts."""

    def __init__(self, log_scale: float, bias: float | None) -> None:
        super().__init__()
        self.first_scale = log_scale
        self.first_bias = bias
        self.log_scale = nn.Parameter(torch.empty(1))
        self.bias = None if bias is None else nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        """Fill the parameters with the values of the spec."""
        nn.init.constant_(self.log_scale, self.first_scale)
        if self.bias is not None and self.first_bias is not None:
            nn.init.constant_(self.bias, self.first_bias)

    def forward(self, inputs: list[Tensor]) -> Tensor:
        images, texts = F.normalize(inputs[0], dim=-1), F.normalize(inputs[1], dim=-1)
        logits = torch.einsum("i m, j m -> i j", images, texts) * self.log_scale.exp()
        return logits if self.bias is None else logits + self.bias


class LateInteractionConfig(tfkit.BlockConfig):
    """Scores of each query and each document of a batch: the largest cosines of the query's tokens, added up."""

    compares_rows = True
    block: Literal["late_interaction"] = "late_interaction"
    inputs: tuple[tfkit.MaskedWire, ...]
    """The sequences of the queries, and the sequences of the documents."""

    def output(self, inputs: tfkit.Signals) -> tfkit.Signal:
        signals: list[tfkit.Signal] = inputs["inputs"]
        if len(signals) != 2:
            raise Invalid("inputs", f"`inputs` must name two sequences; got {len(signals)}")
        for index, signal in enumerate(signals):
            if signal.type != "sequence" or signal.width != signals[0].width:
                message = f"`inputs` must be sequences of the same width; got {signal.in_words()}"
                raise Invalid(f"inputs.{index}", message)
        return tfkit.Signal("logits")

    def build(self, make: tfkit.Make, inputs: tfkit.Signals) -> nn.Module:
        return LateInteraction()


class LateInteraction(nn.Module):
    """Two sequences [b, t, m] -> [b, b]: queries by documents."""

    def forward(self, inputs: list[Tensor], inputs_mask: list[Tensor | None] | None = None) -> Tensor:
        queries, documents = F.normalize(inputs[0], dim=-1), F.normalize(inputs[1], dim=-1)
        cosines = torch.einsum("i s m, j t m -> i j s t", queries, documents)
        masks: list[Tensor | None] = [None, None] if inputs_mask is None else inputs_mask
        of_queries, of_documents = masks[0], masks[1]
        if of_documents is not None:  # the smallest cosine, so that documents without tokens have a finite score
            cosines = cosines.masked_fill(~of_documents.to(torch.bool)[None, :, None], -1.0)
        largest = cosines.amax(dim=3)
        if of_queries is not None:
            largest = largest * of_queries[:, None]
        return largest.sum(dim=2)


class MatchesConfig(tfkit.MetricConfig):
    """The fraction of images whose own text has the largest logit among the texts of the batch."""

    kind: Literal["matches"] = "matches"

    def build(self, data: Any) -> tfkit.Metric:
        return Matches()


class Matches(tfkit.DecodedMetric):
    """1 for each image that finds its text."""

    def values(
        self, model: fx.GraphModule, inputs: Mapping[str, Tensor], targets: Tensor, *, seed: int, first: int
    ) -> Tensor:
        return model(**inputs).argmax(dim=1) == torch.arange(len(targets), device=targets.device)
