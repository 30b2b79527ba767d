"""Models with two towers: the block that compares images with texts, the contrastive loss, and a metric.

Softmax: https://arxiv.org/abs/2103.00020. Sigmoid: https://arxiv.org/abs/2303.15343.

b pairs of an image and a text, m width of their vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import tfkit
from tfkit import Diagnostic, Invalid, SpecError


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


class ContrastiveConfig(tfkit.LossConfig):
    """Each image has its own text: the cross-entropy of both directions, or the sigmoid loss of each pair."""

    kind: Literal["contrastive"] = "contrastive"
    form: Literal["softmax", "sigmoid"] = "softmax"
    """softmax, as in CLIP, or sigmoid, as in SigLIP."""

    def build(self, model: fx.GraphModule) -> nn.Module:
        graph: tfkit.Graph = model.meta["graph"]
        output = graph.node(graph.outputs[0])
        if len(graph.outputs) > 1 or not isinstance(output.config, ContrastConfig):
            raise ValueError("a contrastive loss must be computed from a block `contrast`, the model's only output")
        return ContrastiveLoss(model, self.form)


class ContrastiveLoss(nn.Module):
    """Inputs of a model, and the targets 0, 1, 1, ... of a full batch -> the sum of the losses of its pairs."""

    def __init__(self, model: fx.GraphModule, form: str) -> None:
        super().__init__()
        self.model = model
        self.form = form

    def forward(self, inputs: Mapping[str, Any], targets: Tensor) -> Tensor:
        logits = self.model(**inputs).float()
        numbers = torch.arange(len(logits), device=logits.device)
        alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
        if not torch.compiler.is_compiling() and not (alone and torch.equal(targets, numbers.clamp(max=1))):
            message = "a contrastive loss must compute all pairs of a batch in a single call"
            help = "use one process, data such as `image_pairs`, and no `machine.micro_batch` below the batch"
            raise SpecError(Diagnostic(message, path="loss", help=help))
        if self.form == "softmax":
            both = F.cross_entropy(logits, numbers, reduction="sum") + F.cross_entropy(
                logits.T, numbers, reduction="sum"
            )
            return both / 2
        return -F.logsigmoid(logits * (2 * torch.eye(len(logits), device=logits.device) - 1)).sum()


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
