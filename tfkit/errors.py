"""The errors of tfkit, and the form of every error text.

A `Diagnostic` is one error with its location in the user's text; a `SpecError` contains all errors of a spec. They are
rendered like a compiler's errors: the line, carets below the fault, the allowed values, one line of help.
"""

from __future__ import annotations

import difflib
import re
import textwrap
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

MAX_COLUMNS = 100
TAB = "    "
_CODE = re.compile(r"`[^`]*`")
MIN_SIMILARITY = 0.66  # minimum similarity of a name that is suggested
MAX_NAME = 100
MAX_NAMES = 1000

MAX_ERRORS = 50
"""Maximum number of errors that are listed for a spec."""


@dataclass(frozen=True)
class Source:
    """A text with locations: a spec file, or a `--set` argument. Errors show `name`.

    A mapping in Python is also a source: `text` has a line for each of its values, and `paths` their paths.
    """

    name: str
    text: str = field(repr=False)
    paths: tuple[str, ...] = field(default=(), repr=False)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *(match.end() for match in re.finditer(r"\r\n|\r|\n", self.text))]

    def line(self, number: int) -> str:
        """Return the text of a line (1-based) without its line break; empty if the source has no such line."""
        if not 1 <= number <= len(self._starts):
            return ""
        end = self._starts[number] if number < len(self._starts) else len(self.text)
        return self.text[self._starts[number - 1] : end].rstrip("\r\n")

    def span(self, start: int, end: int | None = None) -> Span:
        """Return the span of `text[start:end]`, limited to its first line and never empty."""
        line = bisect_right(self._starts, start)
        next_line = self._starts[line] if line < len(self._starts) else len(self.text)
        text = self.text[start : min(start + 1 if end is None else end, next_line)]
        return Span(self, line, start - self._starts[line - 1] + 1, max(1, len(text.rstrip())))


@dataclass(frozen=True)
class Span:
    """A range of columns in a line of a source. Lines and columns count from 1, in characters."""

    source: Source
    line: int
    column: int
    length: int = 1

    @property
    def location(self) -> str:
        """The location as text: `file:line:column`; in a mapping, the path."""
        if self.source.paths:
            return self.source.paths[self.line - 1] or self.source.name
        return f"{self.source.name}:{self.line}:{self.column}"

    @property
    def number(self) -> str:
        """The number of the line; empty in a mapping, which has none."""
        return "" if self.source.paths else str(self.line)


@dataclass(frozen=True)
class Diagnostic:
    """One error: the message, the location, the values allowed.

    `path` is the dotted path in the spec (`graph.decoder.attention.kind`). All texts may quote the user's own:
    characters that could garble a terminal are escaped when it is rendered.
    """

    message: str
    span: Span | None = None
    path: str = ""
    notes: tuple[str, ...] = ()
    help: str | None = None

    def render(self, level: str = "error") -> str:
        """Format the error for users. No line ends with blanks."""
        span = self.span
        margin = " " * (len(span.number or " ") + 1 if span else 2)
        where = [span.location] if span else []
        where += [f"({self.path})"] if self.path and self.path not in where else []
        lines = [f"{level}: {self.message}"]
        lines += [f"{margin}--> {'  '.join(where)}"] if where else []
        lines += _source_excerpt(span, margin) if span else []
        for note in [*self.notes, *([f"help: {self.help}"] if self.help else [])]:
            lines += _wrapped_lines(printable_text(note), f"{margin} = ")
        return "\n".join(printable_text(line).rstrip() for line in lines)

    def warning(self) -> str:
        """Format the text of a Python warning, whose category the reader of the warning shows."""
        return self.render("warning").removeprefix("warning: ")

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnostic as data, for `--json`. Without a position in a text, file, line and column are None."""
        span = self.span if self.span and self.span.number else None
        return {
            "message": self.message,
            "file": span.source.name if span else None,
            "line": span.line if span else None,
            "column": span.column if span else None,
            "path": self.path,
            "notes": list(self.notes),
            "help": self.help,
        }


class FirstLossWarning(UserWarning):
    """A model to be trained would start with a loss far above the loss of even guesses."""


class LeftOutWarning(UserWarning):
    """A file has tensors that the model omits. A model that is saved again lacks these tensors."""


class ChangedWeightsWarning(UserWarning):
    """The weights in the folder of a run differ from the weights that the run wrote there."""


class NotFiniteWarning(UserWarning):
    """Weights that were written have values that are infinite or NaN: they are kept, but do not load."""


class NamesWarning(UserWarning):
    """Modules of a saved model keep their names, because they do not have the projections of Llama."""


class EditedModelWarning(UserWarning):
    """The modules of a built model differ from its spec. A tool reports what it takes from the spec."""


class PluginWarning(UserWarning):
    """A plugin changed a global setting of torch while it was loaded. tfkit restored the setting."""


class SpecError(ValueError):
    """Raised for a spec, a run or a file with errors; `str(error)` is the text that commands print.

        try:
            tfkit.load("my_model.yaml")
        except tfkit.SpecError as error:
            messages = [(diagnostic.path, diagnostic.message) for diagnostic in error.diagnostics]

    Attributes:
        diagnostics: the errors in file order, without repetitions.
    """

    def __init__(self, *diagnostics: Diagnostic) -> None:
        assert diagnostics, "a SpecError says what is wrong"
        self.diagnostics: tuple[Diagnostic, ...] = _in_file_order(_distinct_diagnostics(diagnostics))
        super().__init__(*self.diagnostics)

    def __str__(self) -> str:
        texts = [diagnostic.render() for diagnostic in self.diagnostics]
        if len(texts) > 1:
            names = dict.fromkeys(d.span.source.name for d in self.diagnostics if d.span)
            where = f" in {printable_text(', '.join(names))}" if names else ""
            texts.append(f"error: {len(texts)} errors{where}")
        return "\n\n".join(texts)


class SpecWarning(UserWarning):
    """A value of a spec without effect, after another spec or `--set` changed its readers."""


class Invalid(ValueError):  # noqa: N818 - reads as a sentence: raise Invalid(field, message)
    """Raised by a config's validator or a block's check about one of its fields.

    `field` is the dotted path relative to the config (`n_kv_heads`, `memory`), or empty for the config as a
    whole. The loader adds the position.
    """

    def __init__(self, field: str, message: str, *, notes: Sequence[str] = (), help: str | None = None) -> None:
        super().__init__(field, message)
        self.field = field
        self.message = message
        self.notes: tuple[str, ...] = tuple(notes)
        self.help = help

    def __str__(self) -> str:
        return self.message


def closest_name(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that `word` was most likely meant to be, or None if none is similar.

    Case, `-` and `_` are ignored. A name that contains the other is similar (`heads`, `n_heads`).
    """
    names = [name for name in candidates if len(name) <= MAX_NAME]
    if len(word) > MAX_NAME or len(names) > MAX_NAMES:
        return None
    likeness = {name: _name_similarity(_folded_name(word), _folded_name(name)) for name in names}
    best = max(likeness, key=lambda name: likeness[name], default=None)
    return best if best is not None and likeness[best] >= MIN_SIMILARITY else None


def similar_name_help(what: str, word: str, names: Iterable[str], otherwise: str | None = None) -> str | None:
    """Return the help for a word that is not in `names`: a similar name, or `otherwise`."""
    near = closest_name(word, names)
    return f"{what} with a similar name exists: `{near}`" if near else otherwise


def listing(words: Iterable[str], limit: int = 12) -> str:
    """Format `a, b, c` in the given order; beyond `limit` words, `a, b, ... (31 in all)`."""
    items = list(words)
    if len(items) <= limit:
        return ", ".join(items)
    return ", ".join([*items[:limit], f"... ({len(items)} in all)"])


def number_ranges(numbers: Sequence[int]) -> str:
    """Format ascending integers: `0-4, 6-10`."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def quoted(text: str, limit: int = 60) -> str:
    """Quote user text in backticks, shortened so that a message stays readable."""
    text_in_quotes = printable_text(text[: limit + 1])
    return f"`{text_in_quotes}`" if len(text_in_quotes) <= limit else f"`{text_in_quotes[: limit - 3]}...`"


def _folded_name(name: str) -> str:
    return re.sub(r"[-_\s]+", "_", name.strip().lower())


def _name_similarity(word: str, name: str) -> float:
    shorter, longer = sorted((word, name), key=len)
    contained = len(shorter) >= 3 and shorter in longer
    if not contained and 2 * len(shorter) < MIN_SIMILARITY * (len(shorter) + len(longer)):
        return 0.0
    return max(difflib.SequenceMatcher(None, word, name).ratio(), 0.8 if contained else 0.0)


def _distinct_diagnostics(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Remove repeated errors: keep the first error with the same location and message, or location and path."""
    seen: set[tuple[object, ...]] = set()
    distinct = []
    for diagnostic in diagnostics:
        marks = {("message", diagnostic.span or diagnostic.path, diagnostic.message)}
        if diagnostic.span and diagnostic.path:
            marks.add(("path", diagnostic.span, diagnostic.path))
        if not marks & seen:
            distinct.append(diagnostic)
        seen |= marks
    return distinct


def _in_file_order(diagnostics: list[Diagnostic]) -> tuple[Diagnostic, ...]:
    names = list(dict.fromkeys(d.span.source.name for d in diagnostics if d.span))

    def order(diagnostic: Diagnostic) -> tuple[int, int, int]:
        if diagnostic.span is None:
            return len(names), 0, 0
        return names.index(diagnostic.span.source.name), diagnostic.span.line, diagnostic.span.column

    return tuple(sorted(diagnostics, key=order))


def _source_excerpt(span: Span, margin: str) -> list[str]:
    """Return the source line and carets below the span, cut to `MAX_COLUMNS`."""
    room = MAX_COLUMNS - len(f"{margin} | ")
    line = span.source.line(span.line)
    start = min(span.column - 1, len(line))
    end = max(start + 1, min(start + span.length, len(line)))
    first, last = max(0, start - room), min(len(line), start + room)
    cells = [_cell_text(char) for char in line[first:last]]
    widths = [_display_width(cell) for cell in cells]
    if last - first < len(line) or sum(widths) + (start == len(line)) > room:
        before, after = _cell_range(widths, start - first, end - first, room - 2 * len("..."))
    else:
        before, after = 0, len(cells)
    left = "..." if first + before > 0 else ""
    right = "..." if first + after < len(line) else ""
    excerpt = "".join(cells[before:after])
    indent = len(left) + sum(map(_display_width, cells[before : start - first]))
    carets = sum(map(_display_width, cells[start - first : min(end - first, after)]))
    bar, head = f"{margin} |", f" {span.number}".ljust(len(margin))
    return [bar, f"{head} | {left}{excerpt}{right}", f"{bar} {' ' * indent}{'^' * max(1, carets)}"]


def _wrapped_lines(text: str, start: str) -> list[str]:
    """Wrap a text to lines of at most `MAX_COLUMNS`, except longer words. Continuation lines are indented.

    Code in backticks is not broken, so that a command can be copied.
    """
    room = MAX_COLUMNS - len(start)
    words = _CODE.sub(lambda code: code[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(words, room, break_long_words=False, break_on_hyphens=False) if len(text) > room else [text]
    lines = [line.replace("\0", " ") for line in lines]
    return [f"{start if index == 0 else ' ' * len(start)}{line}" for index, line in enumerate(lines)]


def _cell_range(widths: list[int], start: int, end: int, room: int) -> tuple[int, int]:
    """Return the widest range of cells that fits: the span, then text on both sides of it."""
    edges = [0, *accumulate(widths)]
    before = after = min(start, len(widths))
    while after < min(end, len(widths)) and edges[after + 1] - edges[before] <= room:
        after += 1
    while True:
        reach = before, after
        if before > 0 and edges[after] - edges[before - 1] <= room:
            before -= 1
        if after < len(widths) and edges[after + 1] - edges[before] <= room:
            after += 1
        if reach == (before, after):
            return reach


def _cell_text(char: str) -> str:
    """Format a character of a source line: a tab as blanks, control characters escaped."""
    return TAB if char == "\t" else printable_text(char)


def printable_text(text: str) -> str:
    """Escape characters that a terminal might interpret or cannot show."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _display_width(text: str) -> int:
    """Return the number of terminal columns. Wide characters take two columns, and combining characters none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)
