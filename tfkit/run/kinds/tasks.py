"""Synthetic tasks: sums of two numbers, sequences to copy, and multi-query associative recall.

In associative recall (https://arxiv.org/abs/2312.04927), pairs come first, then keys, whose values are the targets.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

import tfkit
from tfkit.component import PositiveFloat
from tfkit.errors import Invalid
from tfkit.run.contract import IGNORE_INDEX, Batch, Data, DataConfig, Ids, PositiveCount
from tfkit.run.kinds.examples import RowsData, data_generator, next_tokens, split_ranges

SYMBOLS = "0123456789+="
HELD_OUT = 1  # the seed of the order in which problems are divided into splits


class AdditionConfig(DataConfig):
    """Sums of two numbers: `12+34=640`, both padded with zeros, the answer with its last digit first.

    Every pair of numbers is one problem and belongs to one split, so evaluations use problems that training does not.
    """

    kind: Literal["addition"] = "addition"

    digits: Annotated[int, Field(ge=1, le=3)] = 2
    """Number of digits of each number."""
    reverse: bool = True
    """If true, the answer begins with its last digit, so each carry precedes the digit that needs it."""
    loss_on: Literal["answer", "all"] = "answer"
    """The positions that count."""

    def build(self, length: int | None) -> Data:
        total = 10 ** (2 * self.digits)
        order = np.random.Generator(np.random.Philox(HELD_OUT)).permutation(total)
        parts = {name: Sums(order[start:end], self) for name, (start, end) in split_ranges(self, total).items()}
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
        answer = _decimal_digits(left + right, digits + 1)
        plus, equals = (np.full((len(indices), 1), SYMBOLS.index(sign)) for sign in "+=")
        if self._config.reverse:
            answer = answer[:, ::-1]
        row = np.concatenate(
            [_decimal_digits(left, digits), plus, _decimal_digits(right, digits), equals, answer], axis=1
        )
        return next_tokens(row, counted=digits + 1 if self._config.loss_on == "answer" else None)


def _decimal_digits(numbers: Ids, count: int) -> Ids:
    """Return the decimal digits of numbers, padded with zeros, [b, count]."""
    return numbers[:, None] // 10 ** np.arange(count)[::-1] % 10


class CopyConfig(DataConfig):
    """Random sequences, each with an answer: a copy of the sequence, its reverse, or its symbols in order.

    No sequence is in two splits. Symbols have ids from 0; the next id separates the sequence from the answer.
    """

    kind: Literal["copy"] = "copy"

    task: Literal["copy", "reverse", "sort"] = "copy"
    """The answer to a sequence."""
    symbols: Annotated[int, Field(ge=2, le=2**20)] = 16
    """The number of symbols."""
    items: Annotated[int, Field(ge=1, le=2**16)] = 16
    """The number of symbols in a sequence."""
    sequences: PositiveCount = 100_000
    """The number of sequences to draw; repeated sequences count once."""
    layout: Literal["sequence", "pair"] = "sequence"
    """sequence: the answer follows, for a decoder; pair: inputs `source` and `target`, for an encoder-decoder."""

    def build(self, length: int | None) -> Data:
        drawn = data_generator().integers(self.symbols, size=(self.sequences, self.items))
        _, first = np.unique(drawn, axis=0, return_index=True)
        distinct = drawn[np.sort(first)]
        ends = split_ranges(self, len(distinct))
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
        return Batch({"tokens": tokens}, np.concatenate([np.full_like(source, IGNORE_INDEX), answer], axis=1))

    def _answer(self, source: Ids) -> Ids:
        match self._config.task:
            case "copy":
                return source
            case "reverse":
                return source[:, ::-1].copy()
            case "sort":
                return np.sort(source, axis=1)


class MQARConfig(DataConfig):
    """Pairs of a key and a value, then every key again among random tokens, with its value as the target.

    Keys are ids from 1 to below half of the vocabulary, and values are ids from there on. Both are drawn without
    repetition. The probability that a key is repeated falls with a power of its distance from the pairs.
    """

    kind: Literal["mqar"] = "mqar"

    symbols: Annotated[int, Field(ge=4, le=2**20)] = 8192
    """The size of the vocabulary."""
    positions: Annotated[int, Field(ge=4, le=2**20)] = 64
    """The number of tokens in an example."""
    pairs: Annotated[int, Field(ge=1, le=2**16)] = 4
    """The number of pairs in an example."""
    power: PositiveFloat = 0.01
    """The exponent: a distance d, in pairs of tokens, has the probability weight d^(power - 1)."""
    examples: PositiveCount = 100_000
    """The number of examples."""

    def check(self) -> None:
        """Raise `Invalid` for more pairs than positions or symbols."""
        super().check()
        if 4 * self.pairs > self.positions:
            message = f"{self.pairs} pairs and as many questions need {4 * self.pairs} positions; got {self.positions}"
            raise Invalid("positions", message)
        if self.pairs > self.symbols // 2 - 1:
            message = f"{self.symbols} symbols give {self.symbols // 2 - 1} keys, too few for {self.pairs} pairs"
            raise Invalid("symbols", message)

    def build(self, length: int | None) -> Data:
        parts = {name: AssociativeRecall(self, ends) for name, ends in split_ranges(self, self.examples).items()}
        return RowsData(parts, self.positions, self.symbols)


class AssociativeRecall:
    """Examples, each drawn from a generator for its index."""

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
        """Draw the tokens and targets of the example with this index."""
        random, pairs, half = data_generator(number), self._config.pairs, self._config.symbols // 2
        keys = 1 + random.choice(half - 1, pairs, replace=False)
        values = half + random.choice(self._config.symbols - half, pairs, replace=False)
        asked = 2 * pairs + 2 * random.choice(len(self._weights), pairs, replace=False, p=self._weights)
        tokens = random.integers(self._config.symbols, size=self._config.positions)
        targets = np.full_like(tokens, IGNORE_INDEX)
        tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2] = keys, values
        tokens[asked], targets[asked] = keys, values
        return tokens, targets
