"""Masked diffusion of text, as in LLaDA: https://arxiv.org/abs/2502.09992, equation 3.

b rows, t positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import tfkit
from tfkit.run.contract import IGNORE_INDEX

MIN_LEVEL = 1e-3
"""The smallest probability that a token is hidden, as in the published code: its inverse is a weight."""


class MaskedDiffusionConfig(tfkit.LossConfig):
    """Predict hidden tokens, each hidden with a probability that is drawn for its row: a bound on -log p(text).

    The cross-entropy of each hidden token is divided by that probability, and the sum by the number of tokens. The
    targets of the data determine the tokens: all tokens except the first of a window, or the tokens of the answers. The
    mask token is the highest id of the model, so the model has at least one more token than the data: `vocab_size:
    data.vocab_size + 1`. The model is an encoder, whose head predicts the token at the same position.
    """

    kind: Literal["masked_diffusion"] = "masked_diffusion"

    @property
    def draws_noise(self) -> bool:
        return True

    def generation(self, graph: tfkit.Graph) -> tfkit.MaskedDiffusion:
        n_logits = graph.node(graph.outputs[0]).output.width
        if len(graph.outputs) != 1 or graph.node(graph.outputs[0]).output.type != "logits" or n_logits is None:
            raise ValueError("masked diffusion must have a model whose only output is logits of tokens")
        return tfkit.MaskedDiffusion(n_logits - 1)

    def build(self, model: fx.GraphModule) -> nn.Module:
        graph: tfkit.Graph = model.meta["graph"]
        generation = self.generation(graph)
        return MaskedDiffusionLoss(model, generation.input_of(graph), generation.mask_token)


class MaskedDiffusionLoss(nn.Module):
    """Inputs, targets and noise -> the weighted sum of the cross-entropy of the hidden tokens.

    Args:
        model: returns logits [b, t, v].
        name: the name of the model's tokens.
        mask: the mask token.
    """

    def __init__(self, model: nn.Module, name: str, mask: int) -> None:
        super().__init__()
        self.model, self.name, self.mask = model, name, mask

    def forward(self, inputs: Mapping[str, Any], targets: Tensor, noise: tfkit.Noise) -> tfkit.LossSum:
        tokens = inputs[self.name]
        asked = torch.zeros_like(tokens, dtype=torch.bool)
        asked[:, 1:] = targets[:, :-1] != IGNORE_INDEX
        levels = MIN_LEVEL + (1 - MIN_LEVEL) * noise.rand(1)  # [b, 1]
        hidden = asked & (noise.rand(tokens.size(1)) < levels)
        logits = self.model(**{**inputs, self.name: tokens.masked_fill(hidden, self.mask)})
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).transpose(1, 2)
        losses = F.cross_entropy(logits, tokens.masked_fill(~hidden, IGNORE_INDEX), reduction="none")
        return tfkit.LossSum((losses / levels).sum(), asked.sum(), {"hidden": tfkit.Ratio(hidden.sum(), asked.sum())})
