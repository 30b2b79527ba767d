"""Texts and their continuations: a source with a target, a prompt with an answer, or a prompt with several choices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tfkit.component import slot
from tfkit.run.contract import IGNORE_INDEX, Batch, Data, Ids, Tokenizer, TokenizerConfig, bare_ids
from tfkit.run.kinds.columns import (
    ColumnsConfig,
    Ragged,
    Token,
    data_fingerprint,
    encoded_text,
    fitting_indices,
    masks_of,
    new_token,
)
from tfkit.run.kinds.examples import RowsData
from tfkit.run.kinds.text import id_of, tokenizer_for
from tfkit.run.questions import Question, choice_question, pair_question
from tfkit.run.read_rows import Row

Layout = Literal["pair", "sequence"]


@dataclass(frozen=True)
class PairForm:
    """The form of examples: their layout, the ids before and after each target, and the size of the vocabulary."""

    layout: Layout
    before: Sequence[int]
    after: Sequence[int]
    vocab_size: int

    def size(self, source: Sequence[int], target: Sequence[int]) -> int:
        """Return the number of positions of an example. The last id of a target is not an input."""
        return max(len(source), len(target) - 1) if self.layout == "pair" else len(source) + len(target) - 1


class QuestionsConfig(ColumnsConfig):
    """Texts and their continuations, padded to the longest example of a batch."""

    long: Literal["error", "skip"] = "error"
    """The treatment of an example of more than `length` positions: report it, or omit it."""
    tokenizer: TokenizerConfig = slot("characters")
    """The tokenizer. Its special tokens are added around the first text, but not around the continuation."""

    @abstractmethod
    def question(self, row: Row) -> Question:
        """Return the texts of a row."""

    @abstractmethod
    def form(self, tokenizer: Tokenizer) -> PairForm:
        """Return the form of the examples."""

    def build(self, length: int | None) -> Data:
        assert length is not None
        parts = {name: list(map(self.question, rows)) for name, rows in self.read().items()}
        texts = [text for part in parts.values() for asked in part for text in (asked.source, *asked.targets)]
        tokenizer = tokenizer_for(self.tokenizer, "".join(texts))
        form = self.form(tokenizer)
        examples = {}
        for name, part in parts.items():
            sources = [encoded_text(question.row, question.source, tokenizer.encode) for question in part]
            targets = [self._targets(question, tokenizer, form) for question in part]
            sides = list(zip(sources, targets, strict=True))
            sizes = [max(form.size(source, target) for target in targets) for source, targets in sides]
            fitting = fitting_indices([question.row for question in part], sizes, length, self.long)
            examples[name] = Pairs.of([sides[i] for i in fitting], [part[i].answer for i in fitting], form.layout)
        content = data_fingerprint(texts, examples)
        start, end = (next(iter(ids), None) for ids in (form.before, form.after))
        return RowsData(examples, length, form.vocab_size, tokenizer, content, start, end)

    def _targets(self, question: Question, tokenizer: Tokenizer, form: PairForm) -> list[list[int]]:
        def encode(text: str) -> Sequence[int]:
            return [*form.before, *bare_ids(tokenizer, text), *form.after]

        return [list(encoded_text(question.row, text, encode)) for text in question.targets]


class PairsConfig(QuestionsConfig):
    """Pairs of a source and a target to generate: translations, or prompts with answers.

    Only the tokens of the target count. Examples have the length of their texts, at most `length`, and are padded to
    the longest example of a batch.
    """

    kind: Literal["pairs"] = "pairs"

    source: str = "source"
    """The column of the source text."""
    target: str = "target"
    """The column of the target text."""
    layout: Layout = "pair"
    """pair: inputs `source` and `target`, for an encoder-decoder; sequence: the target follows the source, for a
    decoder."""
    start: Token | None = None
    """The token before a target: by default a new token with the highest id, or none in a sequence."""
    end: Token | None = None
    """The token after a target; by default a new token with the highest id."""

    def question(self, row: Row) -> Question:
        return pair_question(row, self.source, self.target)

    def form(self, tokenizer: Tokenizer) -> PairForm:
        before, vocab_size = [], tokenizer.vocab_size
        if self.start is not None or self.layout == "pair":
            start, vocab_size = new_token(self.start, tokenizer, vocab_size, "start")
            before = [start]
        end, vocab_size = new_token(self.end, tokenizer, vocab_size, "end")
        return PairForm(self.layout, before, [end], vocab_size)


class ChoicesConfig(QuestionsConfig):
    """Prompts with several continuations, of which one is correct. `choice_accuracy` compares their likelihoods.

    An example is the prompt with the correct continuation. Only this continuation counts in the loss and in all other
    metrics.
    """

    kind: Literal["choices"] = "choices"

    prompt: str = "prompt"
    """The column of the text that the continuations follow."""
    choices: str = "choices"
    """The column of the continuations, a list of texts. They follow the prompt directly; no space is added."""
    answer: str = "answer"
    """The column of the index of the correct continuation, from 0."""
    end: Token | None = None
    """The token after a continuation; by default none."""

    def question(self, row: Row) -> Question:
        return choice_question(row, self.prompt, self.choices, self.answer)

    def form(self, tokenizer: Tokenizer) -> PairForm:
        after = [] if self.end is None else [id_of(self.end, tokenizer, "end")]
        return PairForm("sequence", [], after, max([tokenizer.vocab_size, *(token + 1 for token in after)]))


@dataclass(frozen=True)
class Pairs:
    """Sources and targets in a layout. The `counts[i]` targets of example i are stored one after the other."""

    sources: Ragged
    targets: Ragged
    counts: Ids
    answers: Ids
    layout: Layout

    @classmethod
    def of(
        cls, sides: Sequence[tuple[Sequence[int], Sequence[list[int]]]], answers: Sequence[int], layout: Layout
    ) -> Pairs:
        """Build the examples from sources, each with its targets."""
        pairs = [(source, target) for source, targets in sides for target in targets]
        targets = Ragged([*source, *target] if layout == "sequence" else target for source, target in pairs)
        counts = np.array([len(targets) for _, targets in sides])
        return cls(Ragged(source for source, _ in pairs), targets, counts, np.array(answers), layout)

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def positions(self) -> int:
        """The number of positions of all examples with their correct continuations, without padding."""
        first = self.counts.cumsum() - self.counts
        sizes = self.targets.sizes[first + self.answers] - 1
        return int((np.maximum(sizes, self.sources.sizes[first]) if self.layout == "pair" else sizes).sum())

    def digest(self) -> bytes:
        return self.sources.digest() + self.targets.digest() + self.counts.tobytes() + self.answers.tobytes()

    def batch(self, indices: Ids) -> Batch:
        counts, answers = self.counts[indices], self.answers[indices]
        first = self.counts.cumsum()[indices] - counts
        alternatives = []
        for number in range(counts.max() - 1):
            choices = number + (answers <= number)
            exists = choices < counts
            alternative = self._rows(first + np.where(exists, choices, answers))
            alternatives.append(replace(alternative, targets=np.where(exists[:, None], alternative.ids, IGNORE_INDEX)))
        return replace(self._rows(first + answers), alternatives=tuple(alternatives))

    def _rows(self, pairs: Ids) -> Batch:
        ids, mask = self.targets.padded(pairs)
        mask = mask[:, 1:]  # the last id of each row is only predicted
        targets, tokens = np.where(mask, ids[:, 1:], IGNORE_INDEX), np.where(mask, ids[:, :-1], 0)
        sources, visible = self.sources.padded(pairs)
        if self.layout == "pair":
            inputs = {"source": sources, "target": tokens}
            return Batch(inputs, targets, masks=masks_of({"source": visible, "target": mask}))
        asked = np.arange(mask.shape[1]) < visible.sum(1, keepdims=True) - 1
        return Batch({"tokens": tokens}, np.where(asked, IGNORE_INDEX, targets), masks=masks_of({"tokens": mask}))
