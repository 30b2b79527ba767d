"""The size of a model's KV cache, computed without allocating a cache."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tfkit.component import Cached, State
from tfkit.graph.decode_split import split_if_decodable
from tfkit.graph.expand import Graph
from tfkit.graph.sequence_limits import max_len
from tfkit.placement import name_of


@dataclass(frozen=True)
class CacheSize:
    """Bytes that are cached for a sequence."""

    dtype: str
    """Type of the cached tensors."""
    per_token: int
    """Bytes per token, as long as it is within every window."""
    states: int
    """Bytes of the states, which do not grow with the sequence."""
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
    memory: list[Cached | State] = [
        tensor for _, pieces in parts.again.values() for layer in pieces.memory_caches for tensor in layer
    ]
    slots = [entry for entry in cached if isinstance(entry, Cached)]
    limit = max_len(graph)
    return CacheSize(
        dtype=name_of(dtype),
        per_token=cached_bytes(slots, 1, dtype),
        states=cached_bytes(cached, 0, dtype),
        windows=tuple(sorted({tensor.window for tensor in slots if tensor.window is not None})),
        per_memory_token=cached_bytes(memory, 1, dtype),
        max_len=limit,
        at_max_len=None if limit is None else cached_bytes(cached, limit, dtype),
    )


def cached_bytes(cached: Iterable[Cached | State], tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes that are kept of a sequence of `tokens`, without the slots for padding; 0 tokens for states."""
    wide = torch.promote_types(dtype, torch.float32)
    return sum(
        math.prod(entry.shape(tokens)) * (wide if isinstance(entry, State) and entry.wide else dtype).itemsize
        for entry in cached
    )
