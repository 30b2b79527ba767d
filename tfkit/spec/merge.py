"""Changes of a mapping by a second mapping: `extends`, layer variants, `--set`, and `sets=` in Python.

Mappings merge key by key; any other value is replaced. Three kinds of mappings are also replaced: a mapping with a
different kind, because a new component starts from its defaults; a layer pattern, whose ranges belong together; and an
entry of a family. Null removes a key at the top of a spec, and an entry that the spec names (a node, an input).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, replace
from numbers import Integral, Real

from tfkit.arguments import Sets, value_text
from tfkit.errors import Diagnostic, Source, Span, SpecError, closest_name, listing, quoted
from tfkit.spec.provenance import SET
from tfkit.spec.source import parse_value
from tfkit.spec.tree import Mapping, Node, Scalar, Sequence

WILDCARD = "*"
"""Wildcard for a key in the paths of `MergeKeys`."""


@dataclass(frozen=True)
class MergeKeys:
    """Exceptions from the way in which the mappings of a type of document merge.

    Attributes:
        words: the key that a word in place of a mapping stands for, by path. Elsewhere it is `kind`.
        values: keys among `words` that do not name a kind. A change of such a key keeps the remaining keys.
        named: the paths of mappings whose keys are names. Null removes an entry.
    """

    words: MappingABC[tuple[str, ...], str]
    values: frozenset[str] = frozenset()
    named: frozenset[tuple[str, ...]] = frozenset()

    def word_key(self, path: tuple[str, ...]) -> str:
        """Return the key that a word in place of a mapping stands for at a path."""
        return self.words.get(path) or self.words.get((*path[:-1], WILDCARD), "kind")


MODEL_KEYS = MergeKeys(
    words={("graph", WILDCARD): "block", ("inputs", WILDCARD): "type", ("checkpoint",): "extends"},
    named=frozenset({("graph",), ("inputs",)}),
)
"""The exceptions of a model."""


def merge(base: Mapping, patch: Mapping, path: tuple[str, ...] = (), keys: MergeKeys = MODEL_KEYS) -> Mapping:
    """Apply the changes of `patch` to `base`. Every value keeps its location."""
    items, spans = dict(base.items), dict(base.keys)
    for name, value in patch.items.items():
        here = (*path, name)
        if path in keys.named and name in items and is_null(value):
            del items[name], spans[name]
            continue
        items[name] = _merged_value(items[name], value, here, keys) if name in items else value
        spans[name] = patch.keys[name]
    return Mapping(items, spans, patch.span)


def merge_documents(base: Mapping, patch: Mapping, keys: MergeKeys = MODEL_KEYS) -> Mapping:
    """Merge a document over the document that it extends. Null removes keys at the top."""
    gone = {name for name, value in patch.items.items() if name in base.items and is_null(value)}
    return merge(without_keys(base, gone), without_keys(patch, gone), keys=keys)


def nested_patch(keys: Iterable[str], value: Node) -> Mapping:
    """Return the patch that sets the value at the path `keys`."""
    key, *below = keys
    node = nested_patch(below, value) if below else value
    return Mapping({key: node}, {key: value.span}, value.span)


def without_keys(root: Mapping, names: Collection[str]) -> Mapping:
    """Return a mapping without the keys `names`."""
    items = {name: node for name, node in root.items.items() if name not in names}
    return Mapping(items, {name: root.keys[name] for name in items}, root.span)


def _merged_value(old: Node, new: Node, path: tuple[str, ...], keys: MergeKeys) -> Node:
    replaced = path[-2:] == ("layers", "pattern") or (path[0] == "checkpoint" and len(path) > 2)
    if not isinstance(new, Mapping) or replaced:
        return new
    key = keys.word_key(path)
    if isinstance(old, Scalar) and isinstance(old.value, str):
        old = Mapping({key: old}, {key: old.span}, old.span)
    if not isinstance(old, Mapping):
        return new
    kind = new.items.get(key)
    if key not in keys.values and kind is not None and _scalar_value(kind) != _scalar_value(old.items.get(key)):
        return new
    return merge(old, new, path, keys)


def is_null(value: Node) -> bool:
    """Return True for a null, which may be written as nothing."""
    return isinstance(value, Scalar) and value.value is None


def left_out(value: Node) -> bool:
    """Return True for the empty value of `--set bias=`, as an empty shell variable leaves it."""
    span = value.span
    return span.source.name == SET and not span.source.line(span.line)[span.column - 1 :].strip()


def _scalar_value(node: Node | None) -> object:
    return node.value if isinstance(node, Scalar) else None


@dataclass(frozen=True)
class Change:
    """A value and the keys of its path, each with its location in the argument."""

    steps: tuple[tuple[str, Span], ...]
    value: Node

    def inside(self) -> Change:
        """Return the change without the first key of its path."""
        return replace(self, steps=self.steps[1:])


def change_of(argument: str, *, name: str = SET) -> Change:
    """Parse an argument `path=value`, by default of `--set`; raise SpecError if it is malformed. Errors show `name`."""
    source = Source(name, argument)
    path, equals, _ = argument.partition("=")
    parts = path.strip().split(".")
    if not equals or not all(parts):
        option = f"{SET} " if name == SET else ""
        help = f"write a path and a value, for instance `{option}decoder.n_layers=2`"
        raise SpecError(Diagnostic("a change must have the form path=value", source.span(0, len(argument)), help=help))
    steps = []
    start = len(path) - len(path.lstrip())
    for part in parts:
        steps.append((part, source.span(start, start + len(part))))
        start += len(part) + 1
    return Change(tuple(steps), parse_value(source, len(path) + 1))


def apply_set(root: Mapping, argument: str, fields: frozenset[str]) -> Mapping:
    """Apply one `--set` argument, `path=value`, to `root`; see `apply_change`."""
    return apply_change(root, change_of(argument), fields)


def apply_change(
    root: Mapping, change: Change, fields: frozenset[str], *, what: str = "spec", keys: MergeKeys = MODEL_KEYS
) -> Mapping:
    """Assign a value in `root`.

    The path may omit `graph` before the name of a node. `fields` are the keys that the document has at the top, and
    `what` is the type of the document, for errors. Raises SpecError if the path does not exist, or passes through a
    value that is neither a mapping nor a list.
    """
    graph = root.items.get("graph")
    nodes = list(graph.items) if isinstance(graph, Mapping) else []
    steps = list(change.steps)
    first, span = steps[0]
    if first not in fields and first not in nodes:
        near = closest_name(first, [*nodes, *fields])
        help = f"a similar name exists: `{near}`" if near else None
        if paths := [".".join((*path, *(name for name, _ in steps))) for path in _owners_of(first, root)]:
            help = f"write the full path: {listing(map(quoted, paths), 3)}"
        raise SpecError(
            Diagnostic(
                f"the {what} has no {'node or ' if nodes else ''}key {quoted(first)}",
                span,
                notes=(f"nodes: {listing(nodes)}",) if nodes else (),
                help=help,
            )
        )
    if first not in fields:
        steps.insert(0, ("graph", span))
    return _assigned_node(root, steps, change.value, (), keys)  # type: ignore[return-value]


def _owners_of(key: str, root: Mapping) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the mappings that contain a key, as `--set` takes them: without `graph`."""
    for name, node in root.items.items():
        if isinstance(node, Mapping):
            step = () if name == "graph" else (name,)
            if key in node.items:
                yield step
            yield from ((*step, *path) for path in _owners_of(key, node))


def _assigned_node(
    node: Node | None, steps: list[tuple[str, Span]], value: Node, path: tuple[str, ...], keys: MergeKeys
) -> Node:
    """Assign `value` at the end of `steps`, each a key and its location in the argument."""
    if not steps:
        return value
    (head, span), *rest = steps
    if isinstance(node, Sequence):
        if not head.isdecimal() or int(head) >= len(node.items):
            message = f"`{path[-1]}` has no item {quoted(head)}"
            count = f"it is a list of {len(node.items)}; items count from 0"
            raise SpecError(Diagnostic(message, span, ".".join((*path, head)), (count,)))
        index = int(head)
        items = list(node.items)
        items[index] = _assigned_node(items[index], rest, value, (*path, head), keys)
        return replace(node, items=tuple(items))
    if isinstance(node, Scalar) and isinstance(node.value, str):
        key = keys.word_key(path)
        node = Mapping({key: node}, {key: node.span}, node.span)
    if isinstance(node, Scalar) and not isinstance(node.value, bool | None):
        message = f"`{path[-1]}` is a number, which has no key {quoted(head)}"
        raise SpecError(Diagnostic(message, span, ".".join((*path, head)), help=f"set `{'.'.join(path)}` itself"))
    if not isinstance(node, Mapping):
        node = Mapping({}, {}, span)
    removable = not path or path in keys.named
    if removable and not rest and head in node.items and is_null(value) and not left_out(value):
        return without_keys(node, {head})
    child = _assigned_node(node.items.get(head), rest, value, (*path, head), keys)
    location = node.keys.get(head, span) if rest else span  # enclosing mappings keep their locations
    return Mapping({**node.items, head: child}, {**node.keys, head: location}, node.span)


# ---- changes given in Python ----


def as_changes(sets: Sets) -> list[str]:
    """Return each change as `path=value`. Strings among the values of a mapping are parsed as `--set` parses them.

    Raises TypeError for a value that YAML cannot express.
    """
    if isinstance(sets, str):
        return [sets]
    if isinstance(sets, MappingABC):
        return [f"{path}={_as_yaml(path, value)}" for path, value in sets.items()]
    return list(sets)


def _as_yaml(path: str, value: object) -> str:
    """Format a value as JSON, which is valid YAML."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, allow_nan=False, default=_python_number)
    except (TypeError, ValueError):
        message = f"the value of `{path}` in `sets` must be a number, a string, True, False, None, a list or a mapping"
        raise TypeError(f"{message} of these; got {value_text(value)}") from None


def _python_number(value: object) -> int | float:
    """Convert a number of a library such as numpy to a Python number."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError
