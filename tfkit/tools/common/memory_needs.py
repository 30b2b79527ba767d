"""Memory needs of a model, computed before memory is allocated: weights and KV cache."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tfkit.arguments import name_of
from tfkit.component import Cached, State
from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.decode_split import split_if_decodable
from tfkit.graph.expand import Graph
from tfkit.graph.input_shapes import max_len
from tfkit.tools.common.units import bytes_text

MARGIN = 1.05
"""Factor of the size of the weights, for inputs and for values between layers."""


def size_of(model: nn.Module) -> int:
    """Return the bytes of the parameters and buffers of a model."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def check_memory(model: nn.Module, device: torch.device | str) -> None:
    """Raise SpecError if a model on the meta device would not fit into the free memory of `device`."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    half = "" if torch.bfloat16 in dtypes else ", `--dtype bfloat16` to halve it"
    help = f"`--device meta` to run it without values{half}, or `tfkit params` to count only the parameters"
    check_free(int(size_of(model) * MARGIN), device, "the model", help)


def check_free(needed: int, device: torch.device | str, what: str, help: str) -> None:
    """Raise SpecError if fewer bytes are free on `device` than `what` needs."""
    free = free_memory(torch.device(device))
    if free is not None and needed > free:
        message = f"not enough memory on {device}: {what} needs {bytes_text(needed)}, but {bytes_text(free)} is free"
        raise SpecError(Diagnostic(message, help=help))


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that can be allocated; None if that is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    amounts = [amount for amount in (_available_memory(), _container_memory()) if amount is not None]
    return min(amounts, default=None)


def _available_memory() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _container_memory() -> int | None:
    """Return the free memory below the limit of the control group, if any. The page cache counts as free."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cache = next((int(row[1]) for row in rows if row[0] == "inactive_file"), 0)
    except (OSError, ValueError):  # no control group, or "max"
        return None
    return max(0, limit - used + cache)


# ---- the KV cache ----


@dataclass(frozen=True)
class CacheSize:
    """Sizes of the caches of a sequence, in bytes."""

    dtype: str
    """Dtype of the cached tensors."""
    per_token: int
    """Bytes per token, while the sequence is shorter than every window."""
    states: int
    """Bytes of the states, which do not grow with the sequence."""
    windows: tuple[int, ...]
    """Sizes of the windows, in tokens: a layer with a window caches no more tokens."""
    per_memory_token: int
    """Bytes per token that cross-attention attends to."""
    max_len: int | None
    """The maximum number of tokens that the model is designed for."""
    at_max_len: int | None
    """Bytes for a sequence of `max_len` tokens, without the cache of cross-attention."""


def cache_size(graph: Graph, dtype: torch.dtype = torch.bfloat16) -> CacheSize | None:
    """Return the cache size of a sequence; None if the model needs the full sequence, like an encoder."""
    parts = split_if_decodable(graph)
    if parts is None:
        return None
    cached = parts.cached
    if not cached:
        return None
    memory: list[Cached | State] = [
        tensor for _, state in parts.step_nodes.values() for layer in state.memory_caches for tensor in layer
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
    """Return the cached bytes of a sequence of `tokens`, without the padding slots; with 0 tokens, only of states."""
    wide = torch.promote_types(dtype, torch.float32)
    return sum(
        math.prod(entry.shape(tokens)) * (wide if isinstance(entry, State) and entry.wide else dtype).itemsize
        for entry in cached
    )
