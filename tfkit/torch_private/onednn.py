"""oneDNN's matrix product, which `torch.nn.functional.linear` takes for float32 in compiled models only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    number = float  # `Scalar` in TorchScript


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """X [..., d_in] times weight [d_out, d_in], plus bias; without a gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def scripted_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` for TorchScript, where an empty list has a type, here that of `Scalar?[]`."""
    none = torch.jit.annotate(list[number | None], [])
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", none, "")
