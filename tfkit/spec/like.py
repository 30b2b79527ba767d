"""`like: NODE` in a node of a graph: the keys of that node, its base, are defaults.

A node merges over its base as a spec merges over the spec that it extends, except that a different `block` keeps the
keys: a decoder may be like an encoder. Wires are not taken, because they determine the position of a node in the graph.
A node without `input` takes the output of the node above it, as usual; each further wire of the base must be written.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping as MappingABC
from dataclasses import replace

from tfkit.component import WireMarker, marker
from tfkit.errors import Diagnostic, listing, quoted, similar
from tfkit.plugin.registry import Registry
from tfkit.spec.merge import is_null, merge, without
from tfkit.spec.tree import MAX_NODES, Mapping, Node, Scalar, Sequence

LIKE = "like"
Taken = dict[tuple[str, str], str]
"""The node from which a node takes a key, by the name of the node and the key."""


def with_likes(root: Mapping, registry: Registry) -> tuple[Mapping, Taken, list[Diagnostic]]:
    """Replace `like` in the nodes of a graph by the keys that it stands for; return the tree, these keys, and errors.

    A node with an error is removed, because its missing keys would cause further errors.
    """
    graph, taken, errors = root.items.get("graph"), Taken(), list[Diagnostic]()
    if not isinstance(graph, Mapping):
        return root, taken, errors
    full: dict[str, Node | None] = {}
    count = 0
    for start in graph.items:
        trail = [start]
        while trail:
            name, node = trail[-1], graph.items[trail[-1]]
            word = node.items.get(LIKE) if isinstance(node, Mapping) else None
            source = str(word.value) if isinstance(word, Scalar) else ""
            if name in full:
                trail.pop()
            elif not isinstance(node, Mapping) or word is None:
                full[name] = node
            elif is_null(word):
                full[name] = without(node, {LIKE})
            elif fault := _fault(name, word, trail, graph):
                errors.append(fault)
                full[name] = None
            elif source not in full:
                trail.append(source)
            elif (base := _as_mapping(full[source])) is None:
                full[name] = None  # the error is an error of the base
            else:
                wires = _wires(base, registry)
                keys = without(base, wires)
                merged = merge(keys, without(node, {LIKE}), ("graph", name))
                before, count = count, count + _size(merged)
                full[name] = merged if count <= MAX_NODES else None
                taken |= {(name, key): source for key in keys.items if key not in node.items}
                missing = (wires & base.items.keys() & _wires(merged, registry)) - {"input", *node.items}
                errors += [_missing_wire(name, wire, source, word) for wire in sorted(missing)]
                if before <= MAX_NODES < count:
                    message = f"nodes must take at most {MAX_NODES:,} keys and values by `{LIKE}`"
                    errors.append(Diagnostic(message, word.span, f"graph.{name}.{LIKE}"))
    nodes = {name: value for name in graph.items if (value := full[name]) is not None}
    graph = Mapping(nodes, {name: graph.keys[name] for name in nodes}, graph.span)
    return Mapping({**root.items, "graph": graph}, root.keys, root.span), taken, errors


def with_source(error: Diagnostic, taken: MappingABC[tuple[str, str], str]) -> Diagnostic:
    """Add a note with the base to an error in a key that a node takes by `like`."""
    top, name, key = [*error.path.split(".", 3), "", ""][:3]
    source = taken.get((name, key)) if top == "graph" else None
    note = f"`{name}` takes `{key}` from `{source}`, because of `{LIKE}: {source}`"
    return error if source is None else replace(error, notes=(*error.notes, note))


def _fault(name: str, word: Node, trail: list[str], graph: Mapping) -> Diagnostic | None:
    """Return the error in the value of `like`, if there is one; each node of `trail` is like the next."""
    path = f"graph.{name}.{LIKE}"
    if not isinstance(word, Scalar) or not isinstance(word.value, str):
        return Diagnostic(f"`{LIKE}` must be the name of a node", word.span, path, help=f"write `{LIKE}: NODE`")
    if word.value in trail:
        cycle = [*trail[trail.index(word.value) :], word.value]
        notes = (f"by way of {' -> '.join(cycle[:12])}",) if len(cycle) > 2 else ()
        return Diagnostic("a node cannot be like itself", word.span, path, notes, "name a different node")
    if word.value not in graph.items:
        notes = (f"nodes: {listing(graph.items)}",)
        help = similar("a node", word.value, [node for node in graph.items if node != name])
        return Diagnostic(f"unknown node {quoted(word.value)}", word.span, path, notes, help)
    return None


def _missing_wire(name: str, wire: str, source: str, word: Node) -> Diagnostic:
    message = f"missing key `{wire}`: `{name}` does not take the wires of `{source}`"
    help = f"write `{wire}: NODE`, or `{wire}: null`"
    return Diagnostic(message, word.span, f"graph.{name}.{wire}", help=help)


def _as_mapping(node: Node | None) -> Mapping | None:
    """Return a node, which may be the word of a block, as a mapping."""
    if isinstance(node, Scalar):
        return Mapping({"block": node}, {"block": node.span}, node.span)
    return node if isinstance(node, Mapping) else None


def _wires(node: Mapping, registry: Registry) -> set[str]:
    word = node.items.get("block")
    block = registry.find("block", str(word.value)) if isinstance(word, Scalar) else None
    fields = {} if block is None else block.config.model_fields
    return {name for name, info in fields.items() if marker(info, WireMarker) is not None}


def _size(node: Node) -> int:
    """Return the number of values in a tree."""
    inside: Iterator[Node] = iter(())
    if isinstance(node, Mapping | Sequence):
        inside = iter(node.items.values() if isinstance(node, Mapping) else node.items)
    return 1 + sum(map(_size, inside))
