"""The node that holds the token table another node uses."""

from __future__ import annotations

from tfkit.graph.expand import Graph


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
