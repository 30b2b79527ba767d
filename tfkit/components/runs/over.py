"""Data kinds that change the examples of any other data."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from tfkit.component import Data, DataConfig, Examples, Order, Tokenizer
from tfkit.errors import Invalid


class OverConfig(DataConfig):
    """Other data with one input, whose order and splits are those given here."""

    of: DataConfig
    """The data; its order and its splits are those given here."""

    def check(self) -> None:
        """Refuse an order and splits that would have no effect."""
        super().check()
        for name in ("order", "split"):
            if name in self.of.model_fields_set:
                raise Invalid(f"of.{name}", f"`{name}` has no effect here", help=f"give it as `data.{name}`")

    @property
    def takes_length(self) -> bool:
        return self.of.takes_length

    @property
    def split_names(self) -> tuple[str, ...]:
        return self._of.split_names

    @property
    def _of(self) -> DataConfig:
        return self.of.model_copy(update={"order": self.order, "split": self.split})

    def idle(self, split: str) -> frozenset[str]:
        inside = self.of.idle(split)
        shared = {"order", "split", "length"}
        return super().idle(split) | (inside & shared) | {f"of.{field}" for field in inside - shared}

    def located(self, folder: Path) -> Self:
        return self.model_copy(update={"of": self.of.located(folder)})

    def build(self, length: int | None) -> Data:
        try:
            of = self._of.build(length)
        except Invalid as error:
            raise Invalid(f"of.{error.field}", error.message, notes=error.notes, help=error.help) from error
        inputs = of.examples("train", self.order).batch(np.zeros(1, dtype=np.int64)).inputs
        if len(inputs) > 1:
            message = f"`{self.kind_name()}` changes one input, but the data has {', '.join(inputs)}"
            raise Invalid("of", message)
        return self.over(of)

    @abstractmethod
    def over(self, of: Data) -> Data:
        """Return the changed data; raise `Invalid` for data that cannot be changed in this way."""


@dataclass(frozen=True)
class OverData:
    """Other data with changed examples."""

    of: Data
    vocab_size: int
    changed: Callable[[str, Examples], Examples]
    """From the name of a split and its examples to the changed ones."""

    @property
    def length(self) -> int:
        """The length of the data."""
        return self.of.length

    @property
    def splits(self) -> list[str]:
        """The names of the splits of the data."""
        return list(self.of.splits)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the data."""
        return self.of.fingerprint

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the data."""
        return self.of.tokenizer

    def examples(self, split: str, order: Order) -> Examples:
        return self.changed(split, self.of.examples(split, order))
