"""The gated short convolution of LFM2, https://arxiv.org/abs/2511.23404: two gates around a convolution.

b batch, t positions, m d_model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor, nn

import tfkit
from tfkit.nn import Context, Linear
from tfkit_recurrent.conv import CausalConv
from tfkit_recurrent.recurrence import values_of


class ShortConvConfig(tfkit.MixerConfig):
    """Each channel is a gated sum of its last few tokens: output(after * conv(before * x))."""

    kind: Literal["short_conv"] = "short_conv"
    restarts = True
    size: tfkit.Count = 3
    """Number of tokens that the convolution covers."""
    bias: tfkit.Shared[bool] = False
    """If true, the convolution and the linear layers have biases."""

    @property
    def cached(self) -> tuple[tfkit.State, ...]:
        return (tfkit.State(1, self.size - 1, self.d_model),)

    @property
    def inner_values(self) -> Mapping[str, tfkit.InnerValue]:
        """The input of the output projection."""
        return values_of(self.cached, self.d_model)

    def build(self, make: tfkit.Make) -> nn.Module:
        return ShortConv(self)


class ShortConv(nn.Module):
    """[b, t, m] -> [b, t, m]."""

    def __init__(self, config: ShortConvConfig) -> None:
        super().__init__()
        width = config.d_model
        self.input = Linear(width, {"before": width, "after": width, "x": width}, bias=config.bias)
        self.conv = CausalConv(width, config.size, bias=config.bias)
        self.output = Linear(width, width, bias=config.bias, residual=True)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        before, after, x = self.input(x).chunk(3, dim=-1)
        return self.output(after * self.conv(before * x, context, 0))
