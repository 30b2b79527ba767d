"""The masks that the nodes of a graph read, and those that may have pairs of tokens.

A mask of pairs says which tokens a token may read. With it, documents in one row are as if each had the model to
itself, provided that every node obeys: it reads the mask, or computes each position independently.
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
    """Return True if a node uses a pairwise mask. A state does not restart where a document begins."""
    return node.config.pairs and not (node.stack is not None and node.stack.keeps_state)


def _masks(node: Node) -> Iterator[tuple[str, str | None]]:
    """Yield the masks that a node reads, each with the field of its wire."""
    for field, signal in node.signals.items():
        if wire_of(node, field).mask:
            yield from ((field, part.mask) for part in (signal if isinstance(signal, list) else [signal]))
