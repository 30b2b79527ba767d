"""Independent hyper-connections: streams that each sublayer reads and writes, but that are not mixed.

    pre, post = scale * project(rmsnorm(streams)) + base
    x = sum of sigmoid(pre) * streams
    streams = streams + magnitude * sigmoid(post) * y

HY-V4 in transformers: https://github.com/huggingface/transformers. b batch, t positions, l streams, m d_model.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

import tfkit
from tfkit.nn import Context
from tfkit_streams.manifold import Copies, HyperConnectionConfig, Leave, Weights


class IndependentConfig(HyperConnectionConfig):
    """Several streams; each sublayer reads a weighted sum of them, and adds its output to each with a weight."""

    kind: Literal["independent"] = "independent"
    magnitude: tfkit.PositiveFloat = 2.0
    """Bound of the weights of a sublayer's output."""

    def build(self, make: tfkit.Make, part: tfkit.StreamPart, width: int) -> nn.Module:
        if part == "enter":
            return Copies(self.streams)
        if part == "write":
            return Write()
        return Leave(self, width) if part == "leave" else Read(self, width)


class Read(Weights):
    """The weighted sum of the streams, and the weights of `Write`: [b, t, l, m] -> [b, t, m]."""

    def __init__(self, config: IndependentConfig, width: int) -> None:
        super().__init__(config, width, {"pre": config.streams, "post": config.streams})
        self.magnitude = config.magnitude

    def reset_parameters(self) -> None:
        """Fill the parameters so that the initial output is the mean of the streams."""
        nn.init.constant_(self.scale, 0.01)
        nn.init.zeros_(self.base)
        nn.init.constant_(self.base[: self.sizes[0]], -math.log(max(self.sizes[0] - 1, 1)))

    def forward(self, streams: Tensor, context: Context) -> tuple[Tensor, list[Tensor]]:
        pre, post = self.logits(streams)
        x = ((torch.sigmoid(pre) + self.eps)[..., None] * streams).sum(dim=2)
        return x.to(streams.dtype), [self.magnitude * torch.sigmoid(post) + self.eps]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, magnitude={self.magnitude}"


class Write(nn.Module):
    """The streams, each with a multiple of y: [b, t, l, m], [b, t, m] -> [b, t, l, m]."""

    def forward(self, streams: Tensor, y: Tensor, state: list[Tensor]) -> Tensor:
        return streams + state[0].to(streams.dtype)[..., None] * y[:, :, None]
