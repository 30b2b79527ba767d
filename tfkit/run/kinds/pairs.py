"""Pairs of texts: a source with its target, a prompt with its answer, a prompt with several continuations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tfkit.component import slot
from tfkit.run.contract import IGNORED, Batch, Data, Ids, Tokenizer, TokenizerConfig
from tfkit.run.kinds.columns import (
    ColumnsConfig,
    Ragged,
    Token,
    encoded,
    fingerprint,
    fitted,
    masks_of,
    new_token,
)
from tfkit.run.kinds.examples import RowsData
from tfkit.run.kinds.text import bare, id_of, tokenizer_for
from tfkit.run.read_rows import Row

Sides = tuple[Sequence[int], Sequence[int]]
"""The ids of a source, and of a target."""


class PairsConfig(ColumnsConfig):
    """Pairs of texts, of which the second is to be written: translations, or prompts with answers.

    Only the target counts. Examples are as long as their texts, up to `length`, and padded to the longest of a batch.
    """

    kind: Literal["pairs"] = "pairs"

    source: str = "source"
    """The column of the text to read."""
    target: str = "target"
    """The column of the text to write."""
    layout: Literal["pair", "sequence"] = "pair"
    """pair: inputs `source` and `target`, for an encoder-decoder; sequence: the target follows the source, for a
    decoder."""
    start: Token | None = None
    """The token before a target: by default a new token, whose id is above all others, or none in a sequence."""
    end: Token | None = None
    """The token behind a target; by default a new token, whose id is above all others."""
    long: Literal["error", "skip"] = "error"
    """The treatment of an example of more than `length` positions: report it, or leave it out."""
    tokenizer: TokenizerConfig = slot("characters")
    """Text to tokens. It puts its special tokens around a source, but not around a target."""

    @property
    def takes_length(self) -> bool:
        return True

    def build(self, length: int | None) -> Data:
        assert length is not None
        parts = self.read(lambda row: row)
        texts = [row.text(column) for rows in parts.values() for row in rows for column in (self.source, self.target)]
        tokenizer = tokenizer_for(self.tokenizer, "".join(texts))
        vocab_size = tokenizer.vocab_size
        before: list[int] = []
        if self.start is not None or self.layout == "pair":
            start, vocab_size = new_token(self.start, tokenizer, vocab_size, "start")
            before = [start]
        end, vocab_size = new_token(self.end, tokenizer, vocab_size, "end")
        examples = {}
        for name, rows in parts.items():
            sides = [(self._source(row, tokenizer), [*before, *self._target(row, tokenizer), end]) for row in rows]
            sizes = [_size(*pair, self.layout) for pair in sides]
            kept = [sides[number] for number in fitted(rows, sizes, length, self.long)]
            examples[name] = Pairs.of(kept, self.layout)
        return RowsData(examples, length, vocab_size, tokenizer, fingerprint(texts, examples))

    def _source(self, row: Row, tokenizer: Tokenizer) -> Sequence[int]:
        source = encoded(row, self.source, tokenizer.encode)
        if not source:
            raise row.error(self.source, "a text of at least one token")
        return source

    def _target(self, row: Row, tokenizer: Tokenizer) -> Sequence[int]:
        return encoded(row, self.target, lambda text: bare(tokenizer, text))


def _size(source: Sequence[int], target: Sequence[int], layout: str) -> int:
    """Return the positions of an example: the last token of a target is only predicted."""
    return max(len(source), len(target) - 1) if layout == "pair" else len(source) + len(target) - 1


@dataclass(frozen=True)
class Pairs:
    """Sources with their targets, in one of two layouts."""

    sources: Ragged
    targets: Ragged
    layout: str

    @classmethod
    def of(cls, sides: Sequence[Sides], layout: str) -> Pairs:
        """Return the pairs of these ids."""
        if layout == "sequence":
            sides = [(source, [*source, *target]) for source, target in sides]
        return cls(Ragged(source for source, _ in sides), Ragged(target for _, target in sides), layout)

    def __len__(self) -> int:
        return len(self.sources)

    def digest(self) -> bytes:
        return self.sources.digest() + self.targets.digest()

    def batch(self, indices: Ids) -> Batch:
        tokens, mask = self.targets.padded(indices)
        targets = np.where(mask[:, 1:], tokens[:, 1:], IGNORED)
        mask = mask[:, 1:]  # the last token of each row is only predicted
        tokens = np.where(mask, tokens[:, :-1], 0)
        if self.layout == "sequence":
            asked = np.arange(mask.shape[1]) < self.sources.sizes[indices][:, None] - 1
            return Batch({"tokens": tokens}, np.where(asked, IGNORED, targets), masks=masks_of({"tokens": mask}))
        sources, visible = self.sources.padded(indices)
        inputs = {"source": sources, "target": tokens}
        return Batch(inputs, targets, masks=masks_of({"source": visible, "target": mask}))


class ChoicesConfig(ColumnsConfig):
    """Prompts with several continuations, one of them right: the metric `choice_accuracy` compares their likelihoods.

    An example is the prompt with the right continuation, which alone counts in a loss and in all other metrics.
    Examples are padded to the longest of a batch. The tokenizer puts its special tokens around a prompt, but not around
    a continuation.
    """

    kind: Literal["choices"] = "choices"

    prompt: str = "prompt"
    """The column of the text that the continuations follow."""
    choices: str = "choices"
    """The column of the continuations, a list of texts. They follow the prompt as they are, without a space between."""
    answer: str = "answer"
    """The column of the number of the right continuation; the first is 0."""
    end: Token | None = None
    """The token behind a continuation; none by default."""
    long: Literal["error", "skip"] = "error"
    """The treatment of an example of more than `length` positions: report it, or leave it out."""
    tokenizer: TokenizerConfig = slot("characters")
    """Text to tokens."""

    @property
    def takes_length(self) -> bool:
        return True

    def build(self, length: int | None) -> Data:
        assert length is not None
        parts = self.read(lambda row: row)
        texts = [text for rows in parts.values() for row in rows for text in (row.text(self.prompt), *self._texts(row))]
        tokenizer = tokenizer_for(self.tokenizer, "".join(texts))
        after = [] if self.end is None else [id_of(self.end, tokenizer, "end")]
        examples: dict[str, Choices] = {}
        for name, rows in parts.items():
            questions = [self._question(row, tokenizer, after) for row in rows]
            sizes = [max(_size(*pair, "sequence") for pair in sides) for sides in questions]
            kept = fitted(rows, sizes, length, self.long)
            pairs = Pairs.of([pair for number in kept for pair in questions[number]], "sequence")
            counts = np.array([len(questions[number]) for number in kept])
            examples[name] = Choices(pairs, counts, np.array([self._answer(rows[number]) for number in kept]))
        vocab_size = max([tokenizer.vocab_size, *(token + 1 for token in after)])
        return RowsData(examples, length, vocab_size, tokenizer, fingerprint(texts, examples))

    def _texts(self, row: Row) -> list[str]:
        value = row[self.choices]
        texts = value if isinstance(value, list) else []
        if len(texts) < 2 or not all(isinstance(text, str) and text for text in texts):
            raise row.error(self.choices, "a list of two texts or more")
        return texts

    def _answer(self, row: Row) -> int:
        value, count = row[self.answer], len(self._texts(row))
        if not isinstance(value, int) or not 0 <= value < count:
            raise row.error(self.answer, f"the number of a continuation, from 0 to {count - 1}")
        return value

    def _question(self, row: Row, tokenizer: Tokenizer, after: list[int]) -> list[Sides]:
        prompt = encoded(row, self.prompt, tokenizer.encode)
        if not prompt:
            raise row.error(self.prompt, "a text of at least one token")
        self._answer(row)
        try:
            return [(prompt, [*bare(tokenizer, text), *after]) for text in self._texts(row)]
        except ValueError as error:
            raise row.error(self.choices, "texts that the tokenizer can express", str(error)) from error


@dataclass(frozen=True)
class Choices:
    """Questions, whose continuations are next to each other in `pairs`."""

    pairs: Pairs
    counts: Ids
    answers: Ids

    def __len__(self) -> int:
        return len(self.counts)

    def digest(self) -> bytes:
        return self.pairs.digest() + self.counts.tobytes() + self.answers.tobytes()

    def batch(self, indices: Ids) -> Batch:
        counts, answers = self.counts[indices], self.answers[indices]
        first = self.counts.cumsum()[indices] - counts
        alternatives = []
        for number in range(counts.max() - 1):
            choices = number + (answers <= number)
            exists = choices < counts
            alternative = self.pairs.batch(first + np.where(exists, choices, answers))
            alternatives.append(replace(alternative, targets=np.where(exists[:, None], alternative.targets, IGNORED)))
        return replace(self.pairs.batch(first + answers), alternatives=tuple(alternatives))
