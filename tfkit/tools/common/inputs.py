"""Random inputs of the right type for any model, enough for a first forward."""

from __future__ import annotations

import torch
from torch import Tensor

from tfkit.graph.expand import Graph
from tfkit.graph.input_shapes import input_shapes, max_len, rows_of

LENGTH = 16


def random_inputs(
    graph: Graph,
    *,
    batch: int = 2,
    length: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return a tensor for each input of a model, by name. The same seed gives the same tensors.

    Sequences have `length` tokens, by default 16, or the model's `max_len` if that is smaller; inputs of fixed length
    keep it. `dtype` is the type of features, by default torch's.
    """
    length = length or min(LENGTH, max_len(graph) or LENGTH)
    generator = torch.Generator().manual_seed(seed)
    inputs: dict[str, Tensor] = {}
    for name, shape in input_shapes(graph, batch=batch, length=length).items():
        kind = graph.spec.model.inputs[name].type
        if kind == "features":
            inputs[name] = torch.randn(shape, generator=generator, device="cpu").to(device, dtype)
        elif kind == "lengths":
            inputs[name] = torch.randint(1, length + 1, shape, generator=generator, device="cpu").to(device)
        else:
            rows = rows_of(graph, name) or 2
            inputs[name] = torch.randint(rows, shape, generator=generator, device="cpu").to(device)
    return inputs
