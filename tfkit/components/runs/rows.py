"""Data whose examples are rows of one length, in splits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tfkit.component import IGNORED, Batch, DataConfig, Examples, Ids, Order, Tokenizer
from tfkit.errors import Invalid


@dataclass(frozen=True)
class RowsData:
    """The rows of each split."""

    parts: Mapping[str, Examples]
    length: int
    vocab_size: int
    tokenizer: Tokenizer | None = None
    fingerprint: str = ""

    @property
    def splits(self) -> list[str]:
        """Their names."""
        return list(self.parts)

    def examples(self, split: str, order: Order) -> Examples:
        return self.parts[split]


def divided(config: DataConfig, size: int) -> dict[str, tuple[int, int]]:
    """Return the range of each split among `size` examples; raise `Invalid` if a range is empty."""
    ends = config.ends(size)
    empty = next((name for name, (start, end) in ends.items() if start == end), None)
    if empty is not None:
        raise Invalid("split", f"split `{empty}` has none of the {size:,} examples")
    return ends


def next_tokens(rows: Ids, *, counted: int | None = None) -> Batch:
    """Build rows in which the target of each token is the next token; if `counted`, only that many at the end count."""
    targets = rows[:, 1:].copy()
    if counted is not None:
        targets[:, :-counted] = IGNORED
    return Batch({"tokens": rows[:, :-1]}, targets)


def generator(*key: int) -> np.random.Generator:
    """Return a random generator for a data kind, independent for each key and of the seed of a run."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
