"""Components that exporters do not support."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

import tfkit


class Looking(nn.Module):
    """Decides by a number: no program of operations alone can."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class LookingConfig(tfkit.FFNConfig):
    """Decides by a number."""

    kind: Literal["looking"] = "looking"

    def build(self, make: tfkit.Make) -> nn.Module:
        return Looking()


class Rare(nn.Module):
    """An operation that ONNX has no words for."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.i0e(x)


class RareConfig(tfkit.FFNConfig):
    """An operation that ONNX has no words for."""

    kind: Literal["rare"] = "rare"

    def build(self, make: tfkit.Make) -> nn.Module:
        return Rare()


class Sly(nn.Module):
    """Another function where somebody watches."""

    def forward(self, x: Tensor) -> Tensor:
        return x if type(x) is Tensor else x.relu()


class SlyConfig(tfkit.FFNConfig):
    """Another function where somebody watches."""

    kind: Literal["sly"] = "sly"

    def build(self, make: tfkit.Make) -> nn.Module:
        return Sly()


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    for config in (LookingConfig, RareConfig, SlyConfig):
        register(config)
