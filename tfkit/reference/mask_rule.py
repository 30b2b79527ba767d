"""Rules of masks: positions of queries and keys, counted without padding, [q, 1] and [1, k] -> bool [q, k]."""

from __future__ import annotations

import numpy as np

from tfkit.reference.model import Array, Function, Part


def chunk(part: Part, queries: Array, keys: Array) -> Array:
    """Return True from the first position of the query's chunk to its last."""
    start = queries - queries % part.config.size
    return (keys >= start) & (keys < start + part.config.size)


def blocks(part: Part, queries: Array, keys: Array) -> Array:
    """Return True up to the last position of the query's block. https://arxiv.org/abs/2503.09573, section 3."""
    return keys < queries - queries % part.config.size + part.config.size


def expression(part: Part, queries: Array, keys: Array) -> Array:
    """Evaluate the condition in Python, pair by pair."""
    code = compile(part.config.where, "where", "eval")  # safe: the config allows only comparisons of q and k
    pairs = np.broadcast(queries, keys)
    fits = [eval(code, {"__builtins__": {}}, {"q": int(query), "k": int(key)}) for query, key in pairs]
    return np.array(fits, bool).reshape(pairs.shape)


MASK_RULES: dict[str, Function] = {function.__name__: function for function in (chunk, blocks, expression)}
