"""Several residual streams with learned weights. https://arxiv.org/abs/2409.19606

b batch, t positions, n streams, d channels.
"""

from __future__ import annotations

from typing import Literal

import tfkit
import torch
from torch import Tensor, nn


class TemplateConfig(tfkit.StreamConfig):
    """Each sublayer reads a weighted sum of several streams, and adds its output to each with a weight."""

    kind: Literal["template"] = "template"
    enters = True
    streams: tfkit.Count = 2
    """Number of streams."""

    def build(self, make: tfkit.Make, part: tfkit.StreamPart, width: int) -> nn.Module:
        kinds = {"enter": Enter, "read": Read, "write": Write, "leave": Leave}
        return kinds[part](self.streams)


class Enter(nn.Module):
    """A copy of x [b, t, d] in each stream, [b, t, n, d]."""

    def __init__(self, streams: int) -> None:
        super().__init__()
        self.streams = streams

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, None].expand(-1, -1, self.streams, -1)


class Read(nn.Module):
    """The weighted sum of the streams; nothing is kept for `Write`."""

    def __init__(self, streams: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(streams))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, mean=1.0, std=0.1)

    def forward(self, streams: Tensor, context: tfkit.Context) -> tuple[Tensor, list[Tensor]]:
        nothing: list[Tensor] = []
        return (self.weight[:, None] * streams).sum(dim=2), nothing


class Write(nn.Module):
    """The streams, each with a multiple of y [b, t, d]."""

    def __init__(self, streams: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(streams))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, mean=1.0, std=0.1)

    def forward(self, streams: Tensor, y: Tensor, state: list[Tensor]) -> Tensor:
        return streams + self.weight[:, None] * y[:, :, None]


class Leave(nn.Module):
    """The mean of the streams, [b, t, d]."""

    def __init__(self, streams: int) -> None:
        super().__init__()

    def forward(self, streams: Tensor) -> Tensor:
        return streams.mean(dim=2)


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    register(TemplateConfig)
