"""The loss of predicting the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

import tfkit
from tfkit.component import Probability
from tfkit.run.contract import LossConfig

if TYPE_CHECKING:
    from torch import fx, nn


class CrossEntropyConfig(LossConfig):
    """Cross-entropy, its logits computed in chunks: `tfkit.Loss`."""

    kind: Literal["cross_entropy"] = "cross_entropy"

    label_smoothing: Probability = 0.0
    """The share of every target that is spread evenly over the vocabulary."""
    z_loss: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The weight of log(Z)^2, Z the sum of the exponentials of a position's logits (https://arxiv.org/abs/2204.02311)."""

    def build(self, model: fx.GraphModule) -> nn.Module:
        return tfkit.Loss(model, label_smoothing=self.label_smoothing, z_loss=self.z_loss, reduction="sum")
