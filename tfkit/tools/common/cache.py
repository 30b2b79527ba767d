"""The size of a model's KV cache, computed without allocating a cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tfkit.component import Cached
from tfkit.graph.decode_split import split_if_decodable
from tfkit.graph.expand import Graph
from tfkit.graph.input_shapes import max_len
from tfkit.placement import name_of


@dataclass(frozen=True)
class CacheSize:
    """Bytes that are cached for a sequence."""

    dtype: str
    """Type of the cached tensors."""
    per_token: int
    """Bytes per token, as long as it is within every window."""
    windows: tuple[int, ...]
    """The windows: a layer with a window caches at most that many tokens."""
    per_memory_token: int
    """Bytes per token that cross-attention attends to."""
    max_len: int | None
    """The maximum number of tokens that the model is designed for."""
    at_max_len: int | None
    """Bytes for a sequence of that length, without the cache of cross-attention."""


def cache_size(graph: Graph, dtype: torch.dtype = torch.bfloat16) -> CacheSize | None:
    """Return the cache size of a sequence; None if the model needs the full sequence, like an encoder."""
    parts = split_if_decodable(graph)
    if parts is None:
        return None
    cached = parts.cached
    if not cached:
        return None
    memory = [tensor for _, pieces in parts.again.values() for layer in pieces.memory_caches for tensor in layer]
    limit = max_len(graph)
    return CacheSize(
        dtype=name_of(dtype),
        per_token=cached_values(cached, 1) * dtype.itemsize,
        windows=tuple(sorted({tensor.window for tensor in cached if tensor.window is not None})),
        per_memory_token=cached_values(memory, 1) * dtype.itemsize,
        max_len=limit,
        at_max_len=None if limit is None else cached_values(cached, limit) * dtype.itemsize,
    )


def cached_values(cached: list[Cached], tokens: int) -> int:
    """Return the number of values that caches hold for a sequence of `tokens`."""
    return sum(tensor.heads * tensor.width * tensor.tokens(tokens) for tensor in cached)
