"""Gated streams: each sublayer reads a gated mean of several normalized streams, and adds its output to all of them.

    normed = rmsnorm(streams);  x = mean over streams of sigmoid(up(silu(down(normed) / l))) * normed
    streams = streams + 2 sigmoid(inject(normed) / l) * y

The streams are normalized when they are read, so sublayers and the stack need no other norm.
Qwen4 in transformers: https://github.com/huggingface/transformers. b batch, t positions, l streams, m d_model.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit.nn import Context, Linear, Rearrange, named
from tfkit_streams.manifold import Copies
from tfkit_streams.precision import widened


class GatedConfig(tfkit.StreamConfig):
    """Several streams; each sublayer reads their gated mean, and adds its output to each with a learned weight."""

    kind: Literal["gated"] = "gated"
    enters = True
    streams: tfkit.Count = 4
    """Number of streams."""
    rank: tfkit.Dim
    """Width between the two matrices that compute the gates."""
    eps: tfkit.PositiveFloat = 1e-6
    """Epsilon of the norm of each stream."""

    def build(self, make: tfkit.Make, part: tfkit.StreamPart, width: int) -> nn.Module:
        if part == "enter":
            return Copies(self.streams)
        if part == "write":
            return Write()
        return Leave(self, width) if part == "leave" else Read(self, width)


class Leave(nn.Module):
    """The gated mean of the normalized streams: [b, t, l, m] -> [b, t, m]."""

    def __init__(self, config: GatedConfig, width: int) -> None:
        super().__init__()
        inputs = config.streams * width
        self.weight = nn.Parameter(torch.empty(config.streams, width))
        self.join_streams = Rearrange("b t l m -> b t (l m)")
        self.split_streams = Rearrange("b t (l m) -> b t l m", l=config.streams)
        self.down = Linear(inputs, config.rank, bias=False)
        self.up = Linear(config.rank, inputs, bias=False)
        self.streams = config.streams
        self.width = [width]
        self.eps = config.eps

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def norm(self, streams: Tensor) -> Tensor:
        """Normalize each stream, and scale it by 1 + weight."""
        normed = F.rms_norm(widened(streams), self.width, eps=self.eps) * (1.0 + widened(self.weight))
        return normed.to(streams.dtype)

    def mean(self, normed: Tensor) -> Tensor:
        """Return the gated mean of normalized streams."""
        gate = torch.sigmoid(self.up(F.silu(self.down(self.join_streams(normed)) / self.streams)))
        return (self.split_streams(gate) * normed).mean(dim=2)

    def forward(self, streams: Tensor) -> Tensor:
        return self.mean(self.norm(streams))

    def extra_repr(self) -> str:
        return named(streams=self.streams, eps=self.eps)


class Read(Leave):
    """The gated mean of the normalized streams, and the weights of `Write`: [b, t, l, m] -> [b, t, m]."""

    def __init__(self, config: GatedConfig, width: int) -> None:
        super().__init__(config, width)
        self.inject = Linear(config.streams * width, config.streams, bias=False)

    def forward(self, streams: Tensor, context: Context) -> tuple[Tensor, list[Tensor]]:  # type: ignore[override]
        normed = self.norm(streams)
        weights = 2.0 * torch.sigmoid(self.inject(self.join_streams(normed)) / self.streams)
        return self.mean(normed), [weights]


class Write(nn.Module):
    """The streams, each with a multiple of y: [b, t, l, m], [b, t, m] -> [b, t, l, m]."""

    def forward(self, streams: Tensor, y: Tensor, state: list[Tensor]) -> Tensor:
        return streams + state[0][..., None] * y[:, :, None]
