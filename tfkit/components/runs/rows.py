"""Data whose examples are rows of one length, in splits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tfkit.component import DataConfig, Examples, Order, Tokenizer
from tfkit.errors import Invalid

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]


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
    """The range of each split among `size` examples; raises `Invalid` if one is empty."""
    ends = config.ends(size)
    empty = next((name for name, (start, end) in ends.items() if start == end), None)
    if empty is not None:
        raise Invalid("split", f"split `{empty}` has none of the {size:,} examples")
    return ends


def generator(*key: int) -> np.random.Generator:
    """A generator of a data kind's own numbers, independent for each key; they do not depend on the seed of a run."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
