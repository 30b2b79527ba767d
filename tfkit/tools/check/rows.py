"""The sequences of a batch that is read in steps, and the ways to read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TypeAlias

import torch
from torch import Tensor, fx

from tfkit.building.builder import graph_of, inputs_of
from tfkit.graph.decode_split import split_for_decoding
from tfkit.tools.check.inputs import Inputs, call

Piece: TypeAlias = int | Tensor
"""A number of columns without a mask, or a mask [b, t], True where there is a token."""
Schedule: TypeAlias = list[Piece]


def schedules(batch: int, length: int) -> dict[str, Schedule]:
    """Return named schedules for reading `batch` rows in `length` columns."""
    half, row = length // 2, torch.arange(batch)[:, None]
    left = torch.arange(half) >= row.clamp(max=half - 1)
    gap = torch.ones(batch, 4, dtype=torch.bool)
    gap[1, 1:3] = gap[0, 3] = gap[2] = False
    return {
        "whole": [length],
        "in uneven steps": cut(length, 3, 1, 2),
        "token by token": cut(length, 1),
        "by single tokens and several": cut(length, half, 1, 1, 3),
        "padded on the left": [left, *cut(length - half, 1, 1, 3)],
        "padded on the right": [left.flip(1), *cut(length - half, 1, 3, 1)],
        "padded in between": [2, gap, row > 0, *cut(length - 7, 2, 1)],
        "with a row that begins later": [(row < batch - 1).expand(batch, half), *cut(length - half, 1, 2)],
    }


def cut(length: int, *sizes: int) -> Schedule:
    """Repeat steps of these sizes up to `length` columns."""
    pieces: Schedule = []
    for size in cycle(sizes):
        if length <= 0:
            return pieces
        pieces.append(min(size, length))
        length -= size
    return pieces


@dataclass(frozen=True)
class Rows:
    """The sequences of a batch."""

    model: fx.GraphModule
    main: str
    """The input whose tokens are counted."""
    pieces: Mapping[str, Tensor]
    """The inputs read in steps, [b, t, ...] each, without padding."""
    once: Mapping[str, Tensor]
    """The inputs given once, with padding masks."""

    @classmethod
    def of(cls, model: fx.GraphModule, inputs: Inputs) -> Rows:
        """Build rows of these inputs, with increasing padding in the inputs given once."""
        parts = split_for_decoding(graph_of(model))
        once = {name: inputs[name] for name in parts.given_once if name in inputs}
        for name, value in list(once.items()):
            if f"{name}_mask" in inputs_of(model):
                row = torch.arange(value.size(0))[:, None]
                once[f"{name}_mask"] = torch.arange(value.size(1)) < (value.size(1) - row).clamp(min=1)
        pieces = {name: inputs[name] for name in parts.given_again if name in inputs}
        return cls(model, parts.given_again[0], pieces, once)

    @property
    def batch(self) -> int:
        return self.pieces[self.main].size(0)

    @property
    def length(self) -> int:
        return self.pieces[self.main].size(1)

    def rolled(self, shift: int) -> Rows:
        """Return the rows in a different order, so that the old contents of the caches belong to different rows."""
        return self.changed(lambda value: value.roll(shift, dims=0))

    def changed(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """Return a changed batch of rows."""
        pieces, once = ({name: change(x) for name, x in tensors.items()} for tensors in (self.pieces, self.once))
        return replace(self, pieces=pieces, once=once)

    def started_by(self, piece: Piece) -> Rows:
        """Return the rows with the prefixes that this first step holds."""
        most = torch.full((self.batch,), piece) if isinstance(piece, int) else piece.sum(dim=1)
        once = {name: torch.minimum(x, most) if x.dim() == 1 else x for name, x in self.once.items()}
        return replace(self, once=once)

    def alone(self) -> list[Tensor]:
        """Return the outputs [b, t, ...] of full forwards over each row alone, without padding."""
        rows = []
        for row in range(self.batch):
            arguments = {name: value[row : row + 1] for name, value in {**self.pieces, **self.once}.items()}
            for name in [name for name in arguments if f"{name}_mask" in arguments]:
                arguments[name] = arguments[name][arguments.pop(f"{name}_mask")][None]
            rows.append(call(self.model, arguments))
        return [torch.cat(outputs) for outputs in zip(*rows, strict=True)]


def pick(x: Tensor, columns: Tensor) -> Tensor:
    """Return the `columns` [b, s] of x [b, t, ...]."""
    return x[torch.arange(x.size(0))[:, None], columns]
