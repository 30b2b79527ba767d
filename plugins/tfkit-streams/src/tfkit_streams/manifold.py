"""Hyper-connections on a manifold: several residual streams that each sublayer reads, mixes and writes.

    pre, post, comb = scale * project(rmsnorm(streams)) + base
    x = sum of sigmoid(pre) * streams
    streams = 2 sigmoid(post) * y + sinkhorn(softmax(comb))^T streams

Manifold: https://arxiv.org/abs/2512.24880. Initial values: https://arxiv.org/abs/2409.19606.
b batch, t positions, l streams, m d_model.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit.nn import Context, Linear, Rearrange, named
from tfkit_streams.precision import widened

PREFERRED = 2.0
"""The initial logit of the stream that a layer prefers."""
RETENTION_LOGIT = 4.0
"""The initial logit of the weight with which a stream keeps its value."""


class HyperConnectionConfig(tfkit.StreamConfig):
    """Fields of residuals with several streams whose weights `Weights` computes."""

    enters = True
    streams: tfkit.Count = 4
    """Number of streams."""
    eps: tfkit.PositiveFloat = 1e-6
    """Number to add to weights and sums."""
    norm_eps: tfkit.PositiveFloat = 1e-6
    """Epsilon of the norm of all streams together."""


class ManifoldConfig(HyperConnectionConfig):
    """Several streams; each sublayer reads a weighted sum of them, and mixes them by a doubly stochastic matrix."""

    kind: Literal["manifold"] = "manifold"
    iterations: tfkit.Count = 20
    """Number of times that the columns and rows of the mixing matrix are divided by their sums."""

    def build(self, make: tfkit.Make, part: tfkit.StreamPart, width: int) -> nn.Module:
        if part == "enter":
            return Copies(self.streams)
        if part == "write":
            return Write()
        return Leave(self, width) if part == "leave" else Read(self, width, preferred=(make.layer or 0) % self.streams)


class Copies(nn.Module):
    """A copy of x in each stream: [b, t, m] -> [b, t, l, m]."""

    def __init__(self, streams: int) -> None:
        super().__init__()
        self.streams = streams

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, None].expand(-1, -1, self.streams, -1)

    def extra_repr(self) -> str:
        return named(self.streams)


class Weights(nn.Module):
    """scale * project(rmsnorm(streams)) + base, for each part: [b, t, l, m] -> [b, t, size]."""

    def __init__(self, config: HyperConnectionConfig, width: int, parts: dict[str, int]) -> None:
        super().__init__()
        inputs = config.streams * width
        self.join_streams = Rearrange("b t l m -> b t (l m)")
        self.project = Linear(inputs, parts, bias=False)
        self.scale = nn.Parameter(torch.empty(len(parts)))
        self.base = nn.Parameter(torch.empty(sum(parts.values())))
        self.inputs = [inputs]
        self.sizes = list(parts.values())
        self.eps = config.eps
        self.norm_eps = config.norm_eps

    def logits(self, streams: Tensor) -> list[Tensor]:
        """Return the logits of each part, computed in float32."""
        x = F.rms_norm(widened(self.join_streams(streams)), self.inputs, eps=self.norm_eps)
        projected = F.linear(x, widened(self.project.weight)).split(self.sizes, dim=-1)
        base, scale = widened(self.base).split(self.sizes), widened(self.scale)
        return [projected[i] * scale[i] + base[i] for i in range(len(self.sizes))]

    def extra_repr(self) -> str:
        return named(streams=self.sizes[0], eps=self.eps, norm_eps=self.norm_eps)


class Read(Weights):
    """The weighted sum of the streams, and the weights of `Write`: [b, t, l, m] -> [b, t, m]."""

    def __init__(self, config: ManifoldConfig, width: int, *, preferred: int) -> None:
        n = config.streams
        super().__init__(config, width, {"pre": n, "post": n, "comb": n * n})
        self.split_matrix = Rearrange("b t (l k) -> b t l k", l=n)
        self.iterations = config.iterations
        self.preferred = preferred

    def reset_parameters(self) -> None:
        """Prefer a stream, which differs in the next layer, and mix the streams very little."""
        n = self.sizes[0]
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.base)
        nn.init.constant_(self.base[self.preferred : self.preferred + 1], PREFERRED)
        nn.init.constant_(self.base[2 * n :: n + 1], RETENTION_LOGIT)

    def forward(self, streams: Tensor, context: Context) -> tuple[Tensor, list[Tensor]]:
        pre, post, comb = self.logits(streams)
        x = ((torch.sigmoid(pre) + self.eps)[..., None] * streams).sum(dim=2)
        comb = torch.softmax(self.split_matrix(comb), dim=-1) + self.eps
        comb = comb / (comb.sum(dim=-2, keepdim=True) + self.eps)
        for _ in range(self.iterations - 1):
            comb = comb / (comb.sum(dim=-1, keepdim=True) + self.eps)
            comb = comb / (comb.sum(dim=-2, keepdim=True) + self.eps)
        return x.to(streams.dtype), [2.0 * torch.sigmoid(post), comb]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, iterations={self.iterations}, preferred={self.preferred}"


class Write(nn.Module):
    """The mixed streams and, in each of them, a multiple of y: [b, t, l, m], [b, t, m] -> [b, t, l, m]."""

    def forward(self, streams: Tensor, y: Tensor, state: list[Tensor]) -> Tensor:
        post, comb = state[0].to(streams.dtype), state[1].to(streams.dtype)
        return post[..., None] * y[:, :, None] + torch.matmul(comb.mT, streams)


class Leave(Weights):
    """The weighted sum of the streams: [b, t, l, m] -> [b, t, m]."""

    def __init__(self, config: HyperConnectionConfig, width: int) -> None:
        super().__init__(config, width, {"pre": config.streams})

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.base)

    def forward(self, streams: Tensor) -> Tensor:
        pre = torch.sigmoid(self.logits(streams)[0]) + self.eps
        return (pre[..., None] * streams).sum(dim=2).to(streams.dtype)
