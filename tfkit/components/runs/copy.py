"""Sequences to write again: as they are, backwards, or sorted."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from tfkit.component import IGNORED, Batch, Data, DataConfig, Ids, PositiveCount
from tfkit.components.runs.rows import RowsData, divided, generator


class CopyConfig(DataConfig):
    """Random sequences, and what is to be written for each: the same, its reverse, or its symbols in order.

    No sequence is in two splits. Symbols are 0 and above; the id above them stands before the answer.
    """

    kind: Literal["copy"] = "copy"

    task: Literal["copy", "reverse", "sort"] = "copy"
    """The answer to a sequence."""
    symbols: Annotated[int, Field(ge=2, le=2**20)] = 16
    """The number of symbols."""
    items: Annotated[int, Field(ge=1, le=2**16)] = 16
    """Symbols of a sequence."""
    sequences: PositiveCount = 100_000
    """The number of sequences to draw; one that is drawn twice counts once."""
    layout: Literal["sequence", "pair"] = "sequence"
    """sequence: the answer follows, for a decoder; pair: inputs `source` and `target`, for an encoder-decoder."""

    def build(self, length: int | None) -> Data:
        drawn = generator().integers(self.symbols, size=(self.sequences, self.items))
        _, first = np.unique(drawn, axis=0, return_index=True)
        distinct = drawn[np.sort(first)]
        ends = divided(self, len(distinct))
        parts = {name: Tasks(distinct[start:end], self) for name, (start, end) in ends.items()}
        return RowsData(parts, (2 if self.layout == "sequence" else 1) * self.items, self.symbols + 1)


class Tasks:
    """Sequences with their answers."""

    def __init__(self, sequences: Ids, config: CopyConfig) -> None:
        self._sequences, self._config = sequences, config

    def __len__(self) -> int:
        return len(self._sequences)

    def batch(self, indices: Ids) -> Batch:
        source = self._sequences[indices]
        answer = self._answer(source)
        start = np.full_like(source[:, :1], self._config.symbols)
        if self._config.layout == "pair":
            return Batch({"source": source, "target": np.concatenate([start, answer[:, :-1]], axis=1)}, answer)
        tokens = np.concatenate([source, start, answer[:, :-1]], axis=1)
        return Batch({"tokens": tokens}, np.concatenate([np.full_like(source, IGNORED), answer], axis=1))

    def _answer(self, source: Ids) -> Ids:
        match self._config.task:
            case "copy":
                return source
            case "reverse":
                return source[:, ::-1].copy()
            case "sort":
                return np.sort(source, axis=1)
