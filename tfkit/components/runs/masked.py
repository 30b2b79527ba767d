"""Masked language modelling (https://arxiv.org/abs/1810.04805) over any other data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from tfkit.component import IGNORED, Batch, Data, Examples, Ids, PositiveCount
from tfkit.components.runs.over import OverConfig, OverData
from tfkit.components.runs.rows import generator

if TYPE_CHECKING:
    from numpy.typing import NDArray

HIDDEN, RANDOM = 0.8, 0.1
"""The shares of chosen tokens that become the mask token, and any token; the others stay."""


class MaskedConfig(OverConfig):
    """Other data with some of its tokens hidden: a model reads the rest and finds them.

    Of the tokens that the other data asks for, which is all but the first of a window, a share is chosen; 80% of them
    become the mask token, whose id is above all others, 10% a random token, and 10% stay. The choice depends on the
    number of the example alone. An example is in the split `train` several times, each with another choice.
    """

    kind: Literal["masked"] = "masked"

    share: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """The probability of a token to be chosen."""
    choices: PositiveCount = 10
    """The number of choices for each example of `train`; together, they are one pass."""

    def idle(self, split: str) -> frozenset[str]:
        return super().idle(split) | (set() if split == "train" else {"choices"})

    def over(self, of: Data) -> Data:
        return OverData(of, of.vocab_size + 1, lambda split, examples: self._hidden(split, examples, of.vocab_size))

    def _hidden(self, split: str, examples: Examples, mask: int) -> Hidden:
        return Hidden(examples, self.share, self.choices if split == "train" else 1, mask=mask)


class Hidden:
    """Examples with some of their tokens hidden: all examples with a first choice, then with a second, and so on."""

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
        return replace(seen, inputs={name: read}, targets=np.where(chosen, tokens, IGNORED))


def _behind(targets: Ids) -> NDArray[np.bool_]:
    """Mark the positions after the last token: there is no target at them, at the position before, or after."""
    counted = np.maximum.accumulate((targets != IGNORED)[:, ::-1], axis=1)[:, ::-1]
    behind = np.zeros(targets.shape, dtype=bool)
    behind[:, 1:] = ~counted[:, :-1]
    return behind
