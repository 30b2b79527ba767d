"""The share of pairs of query and key that a mask hides, by the extent in the spec."""

from __future__ import annotations

from tfkit.component import MaskConfig

EVERYTHING = MaskConfig()


def hidden_share(mask: MaskConfig, n_queries: int, n_keys: int) -> float:
    """The share of hidden pairs, if the queries are the last of the keys' positions; a prefix is left out."""
    if mask == EVERYTHING:
        return 0.0
    first = n_keys - n_queries
    seen = sum(_seen(mask, position, n_keys) for position in range(first, n_keys))
    return 1 - seen / (n_queries * n_keys)


def _seen(mask: MaskConfig, position: int, n_keys: int) -> int:
    start = 0 if mask.left is None else max(0, position - mask.left)
    end = n_keys if mask.right is None else min(n_keys, position + mask.right + 1)
    return max(0, end - start)
