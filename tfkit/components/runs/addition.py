"""Sums of two numbers, written digit by digit."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

import tfkit
from tfkit.component import Batch, Data, DataConfig, Ids
from tfkit.components.runs.rows import RowsData, divided, next_tokens

SYMBOLS = "0123456789+="
HELD_OUT = 1  # the seed of the order in which problems are divided into splits


class AdditionConfig(DataConfig):
    """Sums of two numbers: `12+34=640`, both padded with zeros, the answer with its last digit first.

    Every pair of numbers is one problem, and belongs to one split: the others have never been seen in training.
    """

    kind: Literal["addition"] = "addition"

    digits: Annotated[int, Field(ge=1, le=3)] = 2
    """Digits of each number."""
    reverse: bool = True
    """If true, the answer begins with its last digit, so that a carry is known when it is needed."""
    loss_on: Literal["answer", "all"] = "answer"
    """The positions that count."""

    def build(self, length: int | None) -> Data:
        total = 10 ** (2 * self.digits)
        order = np.random.Generator(np.random.Philox(HELD_OUT)).permutation(total)
        parts = {name: Sums(order[start:end], self) for name, (start, end) in divided(self, total).items()}
        return RowsData(parts, 3 * self.digits + 2, len(SYMBOLS), tfkit.CharacterTokenizer(SYMBOLS))


class Sums:
    """Problems as rows of ids."""

    def __init__(self, problems: Ids, config: AdditionConfig) -> None:
        self._problems, self._config = problems, config

    def __len__(self) -> int:
        return len(self._problems)

    def batch(self, indices: Ids) -> Batch:
        digits, problems = self._config.digits, self._problems[indices]
        left, right = problems // 10**digits, problems % 10**digits
        answer = _digits(left + right, digits + 1)
        plus, equals = (np.full((len(indices), 1), SYMBOLS.index(sign)) for sign in "+=")
        if self._config.reverse:
            answer = answer[:, ::-1]
        row = np.concatenate([_digits(left, digits), plus, _digits(right, digits), equals, answer], axis=1)
        return next_tokens(row, counted=digits + 1 if self._config.loss_on == "answer" else None)


def _digits(numbers: Ids, count: int) -> Ids:
    """Return the decimal digits of numbers, padded with zeros, [b, count]."""
    return numbers[:, None] // 10 ** np.arange(count)[::-1] % 10
