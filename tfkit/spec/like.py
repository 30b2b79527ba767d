"""`like: NODE` in a node of a graph: the keys of that node, its base, are defaults.

A node merges over its base as a spec merges over the spec that it extends, except that a different `block` keeps the
keys: a decoder may be like an encoder. Wires are not taken, because they determine the position of a node in the graph.
A node without `input` takes the output of the node above it, as usual; each further wire of the base must be written.
"""

from __future__ import annotations

from dataclasses import replace

from tfkit.component import WireMarker, marker
from tfkit.errors import Diagnostic, SpecError, listing, similar_name_help
from tfkit.plugin.registry import Registry
from tfkit.spec.merge import is_null, merge, without_keys
from tfkit.spec.messages import spec_value_text
from tfkit.spec.tree import MAX_NODES, Mapping, Node, Scalar, Sequence

LIKE = "like"
MAX_LIKES = 16  # in a chain, as for `extends`


def with_likes(root: Mapping, registry: Registry) -> tuple[Mapping, dict[str, str], list[Diagnostic]]:
    """Replace `like` by the keys for which it stands. Return the tree, the bases of these keys by path, and the errors.

    A node with an error is removed, because its missing keys would cause further errors.
    """
    graph, bases, errors = root.items.get("graph"), dict[str, str](), list[Diagnostic]()
    items = graph.items.items() if isinstance(graph, Mapping) else ()
    words = {name: node.items[LIKE] for name, node in items if isinstance(node, Mapping) and LIKE in node.items}
    if not words or not isinstance(graph, Mapping):
        return root, bases, errors
    nodes: dict[str, Node] = {}
    count = 0
    for name, span in graph.keys.items():
        try:
            nodes[name] = _expanded_node((name,), graph, words, registry, bases)
        except SpecError as error:
            errors += error.diagnostics
        count += _tree_size(nodes.get(name))
        if count > MAX_NODES:
            errors.append(Diagnostic(f"nodes must have at most {MAX_NODES:,} keys and values in total", span, "graph"))
            break
    graph = Mapping(nodes, {name: graph.keys[name] for name in nodes}, graph.span)
    return Mapping({**root.items, "graph": graph}, root.keys, root.span), bases, errors


def with_base(error: Diagnostic, bases: dict[str, str]) -> Diagnostic:
    """Add the name of the base to an error in a key that a node takes by `like`."""
    _, name, key = (*error.path.split(".")[:3], "", "", "")[:3]
    base = bases.get(f"graph.{name}.{key}")
    return replace(error, notes=(*error.notes, f"`{name}` takes `{key}` from `{base}`")) if base else error


def _expanded_node(
    trail: tuple[str, ...], graph: Mapping, words: dict[str, Node], registry: Registry, bases: dict[str, str]
) -> Node:
    """Return the last node of `trail`, in which each node is like the next; raise SpecError."""
    name, node, word = trail[-1], graph.items[trail[-1]], words.get(trail[-1])
    if word is None or not isinstance(node, Mapping):
        return node
    changes, source = without_keys(node, {LIKE}), word.value if isinstance(word, Scalar) else ""
    if is_null(word):
        return changes
    if not isinstance(source, str) or source not in graph.items:
        message, nodes = (
            f"`{LIKE}` must be the name of a node; got {spec_value_text(word)}",
            [n for n in graph.items if n != name],
        )
        help = similar_name_help("a node", str(source), nodes)
        raise SpecError(Diagnostic(message, word.span, f"graph.{name}.{LIKE}", (f"nodes: {listing(nodes)}",), help))
    if source in trail or len(trail) > MAX_LIKES:
        first = min(trail[trail.index(source) if source in trail else 0 :], key=list(graph.items).index)
        message = f"`{LIKE}` must lead to a node without `{LIKE}`, in at most {MAX_LIKES} steps"
        notes = (f"by way of {' -> '.join((*trail, source))}",)
        raise SpecError(Diagnostic(message, words[first].span, f"graph.{first}.{LIKE}", notes))
    base = _expanded_node((*trail, source), graph, words, registry, bases)
    if isinstance(base, Scalar):
        base = Mapping({"block": base}, {"block": base.span}, base.span)
    if not isinstance(base, Mapping):
        return changes
    keys = without_keys(base, wires := _wire_names(base, registry))
    merged = merge(keys, changes, ("graph", name))
    for wire in sorted((wires & base.items.keys() & _wire_names(merged, registry)) - {"input", *node.items}):
        message, help = f"missing key `{wire}`: `{name}` does not take the wires of `{source}`", f"write `{wire}: NODE`"
        raise SpecError(Diagnostic(message, word.span, f"graph.{name}.{wire}", (), f"{help}, or `{wire}: null`"))
    bases.update({f"graph.{name}.{key}": source for key in keys.items if key not in node.items})
    return merged


def _wire_names(node: Mapping, registry: Registry) -> set[str]:
    word = node.items.get("block")
    block = registry.find("block", str(word.value)) if isinstance(word, Scalar) else None
    fields = {} if block is None else block.config.model_fields
    return {name for name, info in fields.items() if marker(info, WireMarker) is not None}


def _tree_size(node: Node | None) -> int:
    """Return the number of values in a tree."""
    items = node.items.values() if isinstance(node, Mapping) else node.items if isinstance(node, Sequence) else ()
    return 1 + sum(map(_tree_size, items))
