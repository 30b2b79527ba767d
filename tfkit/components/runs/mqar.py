"""Multi-query associative recall (https://arxiv.org/abs/2312.04927): pairs first, then keys whose values are asked."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from tfkit.component import IGNORED, Batch, Data, DataConfig, Ids, PositiveCount, PositiveFloat
from tfkit.components.runs.rows import RowsData, divided, generator
from tfkit.errors import Invalid


class MQARConfig(DataConfig):
    """Pairs of key and value, then every key once more among random tokens: its target is its value.

    Keys are below half of the vocabulary, but not 0, and values from there on; both are drawn without repetition. A key
    is asked soon after the pairs, and later ones become rarer by a power of the distance.
    """

    kind: Literal["mqar"] = "mqar"

    symbols: Annotated[int, Field(ge=4, le=2**20)] = 8192
    """The size of the vocabulary."""
    positions: Annotated[int, Field(ge=4, le=2**20)] = 64
    """Tokens of an example."""
    pairs: Annotated[int, Field(ge=1, le=2**16)] = 4
    """Pairs of an example."""
    power: PositiveFloat = 0.01
    """The distance d, in pairs of tokens, has the weight d^(power - 1)."""
    examples: PositiveCount = 100_000
    """The number of examples."""

    def check(self) -> None:
        """Refuse pairs that there is no room or no symbol for."""
        super().check()
        if 4 * self.pairs > self.positions:
            message = f"{self.pairs} pairs and as many questions need {4 * self.pairs} positions, not {self.positions}"
            raise Invalid("positions", message)
        if self.pairs > self.symbols // 2 - 1:
            message = f"{self.symbols} symbols give {self.symbols // 2 - 1} keys, too few for {self.pairs} pairs"
            raise Invalid("symbols", message)

    def build(self, length: int | None) -> Data:
        parts = {name: Recall(self, ends) for name, ends in divided(self, self.examples).items()}
        return RowsData(parts, self.positions, self.symbols)


class Recall:
    """Examples, each drawn by its number."""

    def __init__(self, config: MQARConfig, ends: tuple[int, int]) -> None:
        self._config = config
        self._start, self._end = ends
        room = (config.positions - 2 * config.pairs) // 2
        weights = np.arange(1, room + 1) ** (config.power - 1)
        self._weights = weights / weights.sum()

    def __len__(self) -> int:
        return self._end - self._start

    def batch(self, indices: Ids) -> Batch:
        drawn = [self._draw(number) for number in (indices + self._start).tolist()]
        tokens, targets = (np.stack(rows) for rows in zip(*drawn, strict=True))
        return Batch({"tokens": tokens}, targets)

    def _draw(self, number: int) -> tuple[Ids, Ids]:
        """Draw the tokens and targets of an example."""
        random, pairs, half = generator(number), self._config.pairs, self._config.symbols // 2
        keys = 1 + random.choice(half - 1, pairs, replace=False)
        values = half + random.choice(self._config.symbols - half, pairs, replace=False)
        asked = 2 * pairs + 2 * random.choice(len(self._weights), pairs, replace=False, p=self._weights)
        tokens = random.integers(self._config.symbols, size=self._config.positions)
        targets = np.full_like(tokens, IGNORED)
        tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2] = keys, values
        tokens[asked], targets[asked] = keys, values
        return tokens, targets
