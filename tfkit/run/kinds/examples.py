"""Examples of data kinds: rows of equal length, and windows over a long sequence of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tfkit.errors import Invalid
from tfkit.run.contract import IGNORE_INDEX, Batch, DataConfig, Examples, Ids, Order, Tokenizer


@dataclass(frozen=True)
class RowsData:
    """The rows of each split; see `tfkit.Data` for its fields."""

    parts: Mapping[str, Examples]
    """The examples of each split."""
    length: int
    vocab_size: int
    tokenizer: Tokenizer | None = None
    fingerprint: str = ""
    start: int | None = None
    end: int | None = None

    @property
    def splits(self) -> list[str]:
        """Names of the splits."""
        return list(self.parts)

    def examples(self, split: str, order: Order) -> Examples:
        return self.parts[split]


def split_ranges(config: DataConfig, size: int) -> dict[str, tuple[int, int]]:
    """Return the range of each split among `size` examples; raise `Invalid` if a range is empty."""
    ends = config.ends(size)
    empty = next((name for name, (start, end) in ends.items() if start == end), None)
    if empty is not None:
        raise Invalid("split", f"split `{empty}` must have at least one of the {size:,} examples")
    return ends


def positions_of(examples: Examples, length: int) -> int:
    """Return the number of positions of all examples, which have `length` positions unless they have padding."""
    positions: int | None = getattr(examples, "positions", None)
    return length * len(examples) if positions is None else positions


def next_tokens(rows: Ids, *, counted: int | None = None) -> Batch:
    """Build a batch from rows of tokens [b, t + 1], in which the target of each token is the next token.

    With `counted`, only the last `counted` targets of each row count.
    """
    targets = rows[:, 1:].copy()
    if counted is not None:
        targets[:, :-counted] = IGNORE_INDEX
    return Batch({"tokens": rows[:, :-1]}, targets)


def data_generator(*key: int) -> np.random.Generator:
    """Return a random generator for a data kind. It depends only on the key, not on the seed of a run."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


class TokenStream(Protocol):
    """A sequence of tokens: an array, or an object that computes or reads the tokens."""

    def __len__(self) -> int:
        """Return the number of tokens."""

    def __getitem__(self, indices: Ids, /) -> Ids:
        """Return the tokens at these places."""


@dataclass(frozen=True)
class StreamData:
    """The tokens of each split, in windows; see `tfkit.Data` for its fields.

    A window has `length` tokens [b, length], and the next token of each as its target. Raises `Invalid` if a split has
    too few tokens for a window.
    """

    parts: Mapping[str, TokenStream]
    """The tokens of each split, [n]: an array, or an object that reads tokens at any indices."""
    length: int
    vocab_size: int
    tokenizer: Tokenizer | None
    fingerprint: str

    def __post_init__(self) -> None:
        for name, part in self.parts.items():
            if len(part) <= self.length:
                reason = f"but must have at least {self.length + 1:,}, for a window of {self.length:,} and a target"
                raise Invalid("split", f"split `{name}` has {len(part):,} tokens, {reason}")

    @property
    def splits(self) -> list[str]:
        """Names of the splits."""
        return list(self.parts)

    def examples(self, split: str, order: Order) -> Examples:
        return Windows(self.parts[split], self.length, stride=1 if order == "sampled" else self.length)


class Windows:
    """Windows of tokens, one at each multiple of `stride`.

    With a stride of 1, all windows are complete. With a stride of `length`, the windows cover the stream, and targets
    after its end do not count.
    """

    def __init__(self, tokens: TokenStream, length: int, *, stride: int) -> None:
        self._tokens, self._stride = tokens, stride
        self._offsets = np.arange(length + 1)
        self._count = len(tokens) - length if stride == 1 else -(-(len(tokens) - 1) // stride)

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Ids) -> Batch:
        locations = indices[:, None] * self._stride + self._offsets
        inside = locations < len(self._tokens)
        ids = self._tokens[np.where(inside, locations, 0)]
        targets = np.where(inside[:, 1:], ids[:, 1:], IGNORE_INDEX)
        return Batch({"tokens": ids[:, :-1]}, targets)
