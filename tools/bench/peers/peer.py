"""The interface of a contender."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from peers.shape import Family, Shape
from peers.weights import State

THETA, EPS = 10000.0, 1e-5


def returned(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the output of a model that returns only logits."""
    return model(tokens)


@dataclass(frozen=True)
class Peer:
    """A contender: how its library builds each family, and how tfkit's weights map to it."""

    models: Mapping[Family, Callable[[Shape], nn.Module]]
    weights: Callable[[State, Shape], State]
    packages: tuple[str, ...] = ()
    """Distributions whose versions the report prints."""
    logits: Callable[[nn.Module, Tensor], Tensor] = returned
    differs: Mapping[Family, str] = field(default_factory=dict)
    """By family, the reason why it is not the same model."""

    def build(self, shape: Shape, state: State | None = None) -> nn.Module:
        """Build the model in train mode, with the weights in tfkit's `state`, by default with its initial weights.

        Raise `ValueError` for a shape that the library does not support, and `RuntimeError` if it lacks a weight.
        """
        if shape.family not in self.models:
            raise ValueError(f"it has no {shape.family}")
        torch.manual_seed(0)
        model = self.models[shape.family](shape)
        if state is not None:
            left = model.load_state_dict(self.weights(state, shape), strict=False).unexpected_keys
            if left:
                raise RuntimeError(f"no place for the weights {left[:3]}")
        return model.train()


class TokensAndPositions(nn.Embedding):
    """GPT-2's sum of two tables, for libraries with one embedding; `weight` is the tokens'."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape.vocab_size, shape.d_model)
        self.positions = nn.Embedding(shape.length, shape.d_model)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
