"""Random inputs of the right kind for any model, enough for a first forward."""

from __future__ import annotations

import torch
from torch import Tensor

from tfkit.graph.expand import Graph
from tfkit.graph.inputs import input_shapes
from tfkit.graph.sequence_limits import max_len, rows_of

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
    """A tensor for each input of a model, by name; the same seed gives the same ones.

    Sequences have 16 tokens, or the model's `max_len` if that is less, unless `length` is given; inputs of fixed length
    have that one. `dtype` is the type of features, torch's default unless given.
    """
    length = length or min(LENGTH, max_len(graph) or LENGTH)
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for name, shape in input_shapes(graph, batch=batch, length=length).items():
        kind = graph.spec.model.inputs[name].type
        if kind == "features":
            made[name] = torch.randn(shape, generator=generator, device="cpu").to(device, dtype)
        elif kind == "lengths":
            made[name] = torch.randint(1, length + 1, shape, generator=generator, device="cpu").to(device)
        else:
            rows = rows_of(graph, name) or 2
            made[name] = torch.randint(rows, shape, generator=generator, device="cpu").to(device)
    return made
