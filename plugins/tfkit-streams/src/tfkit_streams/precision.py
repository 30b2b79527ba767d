"""The dtype of small tensors that are weights of entire streams."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """Convert a tensor to float32, unless it has more bits."""
    return x if x.dtype == torch.float64 else x.float()
