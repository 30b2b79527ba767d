"""Tensors that `torch.distributed.fsdp.fully_shard` sharded, and tensors that are complete in every process."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor. For a sharded tensor this is a collective operation: every process must call it."""
    return tensor.full_tensor() if _is_spread(tensor) else tensor


def part(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a full tensor in the same way as `like`."""
    if not _is_spread(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor  # which `like` has imported

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _is_spread(tensor: Tensor) -> TypeGuard[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")  # its import takes long, and one process has no such tensors
    return module is not None and isinstance(tensor, module.DTensor)
