"""From a mapping in Python to a tree in which every value has a path, as in a file every value has a line.

The mapping may contain the types of YAML. Text counts as an unquoted word, so it may be arithmetic. Text that YAML
would parse as a number, a boolean or null, such as `"12"`, stays text, because a file would have to quote it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from collections.abc import Mapping as MappingABC
from numbers import Integral, Real
from typing import Any, TypeAlias

from tfkit.arguments import value_text
from tfkit.errors import MAX_ERRORS, Diagnostic, Invalid, Source, Span, SpecError
from tfkit.spec.scalars import MAX_DIGITS, word_value
from tfkit.spec.tree import MAX_DEPTH, MAX_NODES, MERGE, NUMBERED, Mapping, Node, Scalar, Sequence

Plain: TypeAlias = "dict[str, Plain] | list[Plain] | str | int | float | bool | None"
Path = tuple[str, ...]
NAME = "<mapping>"


def read_data(data: MappingABC[Any, Any]) -> Mapping:
    """Copy a mapping, and return its tree. Raise SpecError with every value that YAML cannot express."""
    copier = _Copier()
    plain = copier.copy(data, ())
    if copier.errors:
        raise SpecError(*copier.errors)
    node = _Tree(plain).node(plain)
    assert isinstance(node, Mapping)
    return node


class _Copier:
    """Copies data as the types of YAML. Errors are collected; only data that is too large ends the copying."""

    def __init__(self) -> None:
        self.errors: list[Diagnostic] = []
        self.open: set[int] = set()  # the mappings and lists around the current value
        self.count = 0

    def copy(self, value: Any, path: Path) -> Plain:
        self._count(path)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, Integral):
            return self._integer(int(value), path)
        if isinstance(value, Real):
            return self._float(float(value), path)
        if not isinstance(value, MappingABC | list | tuple):
            help = "use numbers, text, True, False, None, and lists and mappings of these"
            self._error(f"{value_text(value)} is not a value that a spec can have", path, help=help)
            return None
        if id(value) in self.open:
            self._error("this value contains itself", path)
            return None
        self.open.add(id(value))
        copied: Plain
        if isinstance(value, MappingABC):
            numbers = (int, float) if path and path[-1] == NUMBERED else ()
            keys = {str(key) if type(key) in numbers else key: entry for key, entry in value.items()}
            entries = {str.__str__(key): entry for key, entry in keys.items() if self._is_key(key, path)}
            copied = {key: self.copy(entry, (*path, key)) for key, entry in entries.items()}
        else:
            copied = [self.copy(item, (*path, str(index))) for index, item in enumerate(value)]
        self.open.discard(id(value))
        return copied

    def _is_key(self, key: object, path: Path) -> bool:
        if not isinstance(key, str):
            self._error(f"a key must be text; got {value_text(key)}", path)
        elif key == MERGE:
            self._error(f"`{MERGE}` merges only in YAML", path, help="merge in Python: {**base, ...}")
        else:
            return True
        return False

    def _integer(self, value: int, path: Path) -> int:
        if abs(value) >= 10**MAX_DIGITS:
            self._error(f"an integer must have at most {MAX_DIGITS} digits", path)
        return value

    def _float(self, value: float, path: Path) -> float:
        if not math.isfinite(value):
            self._error(f"a number must be finite; got `{value}`", path)
        return value

    def _count(self, path: Path) -> None:
        self.count += 1
        if len(path) >= MAX_DEPTH:
            self._stop(f"nested more than {MAX_DEPTH} levels deep", path)
        if self.count > MAX_NODES:
            self._stop(f"more than {MAX_NODES:,} keys and values", path)

    def _error(self, message: str, path: Path, *, help: str | None = None) -> None:
        if len(self.errors) == MAX_ERRORS - 1:
            self._stop(message, path, f"reading stopped after {MAX_ERRORS} errors", help=help)
        self.errors.append(Diagnostic(message, path=".".join(path) or NAME, help=help))

    def _stop(self, message: str, path: Path, *notes: str, help: str | None = None) -> None:
        raise SpecError(*self.errors, Diagnostic(message, path=".".join(path), notes=notes, help=help))


class _Tree:
    """Data as a tree. Its source has one line for each value: the key, and an abbreviation of the value."""

    def __init__(self, data: Plain) -> None:
        lines = list(_value_lines(data, (), ""))
        self.source = Source(NAME, "\n".join(line for _, line in lines), tuple(".".join(path) for path, _ in lines))
        self.line = 0

    def node(self, value: Plain, start: int = 0) -> Node:
        """Build the node of the next line, whose value begins after `start` characters."""
        self.line += 1
        span = Span(self.source, self.line, start + 1, max(1, len(self.source.line(self.line)) - start))
        if isinstance(value, dict):
            items: dict[str, Node] = {}
            keys: dict[str, Span] = {}
            for key, item in value.items():
                width = len(_word_text(key))
                keys[key] = Span(self.source, self.line + 1, 1, max(1, width))
                items[key] = self.node(item, width + len(": "))
            return Mapping(items, keys, span)
        if isinstance(value, list):
            return Sequence(tuple(self.node(item, len("- ")) for item in value), span)
        return _text_scalar(value, span) if isinstance(value, str) else Scalar(value, span)


def _value_lines(value: Plain, path: Path, start: str) -> Iterator[tuple[Path, str]]:
    """Yield the path and the line of each value. A mapping or list precedes its contents."""
    yield path, f"{start}{_in_short(value, inside=True)}"
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _value_lines(item, (*path, key), f"{_word_text(key)}: ")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _value_lines(item, (*path, str(index)), "- ")


def _in_short(value: Plain, *, inside: bool) -> str:
    """Format a value as YAML on one line, with `...` for anything below the first level."""
    if isinstance(value, dict):
        items = [f"{_word_text(key)}: {_in_short(item, inside=False)}" for key, item in value.items()]
        return f"{{{', '.join(items) if inside or not items else '...'}}}"
    if isinstance(value, list):
        items = [_in_short(item, inside=False) for item in value]
        return f"[{', '.join(items) if inside or not items else '...'}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return _word_text(value) if isinstance(value, str) else repr(value)


def _word_text(text: str) -> str:
    """Format text on one line, in quotes where YAML needs them."""
    return text if text.isprintable() and isinstance(_unquoted_value(text), str) else json.dumps(text)


def _text_scalar(text: str, span: Span) -> Scalar:
    value = _unquoted_value(text)
    if isinstance(value, float) and "e" in text.lower():
        return Scalar(value, span)  # PyYAML reads YAML 1.1, in which `1e-5` is text
    return Scalar(text, span, quoted=not isinstance(value, str))


def _unquoted_value(text: str) -> object:
    """Return the value of an unquoted word in YAML; None if the word is rejected."""
    try:
        return word_value(text)
    except Invalid:
        return None
