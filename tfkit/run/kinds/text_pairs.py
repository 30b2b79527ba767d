"""Pairs of texts that belong together, such as queries with their documents: each text is an input of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

import tfkit
from tfkit.component import slot
from tfkit.run.contract import Batch, Data, DataConfig, Ids, TokenizerConfig
from tfkit.run.kinds.columns import (
    ColumnsConfig,
    Long,
    Ragged,
    data_fingerprint,
    encoded_text,
    fitting_indices,
    masks_of,
)
from tfkit.run.kinds.examples import split_ranges
from tfkit.run.kinds.labelled import LabelledData
from tfkit.run.kinds.text import tokenizer_for

QUERY, DOCUMENT, NEGATIVE = "query", "document", "negative"
"""The inputs of a model of pairs."""


class TextPairsConfig(ColumnsConfig):
    """Pairs of a query and a document that belong together: the inputs `query` and `document` of a model.

    The target of a pair is the number of its document, so that a document that occurs twice is not a negative of
    itself. Texts are padded to the longest of a batch. For SimCSE, name the same column twice.
    """

    kind: Literal["text_pairs"] = "text_pairs"

    query: str = QUERY
    """The column of the query."""
    document: str = DOCUMENT
    """The column of the document."""
    negative: str | None = None
    """The column of a text that does not belong to the query, which becomes the input `negative`; by default none."""
    long: Long = "error"
    """The treatment of a text of more than `length` positions: report it, omit its pair, or use its beginning."""
    tokenizer: TokenizerConfig = slot("characters")
    """Text to tokens, with its special tokens around each text."""

    def build(self, length: int | None) -> Data:
        assert length is not None
        parts = self.read()
        columns = {QUERY: self.query, DOCUMENT: self.document}
        if self.negative is not None:
            columns[NEGATIVE] = self.negative
        texts = [row.text(column) for rows in parts.values() for row in rows for column in columns.values()]
        tokenizer = tokenizer_for(self.tokenizer, "".join(texts))
        ids = {}
        for split, rows in parts.items():
            encoded = [
                {name: encoded_text(row, row.text(column), tokenizer.encode) for name, column in columns.items()}
                for row in rows
            ]
            for row, pair in zip(rows, encoded, strict=True):
                if NEGATIVE in pair and list(pair[NEGATIVE]) == list(pair[DOCUMENT]):
                    raise row.error(columns[NEGATIVE], f"a text that differs from `{self.document}`")
            sizes = [max(map(len, pair.values())) for pair in encoded]
            fitting = fitting_indices(rows, sizes, length, self.long)
            ids[split] = [{name: text[:length] for name, text in encoded[index].items()} for index in fitting]
        examples = examples_of(ids)
        content = data_fingerprint(texts, examples)
        n_documents = 1 + max(int(part.documents.max()) for part in examples.values())
        return LabelledData(examples, length, tokenizer.vocab_size, tokenizer, content, n_classes=n_documents)


@dataclass(frozen=True)
class TextPairExamples:
    """The texts of each input, and the number of each document."""

    texts: Mapping[str, Ragged]
    documents: Ids

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def positions(self) -> int:
        """The number of positions of the longest text of each pair, without padding."""
        return int(np.max([texts.sizes for texts in self.texts.values()], axis=0).sum())

    def digest(self) -> bytes:
        return b"".join(texts.digest() for texts in self.texts.values()) + self.documents.astype("<i8").tobytes()

    def batch(self, indices: Ids) -> Batch:
        padded = {name: texts.padded(indices) for name, texts in self.texts.items()}
        masks = masks_of({name: mask for name, (_, mask) in padded.items()})
        return Batch({name: ids for name, (ids, _) in padded.items()}, self.documents[indices], masks=masks)


def examples_of(ids: Mapping[str, Sequence[Mapping[str, Sequence[int]]]]) -> dict[str, TextPairExamples]:
    """Return the examples of each split. Equal documents have the same number, in all splits."""
    numbers: dict[tuple[int, ...], int] = {}
    examples = {}
    for split, pairs in ids.items():
        documents = [numbers.setdefault(tuple(pair[DOCUMENT]), len(numbers)) for pair in pairs]
        texts = {name: Ragged(pair[name] for pair in pairs) for name in pairs[0]}
        examples[split] = TextPairExamples(texts, np.array(documents))
    return examples


class NumeralsConfig(DataConfig):
    """Numbers in English words, each with its digits: `four thousand two`, `4002`. No number is in two splits."""

    kind: Literal["numerals"] = "numerals"

    numbers: Annotated[int, Field(ge=10, le=10**6)] = 10_000
    """The count of numbers, from 0."""

    def build(self, length: int | None) -> Data:
        pairs = [{QUERY: number_in_words(number), DOCUMENT: str(number)} for number in range(self.numbers)]
        symbols = "".join(sorted({symbol for pair in pairs for text in pair.values() for symbol in text}))
        tokenizer = tfkit.CharacterTokenizer(symbols)
        split_ranges(self, self.numbers)  # raises for an empty split
        ids = {
            name: [{key: tokenizer.encode(text) for key, text in pairs[index].items()} for index in indices]
            for name, indices in self.drawn(self.numbers).items()
        }
        longest = max(len(pair[QUERY]) for pair in pairs)
        return LabelledData(examples_of(ids), longest, len(symbols), tokenizer, n_classes=self.numbers)


ONES, TEENS, TENS = (
    words.split()
    for words in (
        "zero one two three four five six seven eight nine",
        "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen",
        "twenty thirty forty fifty sixty seventy eighty ninety",
    )
)


def number_in_words(number: int) -> str:
    """Return a number below one million in English words."""
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = f" {number_in_words(number % size)}" if number % size else ""
            return f"{number_in_words(number // size)} {name}{rest}"
    if number < 20:
        return (ONES + TEENS)[number]
    return TENS[number // 10 - 2] + (f"-{ONES[number % 10]}" if number % 10 else "")
