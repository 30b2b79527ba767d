"""Problems of a published calculator: `$(0000000024-00000000.5)=5.32000000$` is 24 - 0.5 = 23.5."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

import tfkit
from tfkit.errors import Invalid
from tfkit.run.contract import Batch, Data, DataConfig, Examples, Ids, Order, PositiveCount
from tfkit.run.kinds.examples import RowsData, StreamData, data_generator, next_tokens, split_ranges

SYMBOLS = "$()*+-./0123456789=an"
OPERATORS = "/*-+"
DIGITS = 10
"""Number of characters of an operand, and of an answer."""
WIDTH = 3 * DIGITS + 6
ANSWER = DIGITS + 1
"""Number of characters after `=`."""
MAX_NUMBER = 1000
DECIMAL = 0.4
"""Probability that an operand is not an integer."""
DIVIDED, TEST = 0, 1
"""Keys of the random generators: for the problems that are divided into splits, and for `test`."""


class CalculatorConfig(DataConfig):
    """Two numbers and one of `/ * - +`, with the answer (https://lesterpjy.me/posts/modern-transformers-1/).

    Each problem has 36 characters. Numbers and the answer are padded with zeros to 10 characters. The answer is rounded
    to two decimals, and is between `=` and `$`. A number is an integer from 1 to 1000 or, with probability 0.4, such an
    integer times a random number between 0 and 1. Problems are drawn at random, so a problem may occur in several
    splits. The split `test` is drawn separately: it has one problem per row, and only answers count.
    """

    kind: Literal["calculator"] = "calculator"

    problems: PositiveCount = 3_000_000
    """The number of problems that are divided into splits."""
    test: PositiveCount = 10_000
    """The number of problems in the split `test`."""
    layout: Literal["stream", "rows"] = "stream"
    """stream: windows over the text of all problems, which may begin inside a problem; rows: one problem per row."""
    reverse: bool = True
    """If true, the answer is written backwards, as published, so its last digit comes first."""
    loss_on: Literal["all", "answer"] = "all"
    """The positions that count; `answer` requires the layout `rows`."""

    def check(self) -> None:
        """Raise `Invalid` for a fraction for `test`, and for `loss_on: answer` without rows."""
        super().check()
        if "test" in self.split:
            raise Invalid("split", "the split `test` is drawn separately", help="set its size with `test: 10_000`")
        if self.layout == "stream" and self.loss_on == "answer":
            raise Invalid("loss_on", "`loss_on: answer` needs one problem per row", help="add `layout: rows`")

    @property
    def takes_length(self) -> bool:
        return self.layout == "stream"

    @property
    def windows(self) -> bool:
        return self.layout == "stream"

    @property
    def split_names(self) -> tuple[str, ...]:
        return (*self.split, "test")

    def idle(self, split: str) -> frozenset[str]:
        learned = {"length", "layout", "loss_on", "problems", "split"}
        return super().idle(split) | (learned if split == "test" else {"test"})

    def build(self, length: int | None) -> Data:
        tokenizer, drawn = tfkit.CharacterTokenizer(SYMBOLS), Problems(DIVIDED, self.problems, reverse=self.reverse)
        asked = Problems(TEST, self.test, reverse=self.reverse)
        test = Rows(asked, (0, self.test), answer_only=True)
        if length is None:
            ends = split_ranges(self, self.problems)
            rows = {name: Rows(drawn, part, answer_only=self.loss_on == "answer") for name, part in ends.items()}
            return RowsData({**rows, "test": test}, WIDTH - 1, len(SYMBOLS), tokenizer)
        parts = {name: Text(drawn, part) for name, part in self.ends(WIDTH * self.problems).items()}
        return CalculatorData(parts, length, len(SYMBOLS), tokenizer, "", test)


class Problems:
    """Problems that are drawn once, and formatted as text when they are read."""

    def __init__(self, key: int, count: int, *, reverse: bool = True) -> None:
        random = data_generator(key)
        self._reverse = reverse
        self._operators = random.integers(len(OPERATORS), size=count, dtype=np.int8)
        self._numbers = random.integers(1, MAX_NUMBER + 1, size=(2, count), dtype=np.int16)
        self._factors = np.where(random.random((2, count)) < DECIMAL, random.random((2, count)), math.nan)

    def rows(self, numbers: Ids) -> Ids:
        """Return the ids of problems, [n, 36]."""
        text = "".join(map(self.text, numbers.tolist()))
        return _CODES[np.frombuffer(text.encode(), dtype=np.uint8)].reshape(-1, WIDTH)

    def text(self, number: int) -> str:
        """Return the characters of a problem."""
        left, right = (_operand_value(int(self._numbers[i, number]), float(self._factors[i, number])) for i in range(2))
        operator = OPERATORS[self._operators[number]]
        answer = f"{_answer_text(left, operator, right):0>{DIGITS}}"
        return f"$({left:0>{DIGITS}}{operator}{right:0>{DIGITS}})={answer[::-1] if self._reverse else answer}$"


_CODES = np.zeros(128, dtype=np.int64)
_CODES[[ord(symbol) for symbol in SYMBOLS]] = np.arange(len(SYMBOLS))


def _operand_value(integer: int, factor: float) -> int | float:
    return integer if math.isnan(factor) else round(integer * factor, 2)


def _answer_text(left: float, operator: str, right: float) -> str:
    if operator == "/":
        return str(round(left / right, 2)) if right else "nan"
    value = left * right if operator == "*" else left - right if operator == "-" else left + right
    return str(round(value, 2))


class Text:
    """A range of the problems as one text; see `Stream`."""

    def __init__(self, problems: Problems, ends: tuple[int, int]) -> None:
        self._problems = problems
        self._start, self._end = ends

    def __len__(self) -> int:
        return self._end - self._start

    def __getitem__(self, indices: Ids) -> Ids:
        numbers, within = np.divmod(indices + self._start, WIDTH)
        needed, which = np.unique(numbers, return_inverse=True)
        return self._problems.rows(needed)[which.reshape(indices.shape), within]


class Rows:
    """A range of the problems, one per row."""

    def __init__(self, problems: Problems, ends: tuple[int, int], *, answer_only: bool) -> None:
        self._problems, self._answer_only = problems, answer_only
        self._start, self._end = ends

    def __len__(self) -> int:
        return self._end - self._start

    def batch(self, indices: Ids) -> Batch:
        return next_tokens(self._problems.rows(indices + self._start), counted=ANSWER if self._answer_only else None)


@dataclass(frozen=True)
class CalculatorData(StreamData):
    """Windows of all problems, and the problems of `test`."""

    test: Rows

    @property
    def splits(self) -> list[str]:
        return [*super().splits, "test"]

    def examples(self, split: str, order: Order) -> Examples:
        return self.test if split == "test" else super().examples(split, order)
