"""Tensors that `torch.distributed.fsdp.fully_shard` spread over processes, beside those that are whole everywhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """All values of a tensor. If it is spread, its processes gather them together: each of them calls this."""
    return tensor.full_tensor() if _is_spread(tensor) else tensor


def part(tensor: Tensor, like: Tensor) -> Tensor:
    """The values of a whole tensor, spread as `like` is."""
    if not _is_spread(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor  # which `like` has imported

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _is_spread(tensor: Tensor) -> TypeGuard[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")  # its import takes long, and one process has no such tensors
    return module is not None and isinstance(tensor, module.DTensor)
