"""Facts about the wires of a graph: the masks that its nodes use, and the token tables that nodes share.

A pairwise mask contains, for each token, the tokens that it may attend to. With it, documents in one row do not affect
each other, provided that every node supports it: the node uses the mask, or computes each position independently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tfkit.graph.decode_split import computes_alone, wire_of
from tfkit.graph.expand import Graph, Node


def masks_in_use(nodes: Iterable[Node]) -> set[str | None]:
    """Return the masks that any of the nodes reads."""
    return {mask for node in nodes for _, mask in _masks(node)}


def masks_of_pairs(nodes: Iterable[Node]) -> set[str | None]:
    """Return the masks that may be pairwise: every node that uses them supports pairwise masks."""
    nodes = list(nodes)
    refused = {mask for node in nodes for field, mask in _masks(node) if field != "input" or not _takes_pairs(node)}
    return masks_in_use(nodes) - refused


def deaf_to_pairs(graph: Graph) -> str | None:
    """Return the first node that mixes tokens despite a pairwise mask, or does not take one; None if there is none."""
    return next((node.name for node in graph.nodes if not _obeys(node)), None)


def _obeys(node: Node) -> bool:
    whole = any(wire_of(node, field).whole for field in node.wires)
    return not whole and (_takes_pairs(node) or (computes_alone(node) and not any(_masks(node))))


def _takes_pairs(node: Node) -> bool:
    """Return True if a node uses a pairwise mask, and its states restart where a document begins."""
    return node.config.pairs and not crosses_documents(node)


def crosses_documents(node: Node) -> bool:
    """Return True if a sublayer of the node carries a state from a document of a row to the next one."""
    return node.stack is not None and node.stack.crosses_documents


def _masks(node: Node) -> Iterator[tuple[str, str | None]]:
    """Yield the masks that a node reads, each with the field of its wire."""
    for field, signal in node.signals.items():
        if wire_of(node, field).mask:
            yield from ((field, part.mask) for part in (signal if isinstance(signal, list) else [signal]))


# ---- token tables ----


def table_owner(graph: Graph, node: str) -> str:
    """Return the node whose module holds the table that `node` uses: the node itself, or the node it is tied to."""
    seen = {node}
    while isinstance(tie := graph.node(node).wires.get("tie"), str) and graph.node(node).config.table():
        node = tie
        if node in seen:
            raise AssertionError("a cycle of ties is refused when the graph is expanded")
        seen.add(node)
    return node


def heads_of_tables(graph: Graph) -> dict[str, list[str]]:
    """Return the nodes whose table is the output matrix of heads, with these heads."""
    heads: dict[str, list[str]] = {}
    for node in graph.nodes:
        tie = node.wires.get("tie")
        if node.output.type == "logits" and isinstance(tie, str):
            heads.setdefault(table_owner(graph, tie), []).append(node.name)
    return heads
