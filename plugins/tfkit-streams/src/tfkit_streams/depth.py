"""Attention over depth: the input of each sublayer is a mean of all earlier outputs, weighted by a softmax.

    x = sum over i of softmax_i(query . rmsnorm(output_i)) * output_i

Based on https://arxiv.org/abs/2402.02622, whose weights are constants. Output 0 is the input of the stack. The first
sublayer has only this output, and needs no query, so each query belongs to the preceding sublayer: `write` appends an
output, and computes the next input. The stream is the next input, followed by all outputs.
b batch, t positions, k the next input and the outputs so far, m d_model.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit.nn import Context, named
from tfkit_streams.precision import widened


class DepthConfig(tfkit.StreamConfig):
    """Each sublayer attends to the outputs of all earlier sublayers, at its position, by a learned query."""

    kind: Literal["depth"] = "depth"
    enters = True
    eps: tfkit.PositiveFloat = 1e-6
    """Epsilon of the norm of the keys."""

    def build(self, make: tfkit.Make, part: tfkit.StreamPart, width: int) -> nn.Module:
        if part == "write":
            return Write(width, self.eps)
        return {"enter": Enter, "read": Read, "leave": Leave}[part]()


class Enter(nn.Module):
    """[b, t, m] -> the next input and the outputs so far, which are the same, [b, t, 2, m]."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, None].expand(-1, -1, 2, -1)


class Read(nn.Module):
    """[b, t, k, m] -> [b, t, m]."""

    def forward(self, stream: Tensor, context: Context) -> tuple[Tensor, list[Tensor]]:
        nothing: list[Tensor] = []
        return stream[:, :, 0], nothing


class Write(nn.Module):
    """[b, t, k, m] and a further output [b, t, m] -> [b, t, k + 1, m]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(width))
        self.width = [width]
        self.eps = eps

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)

    def forward(self, stream: Tensor, y: Tensor, state: list[Tensor]) -> Tensor:
        outputs = torch.cat((stream[:, :, 1:], y[:, :, None]), dim=2)
        keys = F.rms_norm(widened(outputs), self.width, eps=self.eps)
        weights = torch.softmax((keys * widened(self.query)).sum(dim=-1), dim=-1).to(stream.dtype)
        x = (weights[..., None] * outputs).sum(dim=2, keepdim=True)
        return torch.cat((x, outputs), dim=2)

    def extra_repr(self) -> str:
        return named(*self.width, eps=self.eps)


class Leave(nn.Module):
    """[b, t, k, m] -> [b, t, m]."""

    def forward(self, stream: Tensor) -> Tensor:
        return stream[:, :, 0]
