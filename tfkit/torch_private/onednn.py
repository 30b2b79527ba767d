"""oneDNN's matrix product, which `torch.nn.functional.linear` uses for float32 only in compiled models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    number = float  # `Scalar` in TorchScript


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [..., d_in] by weight [d_out, d_in] and add the bias, without a gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def scripted_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply `linear` in TorchScript, where an empty list has a type, here `Scalar?[]`."""
    none = torch.jit.annotate(list[number | None], [])
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", none, "")
