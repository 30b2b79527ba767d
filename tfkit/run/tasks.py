"""Tasks as token ids, and their metrics from the log-likelihoods of continuations.

Prompts and continuations are encoded and scored as by lm-evaluation-harness: a prompt and its continuation are encoded
together, blanks at the end of a prompt belong to the continuation, and prompts that are too long lose their beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tfkit.errors import Invalid, SpecError, quoted
from tfkit.run.contract import IGNORE_INDEX, Batch, Ids, Tokenizer, bare_ids
from tfkit.run.questions import Question, TaskFile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Values: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class ContinuationScores:
    """The scores of all continuations of a task.

    Attributes:
        likelihoods: the log-likelihood of each continuation, in nats.
        greedy: 1 for a continuation whose tokens are the most likely tokens, and 0 for all others.
    """

    likelihoods: Values
    greedy: Values


@dataclass(frozen=True)
class Continuation:
    """The ids of a prompt with a continuation, of which the last `size` belong to the continuation."""

    ids: Ids
    size: int


@dataclass(frozen=True, eq=False)
class Task:
    """A task for a tokenizer and a model.

    Attributes:
        name: the name in reports.
        file: the questions.
        continuations: the continuations of the first question, then of the second, and so on.
        cut: the number of questions whose prompts lost their beginning.
    """

    name: str
    file: TaskFile
    continuations: tuple[Continuation, ...]
    cut: int

    @property
    def names(self) -> list[str]:
        """The names of its metrics in reports, such as `agreement.acc`."""
        return [f"{self.name}.{metric}" for metric in self.file.metrics]

    @property
    def remark(self) -> str | None:
        """A remark about prompts that lost their beginning; None if there are none."""
        return f"prompts that are longer than `max_len` lose their beginning: {self.cut:,}" if self.cut else None

    def first(self, count: int) -> Task:
        """Return the task with its first questions only."""
        questions = self.file.questions[:count]
        continuations = self.continuations[: sum(len(question.targets) for question in questions)]
        return replace(self, file=replace(self.file, questions=questions), continuations=continuations)

    @property
    def positions(self) -> int:
        """The number of positions that an evaluation computes, without padding."""
        return sum(len(continuation.ids) - 1 for continuation in self.continuations)

    @property
    def longest(self) -> int:
        """The number of positions of the longest continuation with its prompt."""
        return max(len(continuation.ids) - 1 for continuation in self.continuations)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Return continuations as examples of a batch, in which only the tokens of the continuations count."""
        rows = [self.continuations[number] for number in numbers]
        shape = len(rows), max(len(row.ids) for row in rows) - 1
        tokens, targets, mask = np.zeros(shape, np.int64), np.full(shape, IGNORE_INDEX), np.zeros(shape, np.bool_)
        for index, row in enumerate(rows):
            end = len(row.ids) - 1
            tokens[index, :end], mask[index, :end] = row.ids[:-1], True
            targets[index, end - row.size : end] = row.ids[-row.size :]
        return Batch({"tokens": tokens}, targets, masks={} if mask.all() else {"tokens": mask})

    def values(self, scores: ContinuationScores) -> dict[str, Values]:
        """Return the value of each metric for each question. A `perplexity` has the log-likelihoods."""
        ends = np.cumsum([len(question.targets) for question in self.file.questions])[:-1]
        likelihoods = np.split(scores.likelihoods, ends)
        if len(self.file.questions[0].targets) == 1:
            values = {"acc": scores.greedy, "perplexity": scores.likelihoods}
        else:
            values = {
                metric: np.array(
                    [
                        float(np.argmax(part / sizes(question)) == question.answer)
                        for question, part in zip(self.file.questions, likelihoods, strict=True)
                    ]
                )
                for metric, sizes in _SIZES.items()
            }
        return {metric: values[metric] for metric in self.file.metrics}

    def numbers(self, scores: ContinuationScores) -> dict[str, float]:
        """Return the metrics by their names in reports."""
        means = {metric: float(values.mean()) for metric, values in self.values(scores).items()}
        return {
            f"{self.name}.{metric}": float(np.exp(-mean)) if metric == "perplexity" else mean
            for metric, mean in means.items()
        }


_SIZES: Mapping[str, Callable[[Question], Values | float]] = {
    "acc": lambda question: 1.0,
    "acc_norm": lambda question: np.array([len(text) for text in question.targets], np.float64),
    "acc_bytes": lambda question: np.array([len(text.encode()) for text in question.targets], np.float64),
}
"""The divisors of the log-likelihoods of a question's continuations, by metric."""


@lru_cache(maxsize=64)  # the runs of a sweep share their tokenizer and their tasks
def encoded_task(file: TaskFile, name: str, tokenizer: Tokenizer, first: int | None, limit: int | None) -> Task:
    """Encode the questions of a task.

    Args:
        file: the questions.
        name: the name of the task.
        tokenizer: the tokenizer of the model.
        first: the token before an empty prompt, if the tokenizer adds none.
        limit: the maximum number of positions of the model.

    Raises:
        Invalid: a text cannot be encoded, a prompt is empty and there is no `first`, or a continuation is too long.
    """
    continuations, cut = [], 0
    for question in file.questions:
        too_long, location = False, question.row.location
        for target in question.targets:
            text = file.delimiter + target
            try:
                ids, size = _encoded(question.source, text, tokenizer, first)
            except SpecError as error:
                raise Invalid("file", f"{location}: {error.diagnostics[0].message}") from error
            except ValueError as error:
                raise Invalid("file", f"{location}: {error}", help="use a tokenizer for any text") from error
            if limit is not None and len(ids) > limit + 1:
                if size > limit:
                    message = f"{location}: a continuation has {size:,} tokens, but the model has max_len"
                    raise Invalid("file", f"{message} {limit:,}", help="remove the question")
                ids, too_long = ids[-limit - 1 :], True
            continuations.append(Continuation(np.array(ids, np.int64), size))
        cut += too_long
    return Task(name, file, tuple(continuations), cut)


def _encoded(prompt: str, text: str, tokenizer: Tokenizer, first: int | None) -> tuple[list[int], int]:
    """Return the ids of a prompt with a continuation, and the number of ids of the continuation.

    Raise ValueError for texts that the tokenizer cannot express.
    """
    blanks = len(prompt) - len(prompt.rstrip())
    prompt, text = prompt[: len(prompt) - blanks], prompt[len(prompt) - blanks :] + text
    full, bare = list(tokenizer.encode(prompt + text)), list(bare_ids(tokenizer, prompt + text))
    # Special tokens before a text belong to the prompt. Those after it are left out.
    starts = (start for start in range(len(full) - len(bare) + 1) if full[start : start + len(bare)] == bare)
    special = full[: next(starts, 0)]
    before = list(bare_ids(tokenizer, prompt)) if prompt else []
    continuation = bare[len(before) :]
    if not special and not before:
        if first is None:
            raise ValueError("the prompt must have a token; it is empty, and the tokenizer adds no token before a text")
        if continuation[:1] == [first]:
            before, continuation = continuation[:1], continuation[1:]
        else:
            special = [first]
    if not continuation:
        raise ValueError(f"the continuation {quoted(text)} must have at least one token")
    return [*special, *before, *continuation], len(continuation)
