"""One mapping changed by another: for `extends`, for variants of layers, and for `--set`.

Mappings merge key by key, everything else is replaced. A mapping that names another kind replaces too: another
component starts from its own defaults.
"""

from __future__ import annotations

from dataclasses import replace

from tfkit.errors import Diagnostic, Source, SpecError, closest, listing, quoted
from tfkit.spec.source import parse_value
from tfkit.spec.tree import Mapping, Node, Scalar, Sequence


def word_key(path: tuple[str, ...]) -> str:
    """The key that a bare word at this place of a spec stands for."""
    if len(path) == 2 and path[0] in ("graph", "inputs"):
        return "block" if path[0] == "graph" else "type"
    return "kind"


def merge(base: Mapping, patch: Mapping, path: tuple[str, ...] = ()) -> Mapping:
    """`base` with the changes of `patch`; every value keeps the place where it was written."""
    items, keys = dict(base.items), dict(base.keys)
    for name, value in patch.items.items():
        here = (*path, name)
        items[name] = _merged(items[name], value, here) if name in items else value
        keys[name] = patch.keys[name]
    return Mapping(items, keys, patch.span)


def _merged(old: Node, new: Node, path: tuple[str, ...]) -> Node:
    if not isinstance(new, Mapping):
        return new
    key = word_key(path)
    if isinstance(old, Scalar) and isinstance(old.value, str):
        old = Mapping({key: old}, {key: old.span}, old.span)
    if not isinstance(old, Mapping):
        return new
    kind = new.items.get(key)
    if kind is not None and _word(kind) != _word(old.items.get(key)):
        return new
    return merge(old, new, path)


def _word(node: Node | None) -> object:
    return node.value if isinstance(node, Scalar) else None


def assign(root: Mapping, argument: str, fields: frozenset[str]) -> Mapping:
    """`root` changed by one `--set` argument, `path=value`.

    The path may leave out `graph` in front of a node's name. `fields` are the keys that a spec has at the top.
    Raises SpecError when it is not of that form, or leads through something that has no parts.
    """
    source = Source("--set", argument)
    name, equals, _ = argument.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise SpecError(
            Diagnostic("not of the form path=value", source.span(0, len(argument)), help="--set decoder.n_layers=2")
        )
    graph = root.items.get("graph")
    nodes = list(graph.items) if isinstance(graph, Mapping) else []
    if parts[0] in nodes and parts[0] not in fields:
        parts = ["graph", *parts]
    elif parts[0] not in fields:
        near = closest(parts[0], [*nodes, *fields])
        raise SpecError(
            Diagnostic(
                f"the spec has no {quoted(parts[0])}",
                source.span(0, len(parts[0])),
                notes=(f"nodes: {listing(nodes)}",) if nodes else (),
                help=f"a similar name exists: `{near}`" if near else None,
            )
        )
    value = parse_value(source, len(name) + 1)
    return _assigned(root, parts, value, source, ())  # type: ignore[return-value]


def _assigned(node: Node | None, parts: list[str], value: Node, source: Source, path: tuple[str, ...]) -> Node:
    if not parts:
        return value
    head, rest, span = parts[0], parts[1:], source.span(0, source.text.index("="))
    if isinstance(node, Sequence):
        if not head.isdecimal() or int(head) >= len(node.items):
            message = f"`{'.'.join(path)}` is a list of {len(node.items)}: {quoted(head)} is not one of its items"
            raise SpecError(Diagnostic(message, span, help="items count from 0"))
        index = int(head)
        items = list(node.items)
        items[index] = _assigned(items[index], rest, value, source, (*path, head))
        return replace(node, items=tuple(items))
    if isinstance(node, Scalar) and isinstance(node.value, str):
        key = word_key(path)
        node = Mapping({key: node}, {key: node.span}, node.span)
    if not isinstance(node, Mapping):
        node = Mapping({}, {}, span)
    child = _assigned(node.items.get(head), rest, value, source, (*path, head))
    return Mapping({**node.items, head: child}, {**node.keys, head: span}, node.span)
