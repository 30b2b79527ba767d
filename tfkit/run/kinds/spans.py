"""Span corruption: text in which sentinels replace spans, and these spans to generate, as T5 is pretrained.

https://arxiv.org/abs/1910.10683, section 3.1.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from tfkit.errors import Invalid
from tfkit.run.contract import Batch, Examples, Ids, Order
from tfkit.run.kinds.columns import Token, new_token
from tfkit.run.kinds.examples import StreamData, TokenStream, data_generator
from tfkit.run.kinds.text import TextFilesConfig, id_of


class SpansConfig(TextFilesConfig):
    """Text in windows of `length` tokens, in which a sentinel replaces each random span; the spans are the targets.

    The input `source` is the window with its sentinels, and `end`. The targets are each sentinel with the tokens of its
    span, and `end`; the input `target` is `start` and the targets without the last. All windows have equally many
    spans and replaced tokens. The spans of a window are the same in each epoch.
    """

    kind: Literal["spans"] = "spans"

    rate: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """The fraction of tokens that are replaced."""
    span: Annotated[float, Field(ge=1, le=4096)] = 3.0
    """The mean number of tokens of a span."""
    start: Token | None = None
    """The token before a target; by default a new token."""
    end: Token | None = None
    """The token after a source and a target; by default a new token."""
    sentinel: str | None = None
    """The text of the sentinels, with `{}` for their number from 0, such as `<extra_id_{}>`. By default the sentinels
    are new tokens, the first with the highest id."""

    def check(self) -> None:
        """Raise `Invalid` for a text of sentinels without their number."""
        super().check()
        if self.sentinel is not None and self.sentinel.count("{}") != 1:
            message = f"`sentinel` must contain `{{}}` once, for the number of the sentinel; got {self.sentinel!r}"
            raise Invalid("sentinel", message, help="write `sentinel: <extra_id_{}>`")

    def build(self, length: int | None) -> SpansData:
        assert length is not None
        parts, tokenizer, content = self.read()
        if length < 2:
            raise Invalid("", f"a window must have at least 2 tokens, one of which is replaced; got {length}")
        start, vocab_size = new_token(self.start, tokenizer, tokenizer.vocab_size, "start")
        end, vocab_size = new_token(self.end, tokenizer, vocab_size, "end")
        replaced, spans = span_counts(length, self.rate, self.span)
        if self.sentinel is None:
            vocab_size += spans
            sentinels = [vocab_size - 1 - number for number in range(spans)]
        else:
            texts = [self.sentinel.replace("{}", str(number)) for number in range(spans)]
            sentinels = [id_of(text, tokenizer, "sentinel") for text in texts]
        form = SpanForm(length, replaced, start, end, tuple(sentinels))
        positions = max(length, form.positions)  # with short spans, an example is longer than its window
        return SpansData(parts, positions, vocab_size, tokenizer, content, start, end, form)


def span_counts(length: int, rate: float, span: float) -> tuple[int, int]:
    """Return the number of tokens of a window that are replaced, and the number of their spans."""
    replaced = min(max(round(length * rate), 1), length - 1)
    return replaced, min(max(round(replaced / span), 1), replaced, length - replaced)


@dataclass(frozen=True)
class SpanForm:
    """The form of an example: tokens of a window, replaced tokens, and special tokens."""

    length: int
    replaced: int
    start: int
    end: int
    sentinels: tuple[int, ...]

    @property
    def source_size(self) -> int:
        """The number of tokens of a source."""
        return self.length - self.replaced + len(self.sentinels) + 1

    @property
    def positions(self) -> int:
        """The number of positions of an example: of the source, or of the target if it is longer."""
        return max(self.source_size, self.replaced + len(self.sentinels) + 1)

    def example(self, window: Ids, generator: np.random.Generator) -> tuple[Ids, Ids]:
        """Return the source and the targets of a window. It begins with a token that is kept, and ends with a span."""
        spans = len(self.sentinels)
        gaps = random_parts(self.length - self.replaced, spans, generator)
        sizes = np.stack([gaps, random_parts(self.replaced, spans, generator)], axis=1).ravel()
        parts = np.split(window, sizes.cumsum()[:-1])
        source: list[Ids | Sequence[int]] = []
        target: list[Ids | Sequence[int]] = []
        for number, sentinel in enumerate(self.sentinels):
            source += [parts[2 * number], [sentinel]]
            target += [[sentinel], parts[2 * number + 1]]
        return np.concatenate([*source, [self.end]]), np.concatenate([*target, [self.end]])


def random_parts(total: int, count: int, generator: np.random.Generator) -> Ids:
    """Return `count` positive integers that add up to `total`; all such sequences are equally likely."""
    ends = np.sort(generator.choice(total - 1, count - 1, replace=False)) + 1
    return np.diff(ends, prepend=0, append=total).astype(np.int64)


@dataclass(frozen=True)
class SpansData(StreamData):
    """The tokens of each split, in windows with replaced spans; see `tfkit.Data` for its fields."""

    start: int
    end: int
    form: SpanForm

    def examples(self, split: str, order: Order) -> Examples:
        return SpanExamples(self.parts[split], self.form, stride=1 if order == "sampled" else self.form.length)


class SpanExamples:
    """Complete windows of tokens with replaced spans, one at each multiple of `stride`."""

    def __init__(self, tokens: TokenStream, form: SpanForm, *, stride: int) -> None:
        self._tokens, self._form, self._stride = tokens, form, stride

    def __len__(self) -> int:
        return (len(self._tokens) - self._form.length) // self._stride + 1

    @property
    def positions(self) -> int:
        """The number of positions of all examples."""
        return len(self) * self._form.positions

    def batch(self, indices: Ids) -> Batch:
        starts = indices * self._stride
        windows = self._tokens[starts[:, None] + np.arange(self._form.length)]
        pairs = [
            self._form.example(window, data_generator(start))
            for start, window in zip(starts.tolist(), windows, strict=True)
        ]
        sources, targets = (np.stack(rows) for rows in zip(*pairs, strict=True))
        before = np.full((len(targets), 1), self._form.start)
        return Batch({"source": sources, "target": np.concatenate([before, targets[:, :-1]], axis=1)}, targets)
