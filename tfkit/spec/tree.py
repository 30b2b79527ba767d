"""From YAML events to a tree of values with locations.

The language is a subset of YAML 1.2 for data: no tags, no duplicate keys, no values that contain themselves, and a
limit on the size after aliases are expanded. Only the parser's events are used, so no tag ever constructs an object,
and a hostile file takes no more time than a long file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import yaml

from tfkit.errors import MAX_ERRORS, Diagnostic, Invalid, Source, Span, SpecError, closest_name, quoted
from tfkit.spec import syntax
from tfkit.spec.scalars import MAX_DIGITS, word_value

MAX_NODES = 50_000  # an alias counts as many nodes as its content
MAX_DEPTH = 40
MERGE = "<<"
NUMBERED = "at"
"""The key of mappings whose keys may be numbers: values by step."""

_PROPERTIES = re.compile(r"(?:[&!][^\s,\[\]{}]*(?:\s+(?:#.*)?)*)*")
_TAG = re.compile(r"!(?:<[^>]*>|[^\s,\[\]{}]*)")


@dataclass(frozen=True)
class Scalar:
    """A single value. Quoted text is always a string."""

    value: str | int | float | bool | None
    span: Span
    quoted: bool = False


@dataclass(frozen=True)
class Sequence:
    """A list."""

    items: tuple[Node, ...]
    span: Span


@dataclass(frozen=True)
class Mapping:
    """Keys and values, with merge keys resolved; `keys` has the location of each key.

    Do not modify a mapping: aliases share it.
    """

    items: dict[str, Node]
    keys: dict[str, Span]
    span: Span


Node: TypeAlias = "Scalar | Sequence | Mapping"


def node_of(data: Any, span: Span) -> Node:
    """Convert plain data to a tree in which all values have the location `span`."""
    if isinstance(data, dict):
        items = {str(key): node_of(value, span) for key, value in data.items()}
        return Mapping(items, dict.fromkeys(items, span), span)
    if isinstance(data, list | tuple):
        return Sequence(tuple(node_of(item, span) for item in data), span)
    return Scalar(data, span)


def compose_tree(source: Source, start: int = 0) -> Node | None:
    """Parse the document in `source.text[start:]`. Return None if it is empty.

    Raises SpecError with every error in it.
    """
    composer = _Composer(source, start)
    try:
        node = composer.document()
    except yaml.YAMLError as problem:
        composer.errors.append(syntax.explain_error(problem, source, start))
        node = None
    if composer.errors:
        raise SpecError(*composer.errors)
    return node


@dataclass(frozen=True)
class _Anchor:
    node: Node
    size: int  # number of nodes after aliases are expanded
    height: int  # levels below the node


class _Composer:
    """Builds the tree in one pass over the events. Errors are collected; only data that is too large ends the pass."""

    def __init__(self, source: Source, start: int) -> None:
        self.source = source
        self.start = start
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML without libyaml has only the second
        self.events: Iterator[Any] = yaml.parse(source.text[start:], Loader=loader)
        self.errors: list[Diagnostic] = []
        self.anchors: dict[str, _Anchor] = {}
        self.open: set[str] = set()  # the anchors of the enclosing nodes
        self.nodes = 0
        self.deepest = 0

    def document(self) -> Node | None:
        next(self.events)  # the start of the stream
        event = next(self.events)
        if isinstance(event, yaml.StreamEndEvent):
            return None
        if event.version or event.tags:
            self._error(syntax.DIRECTIVES, self._span(event), help="remove the line")
        node = self._node(next(self.events), 1)
        next(self.events)  # the end of the document
        event = next(self.events)
        if not isinstance(event, yaml.StreamEndEvent):
            self._error("a second document", self._span(event), help="write each spec to a separate file")
        return node

    def _node(self, event: Any, depth: int, above: str = "") -> Node:
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, depth)
        outer, self.deepest, before = self.deepest, depth, self.nodes
        self._count(event, depth, 1)
        if event.tag is not None:
            self._error(syntax.TAGS, self._tag(event), help=syntax.TAGS_HELP)
        if event.anchor:
            self.open.add(event.anchor)
        node: Node
        if isinstance(event, yaml.MappingStartEvent):
            node = self._mapping(event, depth, above)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = self._sequence(event, depth)
        else:
            node = self._scalar(event)
        if event.anchor:
            self.open.discard(event.anchor)
            self.anchors[event.anchor] = _Anchor(node, self.nodes - before, self.deepest - depth)
        self.deepest = max(outer, self.deepest)
        return node

    def _alias(self, event: Any, depth: int) -> Node:
        span, alias = self._span(event), quoted(f"*{event.anchor}")
        anchor = self.anchors.get(event.anchor)
        if event.anchor in self.open:
            self._error(f"{alias} is inside the value that it stands for", span)
        elif anchor is None:
            near = closest_name(event.anchor, self.anchors)
            help = f"a similar name exists: `&{near}`" if near else "name a value first: `key: &name value`"
            self._error(f"{alias} stands for nothing: no value above has this name", span, help=help)
        else:
            self._count(event, depth + anchor.height, anchor.size)
            return replace(anchor.node, span=span)
        return Mapping({}, {}, span)

    def _sequence(self, start: Any, depth: int) -> Sequence:
        items = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self._node(event, depth + 1))
        return Sequence(tuple(items), self._span(start, event))

    def _mapping(self, start: Any, depth: int, above: str) -> Mapping:
        entries: dict[str, tuple[Span, Node]] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self._key(event, depth, above)
            event = next(self.events)
            value = self._node(event, depth + 1, key[0] if key else "")
            if key is None:
                continue
            name, span = key
            glued = event.start_mark.index == event.end_mark.index and syntax.missing_space(name)
            if glued:
                self._error(syntax.GLUED_MESSAGE, span, help=glued)
            if name in entries:
                help = "merge several mappings in one line: `<<: [*a, *b]`" if name == MERGE else None
                note = f"it is already on line {entries[name][0].line}"
                self._error(f"duplicate key {quoted(name)}", span, note, help=help)
            else:
                entries[name] = span, value
        return self._merged(entries, self._span(start, event))

    def _merged(self, entries: dict[str, tuple[Span, Node]], span: Span) -> Mapping:
        """Replace `<<` by the keys of the merged mappings. Keys that are written out take precedence."""
        merged: dict[str, tuple[Span, Node]] = {}
        for name, entry in entries.items():
            if name == MERGE:
                merged |= {key: value for key, value in self._bases(*entry).items() if key not in entries}
            else:
                merged[name] = entry
        items = {name: node for name, (_, node) in merged.items()}
        return Mapping(items, {name: location for name, (location, _) in merged.items()}, span)

    def _bases(self, key: Span, node: Node) -> dict[str, tuple[Span, Node]]:
        bases: dict[str, tuple[Span, Node]] = {}
        for base in node.items if isinstance(node, Sequence) else (node,):
            if not isinstance(base, Mapping):
                help = "write `<<: *name`, where `&name` is before a mapping"
                self._error("only a mapping can be merged with `<<`", base.span, help=help)
                break
            for name, value in base.items.items():
                bases.setdefault(name, (base.keys[name], value))
        return bases

    def _key(self, event: Any, depth: int, above: str) -> tuple[str, Span] | None:
        node = self._node(event, depth + 1)
        if isinstance(event, yaml.ScalarEvent) and isinstance(node, Scalar):
            if isinstance(node.value, str):
                return node.value, node.span
            if above == NUMBERED and type(node.value) in (int, float):
                return str(node.value), node.span
            text = event.value
            help = f'quote it: "{text}"' if 0 < len(text) <= MAX_DIGITS else "write `key: value`"
            note = f"found {quoted(text) if text else 'nothing'}"
            self._error("a key must be text", node.span, note, help=help)
        else:
            self._error("a key must be a single word or quoted text", node.span)
        return None

    def _scalar(self, event: Any) -> Scalar:
        span = self._span(event)
        if event.style:
            return Scalar(event.value, span, quoted=True)
        try:
            return Scalar(word_value(event.value), span)
        except Invalid as error:
            self._error(error.message, span, *error.notes, help=error.help)
            return Scalar(event.value, span)

    def _count(self, event: Any, depth: int, size: int) -> None:
        self.nodes += size
        self.deepest = max(self.deepest, depth)
        if depth > MAX_DEPTH:
            self._stop(f"nested more than {MAX_DEPTH} levels deep", self._span(event))
        if self.nodes > MAX_NODES:
            self._stop(f"more than {MAX_NODES:,} keys and values, aliases expanded", self._span(event))

    def _error(self, message: str, span: Span, *notes: str, help: str | None = None) -> None:
        if len(self.errors) == MAX_ERRORS - 1:
            self._stop(message, span, *notes, f"reading stopped after {MAX_ERRORS} errors", help=help)
        self.errors.append(Diagnostic(message, span, notes=notes, help=help))

    def _stop(self, message: str, span: Span, *notes: str, help: str | None = None) -> None:
        raise SpecError(*self.errors, Diagnostic(message, span, notes=notes, help=help))

    def _span(self, event: Any, last: Any = None) -> Span:
        """Return the span from an event to `last`, by default the event, without an anchor or tag before it."""
        start, end = self.start + event.start_mark.index, self.start + (last or event).end_mark.index
        match = _PROPERTIES.match(self.source.text, start)
        if match and not isinstance(event, yaml.AliasEvent):
            start = min(match.end(), end)
        return self.source.span(start, end)

    def _tag(self, event: Any) -> Span:
        match = _TAG.search(self.source.text, self.start + event.start_mark.index)
        return self.source.span(*match.span()) if match else self._span(event)
