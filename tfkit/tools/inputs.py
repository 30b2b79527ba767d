"""Random inputs of the right kind for any model: what a first forward needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from tfkit.graph.expand import Graph
from tfkit.graph.limits import max_len
from tfkit.graph.order import as_list

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
    """A tensor for each input of a model, by name.

    Args:
        graph: the model.
        batch: sequences in the batch.
        length: tokens per sequence; 16, or the model's `max_len` where that is less, unless given.
        device: where they live.
        dtype: type of features; torch's default unless given.
        seed: the same seed gives the same inputs.
    """
    length = length or min(LENGTH, max_len(graph) or LENGTH)
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for name, config in graph.spec.model.inputs.items():
        if config.type == "features":
            made[name] = torch.randn(batch, length, config.width or 1, generator=generator).to(device, dtype)
        elif config.type == "lengths":
            made[name] = torch.randint(1, length + 1, (batch,), generator=generator).to(device)
        else:
            rows = min(_rows(graph, name), default=2)
            made[name] = torch.randint(rows, (batch, length), generator=generator).to(device)
    return made


def _rows(graph: Graph, name: str) -> Iterator[int]:
    """The sizes of the tables in which an input is looked up."""
    for node in graph.nodes:
        for field, source in node.wires.items():
            if name not in as_list(source):
                continue
            value = getattr(node.config, field)
            table = node.config.table()
            if isinstance(value, Mapping):
                yield value[name]
            elif table is not None and table.rows is not None:
                yield table.rows
