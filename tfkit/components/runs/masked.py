"""Masked language modelling (https://arxiv.org/abs/1810.04805) over any other data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
from pydantic import Field

from tfkit.component import IGNORED, Batch, Data, DataConfig, Examples, Order, PositiveCount, Tokenizer
from tfkit.components.runs.rows import generator
from tfkit.errors import Invalid

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]

HIDDEN, RANDOM = 0.8, 0.1
"""The shares of chosen tokens that become the mask token, and any token; the others stay."""


class MaskedConfig(DataConfig):
    """Other data with some of its tokens hidden: a model reads the rest and finds them.

    Of the tokens that the other data asks for, which is all but the first of a window, a share is chosen; 80% of them
    become the mask token, whose id is above all others, 10% a random token, and 10% stay. The choice depends on the
    number of the example alone. An example is in the split `train` several times, each with another choice.
    """

    kind: Literal["masked"] = "masked"

    of: DataConfig
    """The data; its order and its splits are those given here."""
    share: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """The probability of a token to be chosen."""
    choices: PositiveCount = 10
    """The number of choices for each example of `train`; together, they are one pass."""

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

    def located(self, folder: Path) -> Self:
        return self.model_copy(update={"of": self.of.located(folder)})

    def build(self, length: int | None) -> Data:
        try:
            of = self._of.build(length)
        except Invalid as wrong:
            raise Invalid(f"of.{wrong.field}", wrong.message, notes=wrong.notes, help=wrong.help) from wrong
        inputs = of.examples("train", self.order).batch(np.zeros(1, dtype=np.int64)).inputs
        if len(inputs) > 1:
            raise Invalid("of", f"`masked` hides tokens of one input, but the data has {', '.join(inputs)}")
        return MaskedData(of, self)


@dataclass(frozen=True)
class MaskedData:
    """The other data with its tokens hidden."""

    of: Data
    config: MaskedConfig

    @property
    def vocab_size(self) -> int:
        """That of the data, and the mask token."""
        return self.of.vocab_size + 1

    @property
    def length(self) -> int:
        """That of the data."""
        return self.of.length

    @property
    def splits(self) -> list[str]:
        """Those of the data."""
        return list(self.of.splits)

    @property
    def fingerprint(self) -> str:
        """That of the data."""
        return self.of.fingerprint

    @property
    def tokenizer(self) -> Tokenizer | None:
        """That of the data, which does not know the mask token."""
        return self.of.tokenizer

    def examples(self, split: str, order: Order) -> Examples:
        choices = self.config.choices if split == "train" else 1
        return Hidden(self.of.examples(split, order), self.config.share, choices, mask=self.of.vocab_size)


class Hidden:
    """Examples with some of their tokens hidden: those of a first choice, then of a second, and so on."""

    def __init__(self, of: Examples, share: float, choices: int, *, mask: int) -> None:
        self._of, self._share, self._choices, self._mask = of, share, choices, mask

    def __len__(self) -> int:
        return len(self._of) * self._choices

    def batch(self, indices: Ids) -> Batch:
        seen = self._of.batch(indices % len(self._of))
        ((name, tokens),) = seen.inputs.items()
        asked = np.zeros(tokens.shape, dtype=bool)
        asked[:, 1:] = seen.targets[:, :-1] != IGNORED
        drawn = np.stack([generator(number).random((3, tokens.shape[1])) for number in indices.tolist()], axis=1)
        chosen = asked & (drawn[0] < self._share)
        hidden, random = chosen & (drawn[1] < HIDDEN), chosen & (drawn[1] >= 1 - RANDOM)
        read = np.where(random, (drawn[2] * self._mask).astype(np.int64), tokens)
        read[hidden | _behind(seen.targets)] = self._mask
        return Batch({name: read}, np.where(chosen, tokens, IGNORED))


def _behind(targets: Ids) -> NDArray[np.bool_]:
    """The positions behind the last token: no target at them, at the one before, or after."""
    counted = np.maximum.accumulate((targets != IGNORED)[:, ::-1], axis=1)[:, ::-1]
    behind = np.zeros(targets.shape, dtype=bool)
    behind[:, 1:] = ~counted[:, :-1]
    return behind
