"""`like: NODE` in a node of a graph: the keys of that node, its base, are defaults.

A node merges over its base as a spec merges over the spec that it extends, except that a different `block` keeps the
keys: a decoder may be like an encoder. Wires are not taken, because they determine the position of a node in the graph.
A node without `input` takes the output of the node above it, as usual; each further wire of the base must be written.

`same: NODE` also takes the weights: the node calls the module of its base, so it has no further key except its wires.
"""

from __future__ import annotations

from dataclasses import replace

from tfkit.component import WireMarker, marker
from tfkit.errors import Diagnostic, SpecError, listing, similar_name_help
from tfkit.plugin.registry import Registry
from tfkit.spec.merge import is_null, merge, without_keys
from tfkit.spec.messages import spec_value_text
from tfkit.spec.tree import MAX_NODES, Mapping, Node, Scalar, Sequence

LIKE, SAME_KEY = "like", "same"
MAX_LIKES = 16  # in a chain, as for `extends`


def with_likes(root: Mapping, registry: Registry) -> tuple[Mapping, dict[str, str], list[Diagnostic]]:
    """Replace `like` by the keys for which it stands, and complete nodes with `same`.

    Return the tree, the bases of these keys by path, and the errors.

    A node with an error is removed, because its missing keys would cause further errors.
    """
    graph, bases, errors = root.items.get("graph"), dict[str, str](), list[Diagnostic]()
    items = graph.items.items() if isinstance(graph, Mapping) else ()
    words = {
        name: node.items[key]
        for name, node in items
        if isinstance(node, Mapping)
        for key in (LIKE, SAME_KEY)
        if key in node.items
    }
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
    key = SAME_KEY if SAME_KEY in node.items else LIKE
    changes, source = without_keys(node, {LIKE}), word.value if isinstance(word, Scalar) else ""
    if is_null(word):
        return without_keys(changes, {SAME_KEY})
    names = list(graph.items)
    nodes = names[: names.index(name)] if key == SAME_KEY else [item for item in names if item != name]
    if not isinstance(source, str) or source not in (nodes if key == SAME_KEY else names):
        message = f"`{key}` must be the name of a node{' above' * (key == SAME_KEY)}; got {spec_value_text(word)}"
        help = None if source in names else similar_name_help("a node", str(source), nodes)
        raise SpecError(Diagnostic(message, word.span, f"graph.{name}.{key}", (f"nodes: {listing(nodes)}",), help))
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
    if key == SAME_KEY:
        _check_shared_keys(name, node, source, base, wires)
    merged = merge(keys, changes, ("graph", name))
    for wire in sorted((wires & base.items.keys() & _wire_names(merged, registry)) - {"input", SAME_KEY, *node.items}):
        message, help = f"missing key `{wire}`: `{name}` does not take the wires of `{source}`", f"write `{wire}: NODE`"
        raise SpecError(Diagnostic(message, word.span, f"graph.{name}.{wire}", (), f"{help}, or `{wire}: null`"))
    bases.update({f"graph.{name}.{key}": source for key in keys.items if key not in node.items})
    return merged


def _check_shared_keys(name: str, node: Mapping, source: str, base: Mapping, wires: set[str]) -> None:
    """Raise SpecError if a node shares the module of a node that shares it too, or has keys that are not wires."""
    owner = base.items.get(SAME_KEY)
    if owner is not None:
        message = f"`{SAME_KEY}` must be the name of a node without `{SAME_KEY}`; got `{source}`"
        help = f"write `{SAME_KEY}: {owner.value}`" if isinstance(owner, Scalar) else None
        raise SpecError(Diagnostic(message, node.items[SAME_KEY].span, f"graph.{name}.{SAME_KEY}", (), help))
    errors = [
        Diagnostic(
            f"`{key}` has no effect: `{SAME_KEY}: {source}` takes all values of `{source}`",
            node.keys[key],
            f"graph.{name}.{key}",
            (),
            f"remove it, or write `{LIKE}: {source}` for separate weights",
        )
        for key in node.items
        if key not in wires
    ]
    if errors:
        raise SpecError(*errors)


def _wire_names(node: Mapping, registry: Registry) -> set[str]:
    word = node.items.get("block")
    block = registry.find("block", str(word.value)) if isinstance(word, Scalar) else None
    fields = {} if block is None else block.config.model_fields
    return {name for name, info in fields.items() if marker(info, WireMarker) is not None}


def _tree_size(node: Node | None) -> int:
    """Return the number of values in a tree."""
    items = node.items.values() if isinstance(node, Mapping) else node.items if isinstance(node, Sequence) else ()
    return 1 + sum(map(_tree_size, items))
