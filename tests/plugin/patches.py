"""A plugin whose block takes images of a fixed size: pixels become patches, after a class token.

Patches and class token: https://arxiv.org/abs/2010.11929.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

import tfkit
from tfkit.component import BlockConfig, Dim, Make, Shared, Signal, Signals, Wire, expect


class PatchesConfig(BlockConfig):
    """Square images, their pixels row by row, to one vector for each patch and one more for the full image."""

    block: Literal["patches"] = "patches"
    input: Wire | None = None
    """The pixels, [b, image_size ** 2, channels]."""
    d_model: Shared[Dim]
    """Width of the vectors."""
    image_size: Dim
    """Pixels on each side of an image."""
    patch_size: Dim
    """Pixels on each side of a patch."""

    def output(self, inputs: Signals) -> Signal:
        expect(inputs, "input", "sequence", length=self.image_size**2)
        return Signal("sequence", width=self.d_model, length=(self.image_size // self.patch_size) ** 2 + 1)

    def build(self, make: Make, inputs: Signals) -> nn.Module:
        return Patches(self, inputs["input"].width)


class Patches(nn.Module):
    """[b, image_size ** 2, channels] -> [b, 1 + patches, d_model]."""

    def __init__(self, config: PatchesConfig, channels: int) -> None:
        super().__init__()
        self.size, self.patch = config.image_size, config.patch_size
        self.weight = nn.Parameter(torch.empty(config.d_model, channels, config.patch_size, config.patch_size))
        self.whole = nn.Parameter(torch.empty(1, 1, config.d_model))
        self.position = nn.Parameter(torch.empty(1, (config.image_size // config.patch_size) ** 2 + 1, config.d_model))

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        image = x.transpose(1, 2).reshape(x.size(0), x.size(2), self.size, self.size)
        patches = torch.conv2d(image, self.weight, stride=self.patch).flatten(2).transpose(1, 2)
        return torch.cat((self.whole.expand(x.size(0), -1, -1), patches), dim=1) + self.position


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    register(PatchesConfig)
