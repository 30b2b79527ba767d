"""The share of pairs of query and key that a mask hides, by the extent in the spec."""

from __future__ import annotations

from typing import Any, NamedTuple

from tfkit.graph.expand import Graph


class Extent(NamedTuple):
    """The number of keys before and after its own position that a query reads; None is no limit."""

    left: int | None
    right: int | None

    def hidden(self, n_queries: int, n_keys: int) -> float:
        """The share of hidden pairs, if the queries are the last of the keys' positions."""
        if self == EVERYTHING:
            return 0.0
        first = n_keys - n_queries
        seen = sum(self._seen(position, n_keys) for position in range(first, n_keys))
        return 1 - seen / (n_queries * n_keys)

    def _seen(self, position: int, n_keys: int) -> int:
        start = 0 if self.left is None else max(0, position - self.left)
        end = n_keys if self.right is None else min(n_keys, position + self.right + 1)
        return max(0, end - start)


EVERYTHING = Extent(None, None)


def extents(graph: Graph) -> dict[str, Extent]:
    """The extent of self-attention in each layer, by the layer's path; after a prefix, that of the rest."""
    found = {}
    for node in graph.nodes:
        config: Any = node.config
        if not hasattr(config, "plan") or not hasattr(config, "context_key"):
            continue
        for i, (_, layer) in enumerate(config.plan()):
            mask = config.context_key(layer, node.signals).mask
            found[f"{node.name}.layers.{i}"] = Extent(mask.left, mask.right)
    return found
