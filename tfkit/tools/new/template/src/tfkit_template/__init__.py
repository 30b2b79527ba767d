"""Maxout: each hidden value is the largest of several. https://arxiv.org/abs/1302.4389

b batch, t positions, f width of the hidden layer, p pieces.
"""

from __future__ import annotations

from typing import Literal

import tfkit
from torch import Tensor, nn


class TemplateConfig(tfkit.FFNConfig):
    """down(max of the pieces of up(x))."""

    kind: Literal["template"] = "template"
    d_ff: tfkit.Dim
    """Width of the hidden layer."""
    n_pieces: tfkit.Count = 2
    """Values of which the largest is taken."""
    bias: tfkit.Shared[bool] = True
    """If true, the linear layers have biases."""
    dropout: tfkit.Immaterial[tfkit.Shared[tfkit.Probability]] = 0.0
    """Dropout on the hidden layer."""

    def check(self) -> None:
        super().check()
        if self.n_pieces == 1:
            raise tfkit.Invalid("n_pieces", "`n_pieces` must be above 1: the maximum of a single value is linear")

    def build(self, make: tfkit.Make) -> nn.Module:
        return TemplateFFN(self)


class TemplateFFN(nn.Module):
    """[b, t, d_model] -> the same."""

    def __init__(self, config: TemplateConfig) -> None:
        super().__init__()
        self.up = tfkit.Linear(config.d_model, config.d_ff * config.n_pieces, bias=config.bias)
        self.split = tfkit.Rearrange("b t (f p) -> b t f p", p=config.n_pieces)
        self.dropout = nn.Dropout(config.dropout)
        self.down = tfkit.Linear(config.d_ff, config.d_model, bias=config.bias, residual=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.split(self.up(x)).amax(dim=-1)
        return self.down(self.dropout(hidden))


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    register(TemplateConfig)
