"""Data kinds that change the examples of any other data.

Masked language modelling is https://arxiv.org/abs/1810.04805. Packing puts several documents into a row, and no
document attends to a different document: https://arxiv.org/abs/2107.02027, section 3.2.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
from pydantic import Field

from tfkit.errors import Invalid
from tfkit.run.contract import IGNORE_INDEX, Batch, Data, DataConfig, Examples, Ids, Order, PositiveCount, Tokenizer
from tfkit.run.kinds.examples import data_generator
from tfkit.run.kinds.text import id_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


class OverConfig(DataConfig):
    """Changed examples of other data, which must have a single input."""

    of: DataConfig
    """The data to change. Set `order` and `split` next to `of`, not inside it."""

    def check(self) -> None:
        """Raise `Invalid` for an order and splits without effect."""
        super().check()
        for name in ("order", "split"):
            if name in self.of.model_fields_set:
                raise Invalid(f"of.{name}", f"`{name}` has no effect here", help=f"write it as `data.{name}`")

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
        if getattr(of, "n_classes", None) is not None:
            raise Invalid("of", f"`{self.kind_name()}` must have data whose targets are tokens; got classes")
        inputs = of.examples("train", self.order).batch(np.zeros(1, dtype=np.int64)).inputs
        if len(inputs) > 1:
            message = f"`{self.kind_name()}` must have data with a single input; got {', '.join(inputs)}"
            raise Invalid("of", message)
        return self.over(of)

    @abstractmethod
    def over(self, of: Data) -> Data:
        """Return the changed data; raise `Invalid` for data that cannot be changed in this way."""


@dataclass(frozen=True)
class OverData:
    """Data with changed examples."""

    of: Data
    vocab_size: int
    changed: Callable[[str, Examples], Examples]
    """Function from the name of a split and its examples to the changed examples."""

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

    @property
    def end(self) -> int | None:
        """The token that ends a text in the data."""
        end: int | None = getattr(self.of, "end", None)
        return end

    def examples(self, split: str, order: Order) -> Examples:
        return self.changed(split, self.of.examples(split, order))


MASK_FRACTION, RANDOM_FRACTION = 0.8, 0.1
"""Fractions of chosen tokens that become the mask token, and a random token; the remaining tokens stay."""


class MaskedConfig(OverConfig):
    """Other data with some of its tokens hidden, for masked language modelling: the model predicts the hidden tokens.

    Tokens are chosen at random among the targets of the other data, which are all tokens except the first of a window.
    Of the chosen tokens, 80% become the mask token, which has the highest id, 10% become a random token, and 10% stay.
    The choice depends only on the index of the example. The split `train` contains every example several times, with
    different choices.
    """

    kind: Literal["masked"] = "masked"

    share: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """The probability of a token to be chosen."""
    choices: PositiveCount = 10
    """The number of choices for each example of `train`; an epoch contains all of them."""

    @property
    def windows(self) -> bool:
        return self.of.windows

    def idle(self, split: str) -> frozenset[str]:
        return super().idle(split) | (set() if split == "train" else {"choices"})

    def over(self, of: Data) -> Data:
        return OverData(of, of.vocab_size + 1, lambda split, examples: self._hidden(split, examples, of.vocab_size))

    def _hidden(self, split: str, examples: Examples, mask: int) -> Hidden:
        return Hidden(examples, self.share, self.choices if split == "train" else 1, mask=mask)


class Hidden:
    """Examples with hidden tokens: all examples with the first choice, then with the second choice, and so on."""

    def __init__(self, of: Examples, share: float, choices: int, *, mask: int) -> None:
        self._of, self._share, self._choices, self._mask = of, share, choices, mask
        positions: int | None = getattr(of, "positions", None)
        self.positions = None if positions is None else positions * choices

    def __len__(self) -> int:
        return len(self._of) * self._choices

    def batch(self, indices: Ids) -> Batch:
        seen = self._of.batch(indices % len(self._of))
        ((name, tokens),) = seen.inputs.items()
        asked = np.zeros(tokens.shape, dtype=bool)
        asked[:, 1:] = seen.ids[:, :-1] != IGNORE_INDEX
        asked &= seen.masks.get(name, True)  # the last target of a padded example may not be an input
        drawn = np.stack([data_generator(number).random((3, tokens.shape[1])) for number in indices.tolist()], axis=1)
        chosen = asked & (drawn[0] < self._share)
        hidden, random = chosen & (drawn[1] < MASK_FRACTION), chosen & (drawn[1] >= 1 - RANDOM_FRACTION)
        read = np.where(random, (drawn[2] * self._mask).astype(np.int64), tokens)
        read[hidden | _trailing_padding(seen.ids)] = self._mask
        return replace(seen, inputs={name: read}, targets=np.where(chosen, tokens, IGNORE_INDEX))


def _trailing_padding(targets: Ids) -> NDArray[np.bool_]:
    """Mark the padding at the end of each row: positions i without a target at position i - 1 or later."""
    counted = np.maximum.accumulate((targets != IGNORE_INDEX)[:, ::-1], axis=1)[:, ::-1]
    behind = np.zeros(targets.shape, dtype=bool)
    behind[:, 1:] = ~counted[:, :-1]
    return behind


class PackedConfig(OverConfig):
    """Data whose rows hold several documents. The model treats each document as if it were alone in its row.

    No token attends to a token of a different document, positions start from 0 in each document, and the last token of
    a document has no target. A document is cut where a row ends.
    """

    kind: Literal["packed"] = "packed"

    separator: str | Annotated[int, Field(ge=0)]
    """The token that ends a document: its text, or its id."""

    @property
    def windows(self) -> bool:
        return self.of.windows

    def over(self, of: Data) -> Data:
        separator = id_of(self.separator, of.tokenizer, "separator")
        if separator >= of.vocab_size:
            message = f"{separator} is not a token: the data has {of.vocab_size:,} tokens, 0 to {of.vocab_size - 1}"
            raise Invalid("separator", message)
        return OverData(of, of.vocab_size, lambda split, examples: Packed(examples, separator))


class Packed:
    """Examples with the document number of each position."""

    def __init__(self, of: Examples, separator: int) -> None:
        self._of, self._separator = of, separator
        self.positions: int | None = getattr(of, "positions", None)

    def __len__(self) -> int:
        return len(self._of)

    def batch(self, indices: Ids) -> Batch:
        seen = self._of.batch(indices)
        ((_, tokens),) = seen.inputs.items()
        ends = tokens == self._separator
        documents = np.cumsum(ends, axis=1) - ends
        return replace(seen, targets=np.where(ends, IGNORE_INDEX, seen.ids), documents=documents)
