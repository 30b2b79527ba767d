"""Initial weights of linear layers and tables. Norms, position slopes and the like reset themselves.

Xavier: https://proceedings.mlr.press/v9/glorot10a.html. GPT-2: https://github.com/openai/gpt-2, and its paper's
section 2.3. Small: https://aclanthology.org/2019.iwslt-1.17.
Fan-in: https://link.springer.com/chapter/10.1007/978-3-642-35289-8_3, section 1.4.6; its residual scaling is GPT-2's.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from tfkit.component import InitConfig, PositiveFloat


class TorchInitConfig(InitConfig):
    """torch's defaults: uniform within 1 / sqrt(fan_in) for linear layers, normal with deviation 1 for tables."""

    kind: Literal["torch"] = "torch"

    def linear(self, weight: Tensor, *, residual: bool, n_layers: int | None, generator: torch.Generator) -> None:
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)

    def bias(self, bias: Tensor, *, fan_in: int, generator: torch.Generator) -> None:
        bound = 1 / math.sqrt(fan_in)
        nn.init.uniform_(bias, -bound, bound, generator=generator)

    def table(self, weight: Tensor, *, generator: torch.Generator) -> None:
        nn.init.normal_(weight, generator=generator)


class ZeroBiasInitConfig(InitConfig):
    """An initialization with zero biases."""

    def bias(self, bias: Tensor, *, fan_in: int, generator: torch.Generator) -> None:
        nn.init.zeros_(bias)


class FanInInitConfig(ZeroBiasInitConfig):
    """Normal with deviation sqrt(2 / (5 fan_in)), which gives a sane first loss at any width; the default.

    Projections into the residual stream are divided by sqrt(2 n_layers). Tables have deviation 0.02, and one that a
    head shares at most 4 / width: then the logit of the token just read, its row times itself, is at most 4 after a
    norm. Whatever the placement of norms or the `scale` of the embedding, a new model is not sure that tokens repeat.
    """

    kind: Literal["fan_in"] = "fan_in"

    def linear(self, weight: Tensor, *, residual: bool, n_layers: int | None, generator: torch.Generator) -> None:
        fan_in = 2 * n_layers * weight.size(1) if residual and n_layers else weight.size(1)
        nn.init.normal_(weight, std=math.sqrt(2 / (5 * fan_in)), generator=generator)

    def table(self, weight: Tensor, *, generator: torch.Generator) -> None:
        nn.init.normal_(weight, std=0.02, generator=generator)

    def tied_table(self, weight: Tensor, *, generator: torch.Generator) -> None:
        nn.init.normal_(weight, std=min(0.02, 4 / weight.size(1)), generator=generator)


class GPT2InitConfig(ZeroBiasInitConfig):
    """Normal; projections into the residual stream are divided by sqrt(2 n_layers)."""

    kind: Literal["gpt2"] = "gpt2"
    std: PositiveFloat = 0.02
    """Standard deviation of the weights and tables."""

    def linear(self, weight: Tensor, *, residual: bool, n_layers: int | None, generator: torch.Generator) -> None:
        std = self.std / math.sqrt(2 * n_layers) if residual and n_layers else self.std
        nn.init.normal_(weight, std=std, generator=generator)

    def table(self, weight: Tensor, *, generator: torch.Generator) -> None:
        nn.init.normal_(weight, std=self.std, generator=generator)


class NormalInitConfig(ZeroBiasInitConfig):
    """Normal with one standard deviation for all, as in BERT."""

    kind: Literal["normal"] = "normal"
    std: PositiveFloat = 0.02
    """Standard deviation of the weights and tables."""

    def linear(self, weight: Tensor, *, residual: bool, n_layers: int | None, generator: torch.Generator) -> None:
        nn.init.normal_(weight, std=self.std, generator=generator)

    def table(self, weight: Tensor, *, generator: torch.Generator) -> None:
        nn.init.normal_(weight, std=self.std, generator=generator)


class XavierInitConfig(ZeroBiasInitConfig):
    """Uniform within sqrt(6 / (fan_in + fan_out)); tables normal with deviation width ** -0.5, as the original."""

    kind: Literal["xavier"] = "xavier"

    def linear(self, weight: Tensor, *, residual: bool, n_layers: int | None, generator: torch.Generator) -> None:
        nn.init.xavier_uniform_(weight, generator=generator)

    def table(self, weight: Tensor, *, generator: torch.Generator) -> None:
        nn.init.normal_(weight, std=weight.size(1) ** -0.5, generator=generator)


class SmallInitConfig(ZeroBiasInitConfig):
    """Normal with deviation sqrt(2 / (5 d)), where d is the width of the residual stream."""

    kind: Literal["small"] = "small"

    def linear(self, weight: Tensor, *, residual: bool, n_layers: int | None, generator: torch.Generator) -> None:
        nn.init.normal_(weight, std=math.sqrt(2 / (5 * weight.size(0 if residual else 1))), generator=generator)

    def table(self, weight: Tensor, *, generator: torch.Generator) -> None:
        nn.init.normal_(weight, std=math.sqrt(2 / (5 * weight.size(1))), generator=generator)
