"""Pages of the site in the form that Sphinx reads, and helpers for generated Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tfkit.plugin.manager import Plugins, load_plugins

ROOT = Path(__file__).parents[2]


@cache
def plugins() -> Plugins:
    """Return the components and specs that the site shows: built in, and of all installed plugins."""
    return load_plugins()


@dataclass(frozen=True)
class Page:
    """A page: its path in the site without a suffix, and the function that writes its text in MyST Markdown.

    The text is generated on demand, so that a test can list the pages without loading a model.
    """

    path: str
    write: Callable[[], str]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; empty without rows."""
    lines = [f"| {' | '.join(_cell(text) for text in row)} |" for row in rows]
    rule = f"|{'---|' * len(head)}"
    return "\n".join([f"| {' | '.join(head)} |", rule, *lines, ""]) if lines else ""


def _cell(text: str) -> str:
    """Escape a text for a cell. A bar needs a backslash, even in code."""
    return " ".join(text.split()).replace("|", r"\|")


def code(text: str, language: str = "text") -> str:
    """Return a block of code; its fence is longer than any fence in the text."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"^`+", text, re.MULTILINE))])
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def stacked(table: str) -> str:
    """Return a table whose rows are broken into several lines on a narrow screen."""
    return f"```{{container}} stacked\n{table}```\n" if table else ""


def search_entries(words: Iterable[str]) -> str:
    """Return index entries, so that a search for these words shows this place first."""
    return f"```{{index}} {', '.join(f'! {word}' for word in words)}\n```\n"


def link(text: str, target: str) -> str:
    """Return a link to a page of the site by its path."""
    return f"[{text}](/{target}.md)"


def joined(parts: Iterable[str]) -> str:
    """Return the parts that have text, with an empty line between them."""
    return "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"


def hidden_index(paths: Iterable[str], *, caption: str = "", depth: int = 1) -> str:
    """Return a hidden table of contents, which adds pages to the sidebar."""
    options = [":hidden:", f":maxdepth: {depth}", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["```{toctree}", *options, "", *(f"/{path}" for path in paths), "```"])


ORPHAN = "---\norphan: true\n---\n"
"""Front matter of pages that the sidebar does not list: kinds and models are too many."""

_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples):\n((?:\n|    .*\n?)*)", re.MULTILINE)
_ITEM = re.compile(r"^(\*{0,2}[\w., `]+):\s+(.*)", re.DOTALL)
TITLES = {"Args": "Arguments", "Examples": "Example"}


def docstring(text: str) -> str:
    """Return a docstring as Markdown, with its sections as tables and its examples as code."""
    text = inspect.cleandoc(text) + "\n"
    body = _SECTION.sub("", text)
    parts = [_escaped(body)]
    for match in _SECTION.finditer(text):
        name, content = match[1], inspect.cleandoc(match[2])
        parts.append(f"**{TITLES.get(name, name)}**")
        if name in ("Example", "Examples"):
            parts.append(code(content, "python"))
        elif name in ("Returns", "Yields"):
            parts.append(_escaped(content))
        else:
            parts.append(_items(content))
    return joined(parts)


def _items(text: str) -> str:
    """Return a list of names and texts. A name begins at the margin; its text may continue on indented lines."""
    entries = re.split(r"\n(?=\S)", text)
    items = []
    for entry in entries:
        match = _ITEM.match(entry)
        name, words = (match[1], match[2]) if match else ("", entry)
        items.append(f"- {f'`{name}`: ' if name else ''}{_escaped(' '.join(words.split()))}")
    return "\n".join(items)


_CODE = re.compile(r"(`[^`\n]+(?:\n[^`\n]+)?`|^(?: {4}.*\n?)+)", re.MULTILINE)


def _escaped(text: str) -> str:
    """Return prose in which only code is markup: stars, underscores, brackets and tags are escaped."""
    parts = _CODE.split(text)
    return "".join(part if index % 2 else _plain(part) for index, part in enumerate(parts))


def _plain(text: str) -> str:
    text = re.sub(r"([*_\[\]<>|$]|^#)", r"\\\1", text, flags=re.MULTILINE)
    text = re.sub(r"(?<!\S)--[a-z][a-z-]*", r"`\g<0>`", text)  # an option of a command
    return re.sub(r"(https://[^\s,;)]*[^\s,;:).])", lambda match: f"<{match[1].replace(chr(92), '')}>", text)


def prose(text: str) -> str:
    """Return a paragraph of plain text as Markdown."""
    return _escaped(" ".join(text.split()))
