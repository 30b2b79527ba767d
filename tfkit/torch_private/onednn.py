"""oneDNN's matrix product, which `torch.nn.functional.linear` uses for float32 only in compiled models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from tfkit.torch_private import MissingName, optional_name, private_name

if TYPE_CHECKING:
    number = float  # `Scalar` in TorchScript

NAME, FEATURE = "torch.ops.mkldnn._linear_pointwise", "choosing the fastest kernel while decoding"
_product = private_name(NAME, FEATURE)


def has_product() -> bool:
    """Return True if this version of torch has the matrix product; otherwise, warn once and return False."""
    return optional_name(NAME, FEATURE) is not None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [..., d_in] by weight [d_out, d_in] and add the bias, without a gradient."""
    return _product(x, weight, bias, "none", [], "")


def _scripted_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply `linear` in TorchScript, where an empty list has a type, here `Scalar?[]`."""
    none = torch.jit.annotate(list[number | None], [])
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", none, "")


scripted_linear = F.linear if isinstance(_product, MissingName) else _scripted_product
