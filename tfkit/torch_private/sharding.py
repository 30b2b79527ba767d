"""State of `fully_shard` and `DTensor`, read without importing `torch.distributed`, whose import is slow."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def computes_in(module: nn.Module) -> torch.dtype | None:
    """Return the compute dtype of a module that `fully_shard` returned; None if it equals the parameters' dtype."""
    sharded: Any = module
    dtype: torch.dtype | None = sharded._get_fsdp_state()._mp_policy.param_dtype
    return dtype


def local_part(value: object) -> object:
    """Return this process's tensor of a `DTensor`; any other value unchanged."""
    return getattr(value, "_local_tensor", value)
