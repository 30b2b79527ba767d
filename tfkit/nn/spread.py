"""Tensors that `torch.distributed.fsdp.fully_shard` sharded, and tensors that are complete in every process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor. For a sharded tensor this is a collective operation: every process must call it."""
    return tensor.full_tensor() if _is_spread(tensor) else tensor


def part(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a full tensor in the same way as `like`. Only the rows of this process are copied to its device."""
    if not _is_spread(like):
        return tensor
    sharded = torch.empty_like(like, dtype=tensor.dtype, requires_grad=False)
    local, first = rows_of(sharded)
    local.copy_(tensor[first : first + len(local)])
    return sharded


def rows_of(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the rows of a tensor that this process has, as a view, and the number of the first."""
    if not _is_spread(tensor):
        return tensor, 0
    mesh, first = tensor.device_mesh, 0
    for dim, placement in enumerate(tensor.placements):
        if placement.is_shard(0):
            # As `torch.chunk` divides them: the last processes may have fewer rows, or none.
            first = min(-(-len(tensor) // mesh.size(dim)) * mesh.get_local_rank(dim), len(tensor))
    return tensor.to_local(), first


def process_of(tensor: Tensor) -> tuple[int, int]:
    """Return the number of this process among all processes that hold parts of a tensor, and their count."""
    return (tensor.device_mesh.get_rank(), tensor.device_mesh.size()) if _is_spread(tensor) else (0, 1)


def outlines(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of the same full shapes and types that have no values."""
    return {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}


def _is_spread(tensor: Tensor) -> TypeGuard[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")  # its import takes long, and one process has no such tensors
    return module is not None and isinstance(tensor, module.DTensor)
