"""Vectors of texts or images that belong together: the contrastive loss, and metrics of retrieval.

InfoNCE: https://arxiv.org/abs/1807.03748. Both directions, with a learned temperature: https://arxiv.org/abs/2103.00020.
Sigmoid: https://arxiv.org/abs/2303.15343.

b pairs, n documents, k outputs, m width of vectors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from tfkit.component import PositiveFloat
from tfkit.errors import Invalid
from tfkit.run.contract import IGNORE_INDEX, Data, DecodedMetric, LossConfig, Metric, MetricConfig, Name, PositiveCount

TEMPERATURE = 0.05
QUERIES = 1024
"""The number of queries whose scores are computed at once."""


class ContrastiveConfig(LossConfig):
    """Each query has its own document; the other documents of the batch are its negatives.

    The model returns a vector of the query, a vector of the document and, optionally, vectors of further negatives. Or
    it returns the logits of all pairs, as by the block `contrast`. Pairs whose documents are equal, because their
    targets are, are not negatives of each other.
    """

    kind: Literal["contrastive"] = "contrastive"

    form: Literal["softmax", "sigmoid"] = "softmax"
    """softmax: the cross-entropy of the own document among all, as in InfoNCE and CLIP; sigmoid: a binary decision for
    each pair, as in SigLIP, for logits of pairs."""
    symmetric: bool = True
    """If true, softmax is the mean of both directions, from queries to documents and back; if false, only the first."""
    temperature: PositiveFloat | None = None
    """The divisor of the cosines of vectors, by default 0.05. Logits of pairs have no temperature."""

    def check(self) -> None:
        """Raise `Invalid` for a direction without effect."""
        super().check()
        if self.form == "sigmoid" and "symmetric" in self.model_fields_set:
            raise Invalid("symmetric", "`symmetric` has no effect: `form` is sigmoid", help="remove it")

    @property
    def undivided(self) -> bool:
        return True

    def build(self, model: fx.GraphModule) -> nn.Module:
        graph = model.meta["graph"]
        outputs = [graph.node(name) for name in graph.outputs]
        if len(outputs) == 1 and outputs[0].config.compares_rows:
            if self.temperature is not None:
                message = f"`temperature` has no effect: `{outputs[0].name}` returns logits of pairs"
                raise Invalid("temperature", message, help="remove it")
        elif len(outputs) < 2 or any(node.output.type != "vector" for node in outputs):
            message = "the loss `contrastive` needs a model that returns a vector of each query and of its document"
            help = "write `outputs: [query_vector, document_vector]`, or end the model in a block `contrast`"
            raise Invalid("", message, help=help)
        elif self.form == "sigmoid":
            message = "`form: sigmoid` needs logits of pairs, with a learned temperature and bias"
            raise Invalid("form", message, help="end the model in a block `contrast`")
        return ContrastiveLoss(model, self)


class ContrastiveLoss(nn.Module):
    """Inputs of a full batch, and the number of each document -> the sum of the losses of its pairs."""

    def __init__(self, model: nn.Module, config: ContrastiveConfig) -> None:
        super().__init__()
        self.model, self.config = model, config

    def forward(self, inputs: Mapping[str, Any], targets: Tensor | None) -> Tensor:
        numbers = targets is not None and targets.dim() == 1 and not targets.is_floating_point()
        if targets is None or not numbers or (not torch.compiler.is_compiling() and bool((targets < 0).any())):
            message = "the loss `contrastive` needs the number of a document as the target of each example"
            raise Invalid("", message, help="use data such as `text_pairs`")
        outputs = self.model(**inputs)
        logits = outputs if isinstance(outputs, Tensor) else self._scaled_cosines(outputs)  # [b, n]
        logits, pairs = logits.to(torch.promote_types(logits.dtype, torch.float32)), len(logits)
        diagonal = torch.eye(pairs, dtype=torch.bool, device=logits.device)
        repeated = F.pad((targets[:, None] == targets) & ~diagonal, (0, logits.size(1) - pairs))
        if self.config.form == "sigmoid":
            return -F.logsigmoid(torch.where(diagonal, logits, -logits)).masked_fill(repeated, 0).sum()
        logits = logits.masked_fill(repeated, -torch.inf)
        totals = logits.logsumexp(1)
        if self.config.symmetric:
            totals = (totals + logits[:, :pairs].logsumexp(0)) / 2
        return (totals - logits.diagonal()).sum()

    def _scaled_cosines(self, outputs: tuple[Tensor, ...]) -> Tensor:
        """Return the cosine of each query and each document, divided by the temperature."""
        with torch.autocast(outputs[0].device.type, enabled=False):
            queries, *documents = (
                F.normalize(vectors.to(torch.promote_types(vectors.dtype, torch.float32)), dim=-1)
                for vectors in outputs
            )
            return queries @ torch.cat(documents).T / (self.config.temperature or TEMPERATURE)


class RecallConfig(MetricConfig):
    """The fraction of queries whose own document is among the first of all documents of the evaluated split."""

    kind: Literal["recall"] = "recall"

    name: Name | None = None
    """The end of its name in reports, `recall_NAME`, which a run with several such metrics needs."""
    at: PositiveCount = 1
    """The number of documents that a query finds."""

    def build(self, data: Data) -> Metric:
        return Recall(self.at)


class MRRConfig(MetricConfig):
    """The mean of 1 / rank of each query's own document among all documents of the evaluated split."""

    kind: Literal["mrr"] = "mrr"

    def build(self, data: Data) -> Metric:
        return MRR()


@dataclass(frozen=True)
class Embeddings:
    """Normalized vectors of queries and of their documents, [b, 2, m], and the numbers of the documents, [b]."""

    vectors: Tensor
    documents: Tensor

    def __add__(self, other: Embeddings) -> Embeddings:
        vectors, documents = (
            torch.cat(pair) for pair in ((self.vectors, other.vectors), (self.documents, other.documents))
        )
        return Embeddings(vectors, documents)

    def ranks(self) -> Tensor:
        """Return the rank of each query's document among all distinct documents, [b]; ties count against it."""
        numbers, first = np.unique(self.documents.numpy(), return_index=True)
        queries, documents = self.vectors[:, 0], self.vectors[torch.from_numpy(first), 1]
        columns = torch.from_numpy(np.searchsorted(numbers, self.documents.numpy()))
        ranks = []
        for start in range(0, len(queries), QUERIES):
            scores = queries[start : start + QUERIES] @ documents.T
            target = scores.gather(1, columns[start : start + QUERIES, None])
            ranks.append((scores >= target).sum(1))
        return torch.cat(ranks)


class RetrievalMetric(DecodedMetric):
    """A metric of the rank of each query's document, by the cosine of their vectors."""

    def values(
        self, model: fx.GraphModule, inputs: Mapping[str, Tensor], targets: Tensor, *, seed: int, first: int
    ) -> Tensor:
        """Return the vectors of queries and of documents, [b, 2, m]."""
        graph = model.meta["graph"]
        if len(graph.outputs) < 2 or any(graph.node(name).output.type != "vector" for name in graph.outputs[:2]):
            message = "metrics of retrieval need a model that returns a vector of each query and of its document"
            raise Invalid("", message, help="write `outputs: [query_vector, document_vector]`")
        return F.normalize(torch.stack(model(**inputs)[:2], dim=1).double(), dim=-1)

    def sums(self, values: Tensor, targets: Tensor) -> Embeddings:
        counted = targets[:, 0].cpu() != IGNORE_INDEX
        return Embeddings(values[counted, 0], targets[:, 0].cpu()[counted])

    @abstractmethod
    def compute(self, sums: Embeddings) -> float:
        """Return the metric from the vectors of all examples."""


class Recall(RetrievalMetric):
    """The fraction of ranks up to a number."""

    def __init__(self, at: int) -> None:
        self._at = at

    def compute(self, sums: Embeddings) -> float:
        return float((sums.ranks() <= self._at).double().mean())


class MRR(RetrievalMetric):
    """The mean reciprocal rank."""

    def compute(self, sums: Embeddings) -> float:
        return float(sums.ranks().double().reciprocal().mean())
