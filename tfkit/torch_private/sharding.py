"""State of `fully_shard` and `DTensor`, read without importing `torch.distributed`, whose import is slow."""

from __future__ import annotations

import torch
from torch import nn

from tfkit.torch_private import private_attribute


def computes_in(module: nn.Module) -> torch.dtype | None:
    """Return the compute dtype of a module that `fully_shard` returned; None if it equals the parameters' dtype."""
    feature = "the dtype of a sharded model's caches"
    state = private_attribute(module, "_get_fsdp_state", feature)()
    return private_attribute(state, "_mp_policy", feature).param_dtype


def local_part(value: object) -> object:
    """Return this process's tensor of a `DTensor`; any other value unchanged."""
    return value.to_local() if hasattr(value, "to_local") else value
