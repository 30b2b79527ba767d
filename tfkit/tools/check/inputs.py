"""Random inputs of the right kind for a model, the call that takes them, and hooks on its modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tfkit.builder import inputs_of
from tfkit.graph.expand import Graph
from tfkit.tools.common.model_inputs import as_tensors, random_inputs

Padding = Literal["none", "left", "right", "rows"]
Inputs = Mapping[str, Tensor]


def example_inputs(
    graph: Graph, *, batch: int = 3, length: int = 6, padding: Padding = "none", seed: int = 0
) -> dict[str, Tensor]:
    """Return random inputs for a model of `graph`, with padding masks unless `padding` is none.

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


def cast(inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """Convert inputs that are real numbers to another dtype."""
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Keep hooks for the duration of a block, and remove them at its end."""
    with ExitStack() as hooks:
        for handle in handles:
            hooks.enter_context(handle)
        yield


def call(model: nn.Module, inputs: Inputs, names: Sequence[str] | None = None) -> list[Tensor]:
    """Call the model with the inputs that it takes, and return all results."""
    names = inputs_of(model) if names is None else names
    return as_tensors(model(**{name: value for name, value in inputs.items() if name in names}))
