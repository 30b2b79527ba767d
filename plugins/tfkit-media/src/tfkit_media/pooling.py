"""One vector of a sequence, in the ways of models of images.

Attention pooling: https://arxiv.org/abs/2106.04560, as SigLIP has it. Class token and patches: https://arxiv.org/abs/2304.07193.

b batch, t positions, m width.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

import tfkit
from tfkit import Invalid


class TokenPoolConfig(tfkit.BlockConfig):
    """The mean of the patches, without class and register tokens; or the class token and this mean, concatenated."""

    block: Literal["token_pool"] = "token_pool"
    input: tfkit.Wire | None = None
    """The sequence to read."""
    registers: tfkit.Extent = 0
    """Number of register tokens between the class token and the patches."""
    select: Literal["patches", "class_and_patches"] = "class_and_patches"
    """Parts of the vector."""

    def output(self, inputs: tfkit.Signals) -> tfkit.Signal:
        sequence = tfkit.expect(inputs, "input", "sequence")
        if sequence.length is not None and sequence.length <= 1 + self.registers:
            message = f"`registers` must leave patches among {sequence.length} positions; got {self.registers}"
            raise Invalid("registers", message)
        return tfkit.Signal("vector", (sequence.width or 0) * (2 if self.select == "class_and_patches" else 1))

    def build(self, make: tfkit.Make, inputs: tfkit.Signals) -> nn.Module:
        return TokenPool(1 + self.registers, joins=self.select == "class_and_patches")


class TokenPool(nn.Module):
    """[b, t, m] -> [b, m], or [b, 2 m] with the class token."""

    def __init__(self, front: int, *, joins: bool) -> None:
        super().__init__()
        self.front = front
        self.joins = joins

    def forward(self, x: Tensor) -> Tensor:
        mean = x[:, self.front :].mean(dim=1)
        if self.joins:
            return torch.cat((x[:, 0], mean), dim=1)
        return mean
