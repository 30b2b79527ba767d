"""The FFN of ConvBERT, https://arxiv.org/abs/2008.02496: linear layers of groups of channels.

    y = down(activation(up(x)));  a group of outputs depends on one group of inputs

b batch, t positions, g groups, i and o widths of an input and an output of a group, m d_model, f d_ff.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

import tfkit
from tfkit.nn import Linear, Rearrange, StackedLinear


class GroupedMLPConfig(tfkit.FFNConfig):
    """Two linear layers of groups of channels, with an activation between them."""

    kind: Literal["grouped_mlp"] = "grouped_mlp"
    d_ff: tfkit.Dim
    """Width of the hidden layer."""
    groups: tfkit.Count = 1
    """Number of groups of channels, for both layers."""
    activation: tfkit.ActivationConfig
    """Activation between the two linear layers."""
    bias: tfkit.Shared[bool] = True
    """If true, both layers have biases."""

    def check(self) -> None:
        """Raise `Invalid` for groups that do not divide both widths."""
        super().check()
        for name, width in (("d_model", self.d_model), ("d_ff", self.d_ff)):
            if width % self.groups:
                message = f"{name} ({width}) must be a multiple of groups ({self.groups})"
                notes = [f"divisors of {width}: {tfkit.divisors(width)}"]
                raise tfkit.Invalid("groups", message, notes=notes)

    @property
    def hidden_width(self) -> int:
        return self.d_ff

    @property
    def pattern_sizes(self) -> Mapping[str, int]:
        """Sizes by letter: g groups."""
        return {"g": self.groups}

    @property
    def inner_values(self) -> Mapping[str, tfkit.InnerValue]:
        """The hidden layer, as the last linear layer takes it."""
        down = "down" if self.groups == 1 else "grouped_down"
        return {"hidden": tfkit.InnerValue(down, 0, f"[b, t, {self.d_ff}]")}

    def build(self, make: tfkit.Make) -> nn.Module:
        return GroupedMLP(self, make(self.activation))


class GroupedMLP(nn.Module):
    """[b, t, m] -> [b, t, m]. A single group has plain layers, `up` and `down`."""

    def __init__(self, config: GroupedMLPConfig, activation: nn.Module) -> None:
        super().__init__()
        width, hidden, groups, bias = config.d_model, config.d_ff, config.groups, config.bias
        self.up = Linear(width, hidden, bias=bias) if groups == 1 else None
        self.grouped_up = GroupedLinear(groups, width, hidden, bias=bias) if groups > 1 else None
        self.activation = activation
        self.down = Linear(hidden, width, bias=bias, residual=True) if groups == 1 else None
        self.grouped_down = GroupedLinear(groups, hidden, width, bias=bias, residual=True) if groups > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.up is not None and self.down is not None:
            return self.down(self.activation(self.up(x)))
        assert self.grouped_up is not None
        assert self.grouped_down is not None
        return self.grouped_down(self.activation(self.grouped_up(x)))


class GroupedLinear(StackedLinear):
    """x [b, t, (g i)] -> [b, t, (g o)]: a matrix for each group of channels."""

    def __init__(self, groups: int, d_in: int, d_out: int, *, bias: bool, residual: bool = False) -> None:
        super().__init__(groups, d_in // groups, d_out // groups, bias=bias, residual=residual)
        self.split = Rearrange("b t (g i) -> b t g i", g=groups)
        self.merge = Rearrange("b t g o -> b t (g o)")

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("b t g i, g o i -> b t g o", self.split(x), self.weight)
        return self.merge(y if self.bias is None else y + self.bias)
