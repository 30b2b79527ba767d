"""Checks that weights are finite, both as stored in a file and after conversion to the model's dtype."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tfkit.building.placement import name_of
from tfkit.errors import Diagnostic, SpecError, listing, quoted
from tfkit.spec.header import shown

CHUNK = 2**20
"""The number of values checked together if torch has no kernel that works without a copy."""
BROKEN = "values that are infinite or NaN"
MOST = 4
"""The maximum number of listed names."""


def is_finite(tensor: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return True if all values are finite, also after conversion to `dtype`. No copy is made."""
    values = _values(tensor)
    if not values.numel() or not values.is_floating_point():
        return True
    if values.itemsize == 1:
        return all(bool(chunk.float().isfinite().all()) for chunk in values.flatten().split(CHUNK))
    return all(bool(bound.to(dtype or bound.dtype).isfinite()) for bound in values.aminmax())


def check_finite(name: str, tensor: Tensor, file: Path, dtype: torch.dtype | None = None) -> None:
    """Raise SpecError, with the index, if a value of a file is infinite or NaN, or beyond `dtype`, the model's type."""
    if is_finite(tensor, dtype):
        return
    values = _values(tensor)
    kind, what, help = values.dtype, BROKEN, None
    if dtype is not None and is_finite(values):
        kind, what = dtype, f"values beyond {name_of(dtype)}"
        help = f"use {name_of(values.dtype)}, the type of the file"
    bad, first = _count(values, kind)
    place = [int(index) for index in np.unravel_index(first, values.shape)][: tensor.dim()]
    message = f"tensor {quoted(name)} of {shown(file)} has {what}"
    note = f"{bad:,} in total; the first is {values.flatten()[first].item()} at {place}"
    raise SpecError(Diagnostic(message, notes=(note,), help=help))


def not_finite(state: Mapping[str, Tensor]) -> str | None:
    """Describe which tensors of a model have values that are infinite or NaN. Return None if all are finite."""
    names = [quoted(name) for name, tensor in state.items() if not is_finite(tensor)]
    return f"in {listing(names, MOST)}" if names else None


def _values(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _count(values: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Return the number of values that are not finite as a type, and the index of the first."""
    bad, first = 0, 0
    for index, chunk in enumerate(values.flatten().split(CHUNK)):
        broken = ~chunk.to(dtype).double().isfinite()
        if not bad and broken.any():
            first = index * CHUNK + int(broken.int().argmax())
        bad += int(broken.sum())
    return bad, first
