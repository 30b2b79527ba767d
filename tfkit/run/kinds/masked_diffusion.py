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
    targets of the data are the tokens that may be hidden: all tokens except the first of a window, or the tokens of the
    answers. The last target follows the tokens of an example, so a model needs one more position than the data has. The
    mask token is the highest id of the model, so the model has at least one more token than the data: `vocab_size:
    data.vocab_size + 1`. The model is an encoder, whose head predicts the token at the same position.
    """

    kind: Literal["masked_diffusion"] = "masked_diffusion"

    @property
    def draws_noise(self) -> bool:
        return True

    @property
    def further_positions(self) -> int:
        return 1

    def generation(self, graph: tfkit.Graph) -> tfkit.MaskedDiffusion:
        n_logits = graph.node(graph.outputs[0]).output.width
        if len(graph.outputs) != 1 or graph.node(graph.outputs[0]).output.type != "logits" or n_logits is None:
            raise ValueError("masked diffusion must have a model whose only output is logits of tokens")
        return tfkit.MaskedDiffusion(n_logits - 1)

    def build(self, model: fx.GraphModule) -> nn.Module:
        graph: tfkit.Graph = model.meta["graph"]
        generation = self.generation(graph)
        name = generation.input_of(graph)
        return MaskedDiffusionLoss(model, name, generation.mask_token, padding=graph.inputs[name].mask)


class MaskedDiffusionLoss(nn.Module):
    """Inputs, targets and noise -> the weighted sum of the cross-entropy of the hidden tokens.

    Args:
        model: returns logits [b, t, v].
        name: the name of the model's tokens.
        mask: the mask token.
        padding: the name of the padding mask of the tokens.
    """

    def __init__(self, model: nn.Module, name: str, mask: int, padding: str | None = None) -> None:
        super().__init__()
        self.model, self.name, self.mask, self.padding = model, name, mask, padding

    def forward(self, inputs: Mapping[str, Any], targets: Tensor, noise: tfkit.Noise) -> tfkit.LossSum:
        asked = F.pad(targets != IGNORE_INDEX, (1, 0))  # the target of a position is the next token
        # The last token of an answer is only a target. A token that is neither an input nor a target is unknown.
        tokens = torch.where(asked, F.pad(targets, (1, 0)), F.pad(inputs[self.name], (0, 1), value=self.mask))
        arguments = {**inputs}
        if self.padding is not None and self.padding in inputs:
            arguments[self.padding] = _with_next(inputs[self.padding], asked)
        levels = MIN_LEVEL + (1 - MIN_LEVEL) * noise.rand(1)  # [b, 1]
        hidden = asked & (noise.rand(tokens.size(1)) < levels)
        logits = self.model(**{**arguments, self.name: tokens.masked_fill(hidden, self.mask)})
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).transpose(1, 2)
        losses = F.cross_entropy(logits, tokens.masked_fill(~hidden, IGNORE_INDEX), reduction="none")
        return tfkit.LossSum((losses / levels).sum(), asked.sum(), {"hidden": tfkit.Ratio(hidden.sum(), asked.sum())})


def _with_next(mask: Tensor, asked: Tensor) -> Tensor:
    """Return a mask with a further position, which belongs to the last document if it is asked.

    Args:
        mask: of padding, [b, t]; or of pairs of positions in the same document, [b, t, t].
        asked: [b, t + 1], True for tokens that may be hidden.
    """
    if mask.dim() == 2:
        return F.pad(mask, (0, 1)) | asked
    last = mask[:, -1] & asked[:, -1:]  # [b, t]
    row = F.pad(last, (0, 1), value=True)[:, None]
    return torch.cat((torch.cat((mask, last[:, :, None]), dim=2), row), dim=1)
