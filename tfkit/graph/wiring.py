"""The masks that the nodes of a graph use, and the token tables that nodes share.

A pairwise mask states for each token which tokens it may attend to. It separates the documents in a row if every node
uses the mask or computes each position independently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tfkit.graph.decode_split import computes_alone, wire_of
from tfkit.graph.expand import Graph, Node


def masks_in_use(nodes: Iterable[Node]) -> set[str | None]:
    """Return the masks that at least one of the nodes uses."""
    return {mask for node in nodes for _, mask in _used_masks(node)}


def pairwise_masks(nodes: Iterable[Node]) -> set[str | None]:
    """Return the masks that may be pairwise, because every node that uses them supports pairwise masks."""
    nodes = list(nodes)
    refused = {
        mask
        for node in nodes
        for field, mask in _used_masks(node)
        if field not in ("input", "inputs") or not _takes_pairs(node)
    }
    return masks_in_use(nodes) - refused


def node_ignoring_pairs(graph: Graph) -> str | None:
    """Return the first node that mixes the tokens of different documents despite a pairwise mask, or None."""
    return next((node.name for node in graph.nodes if not _has_separate_documents(node)), None)


def _has_separate_documents(node: Node) -> bool:
    static = any(wire_of(node, field).static for field in node.wires)
    return not static and (_takes_pairs(node) or (computes_alone(node) and not any(_used_masks(node))))


def _takes_pairs(node: Node) -> bool:
    """Return True if a node supports a pairwise mask, and its states restart at the beginning of a document."""
    return node.config.pairs and not crosses_documents(node)


def crosses_documents(node: Node) -> bool:
    """Return True if a sublayer of the node carries a state from one document of a row to the next."""
    return node.stack is not None and node.stack.crosses_documents


def _used_masks(node: Node) -> Iterator[tuple[str, str | None]]:
    """Yield the masks that a node uses, each with the field of its wire."""
    for field, signal in node.signals.items():
        if wire_of(node, field).mask:
            yield from ((field, part.mask) for part in (signal if isinstance(signal, list) else [signal]))


# ---- token tables ----


def table_owner(graph: Graph, node: str) -> str:
    """Return the node that contains the table of `node`: the node to which it is tied, or `node` itself."""
    node = graph.node(node).module
    seen = {node}
    while isinstance(tie := graph.node(node).wires.get("tie"), str) and graph.node(node).config.table():
        node = graph.node(tie).module
        if node in seen:
            raise AssertionError("a cycle of ties is refused when the graph is expanded")
        seen.add(node)
    return node


def heads_of_tables(graph: Graph) -> dict[str, list[str]]:
    """Return the nodes whose table is also the output matrix of heads, with the names of these heads."""
    heads: dict[str, list[str]] = {}
    for node in graph.nodes:
        tie = node.wires.get("tie")
        if node.output.type == "logits" and isinstance(tie, str):
            heads.setdefault(table_owner(graph, tie), []).append(node.name)
    return heads
