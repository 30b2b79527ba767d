"""Questions in the rows of files: a text, and the texts that may follow it. Data kinds and tasks consist of them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tfkit.run.read_rows import Row


@dataclass(frozen=True)
class Question:
    """A text, and the texts that may follow it; `answer` is the index of the correct continuation."""

    row: Row
    source: str
    targets: Sequence[str]
    answer: int = 0


def pair_question(row: Row, source: str, target: str) -> Question:
    """Return the text in the column `source` with its only continuation; raise `Invalid` for other values."""
    return Question(row, row.text(source), [row.text(target)])


def choice_question(row: Row, prompt: str, choices: str, answer: str) -> Question:
    """Return the text in the column `prompt` with its continuations; raise `Invalid` for other values."""
    texts = row[choices] if isinstance(row[choices], list) else []
    if len(texts) < 2 or not all(isinstance(text, str) and text for text in texts):
        raise row.error(choices, "a list of two texts or more")
    index = row[answer]
    if not isinstance(index, int) or not 0 <= index < len(texts):
        raise row.error(answer, f"the number of a continuation, from 0 to {len(texts) - 1}")
    return Question(row, row.text(prompt), texts, index)


@dataclass(frozen=True, eq=False)
class TaskFile:
    """The questions of a task, before a tokenizer encodes them.

    Attributes:
        name: the name in the file, by default the name of the file.
        questions: the questions; all have several continuations, or all have one.
        metrics: the metrics that the task reports.
        delimiter: the text between a prompt and each continuation. The lengths of `acc_norm` do not include it.
        stamps: the size and time of each file that was read.
    """

    name: str
    questions: tuple[Question, ...]
    metrics: tuple[str, ...]
    delimiter: str = ""
    stamps: dict[Path, tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """A digest of all questions, 64 hexadecimal digits."""
        texts = [(question.source, *question.targets, question.answer) for question in self.questions]
        return hashlib.sha256(json.dumps([self.delimiter, texts]).encode()).hexdigest()


def stamp_of(path: Path) -> tuple[int, int]:
    """Return the size and the time of the last change of a file."""
    info = os.stat(path)
    return info.st_size, info.st_mtime_ns
