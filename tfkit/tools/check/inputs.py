"""Random inputs of the right kind for a model, and the call that takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from tfkit.builder import inputs_of
from tfkit.graph.expand import Graph
from tfkit.tools.common.comparison_inputs import as_tensors
from tfkit.tools.common.inputs import random_inputs

Padding = Literal["none", "left", "right", "rows"]
Inputs = Mapping[str, Tensor]


def example_inputs(
    graph: Graph, *, batch: int = 3, length: int = 6, padding: Padding = "none", seed: int = 0
) -> dict[str, Tensor]:
    """Random inputs for a model of `graph`, with padding masks unless `padding` is none.

    Left and right leave the first row without padding; `rows` hides the last row altogether.
    """
    inputs = random_inputs(graph, batch=batch, length=length, seed=seed)
    if padding == "none":
        return inputs
    masks = {signal.mask: _mask(batch, length, padding) for signal in graph.inputs.values() if signal.mask}
    return {**inputs, **masks}


def _mask(batch: int, length: int, padding: Padding) -> Tensor:
    row = torch.arange(batch)[:, None]
    if padding == "rows":
        return (row < batch - 1).expand(batch, length).clone()
    mask = torch.arange(length) < (length - row).clamp(min=1)
    return mask.flip(1) if padding == "left" else mask


def call(model: nn.Module, inputs: Inputs, names: Sequence[str] | None = None) -> list[Tensor]:
    """All results of the model, called with those of the inputs that it takes."""
    names = inputs_of(model) if names is None else names
    return as_tensors(model(**{name: value for name, value in inputs.items() if name in names}))
