"""The size of a model's KV cache, counted without making one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tfkit.component import Cached
from tfkit.graph.decode_split import split_if_decodable
from tfkit.graph.expand import Graph
from tfkit.graph.sequence_limits import max_len
from tfkit.placement import name_of


@dataclass(frozen=True)
class CacheSize:
    """Bytes that are cached for one sequence."""

    dtype: str
    """Type of the cached tensors."""
    per_token: int
    """Bytes per token, as long as it is within every window."""
    windows: tuple[int, ...]
    """The windows: layers with one of these cache no more tokens than that."""
    per_memory_token: int
    """Bytes per token that cross-attention reads."""
    max_len: int | None
    """The most tokens that the model is designed for."""
    at_max_len: int | None
    """Bytes for a sequence of that length, without those for cross-attention."""


def cache_size(graph: Graph, dtype: torch.dtype = torch.bfloat16) -> CacheSize | None:
    """The cache size of one sequence; None if the model needs its sequence as a whole, as an encoder does."""
    parts = split_if_decodable(graph)
    if parts is None:
        return None
    own = parts.cached
    if not own:
        return None
    memory = [one for _, pieces in parts.again.values() for layer in pieces.memory_caches for one in layer]
    limit = max_len(graph)
    return CacheSize(
        dtype=name_of(dtype),
        per_token=cached_values(own, 1) * dtype.itemsize,
        windows=tuple(sorted({one.window for one in own if one.window is not None})),
        per_memory_token=cached_values(memory, 1) * dtype.itemsize,
        max_len=limit,
        at_max_len=None if limit is None else cached_values(own, limit) * dtype.itemsize,
    )


def cached_values(cached: list[Cached], tokens: int) -> int:
    """The number of values that these tensors hold of a sequence of `tokens`."""
    return sum(one.heads * one.width * one.tokens(tokens) for one in cached)
