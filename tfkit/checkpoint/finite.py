"""Values that are infinite or NaN: no weights, in a file and as the type of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tfkit.errors import Diagnostic, SpecError, listing, quoted
from tfkit.placement import name_of
from tfkit.spec.header import shown

CHUNK = 2**20
"""The number of values checked together, if torch has no kernel that works without a copy."""
BROKEN = "values that are infinite or NaN"
MOST = 4
"""The most names that are listed."""


def is_finite(tensor: Tensor, dtype: torch.dtype | None = None) -> bool:
    """True if all values are finite, also as another type. No copy is made: memory stays as it is."""
    values = _values(tensor)
    if not values.numel() or not values.is_floating_point():
        return True
    if values.itemsize == 1:
        return all(bool(chunk.float().isfinite().all()) for chunk in values.flatten().split(CHUNK))
    return all(bool(bound.to(dtype or bound.dtype).isfinite()) for bound in values.aminmax())


def check_finite(name: str, tensor: Tensor, file: Path, dtype: torch.dtype | None = None) -> None:
    """Raise SpecError, with the place, if a value of a file is infinite or NaN, or beyond `dtype`, the model's type."""
    if is_finite(tensor, dtype):
        return
    values = _values(tensor)
    kind, what, help = values.dtype, BROKEN, None
    if dtype is not None and is_finite(values):
        kind, what = dtype, f"values beyond {name_of(dtype)}"
        help = f"{name_of(values.dtype)}, the type of the file, holds them"
    bad, first = _count(values, kind)
    place = [int(one) for one in np.unravel_index(first, values.shape)][: tensor.dim()]
    message = f"tensor {quoted(name)} of {shown(file)} has {what}"
    note = f"{bad:,} in all; the first is {values.flatten()[first].item()} at {place}"
    raise SpecError(Diagnostic(message, notes=(note,), help=help))


def not_finite(state: Mapping[str, Tensor]) -> str | None:
    """The names of a model's tensors with values that are infinite or NaN, as a note; None if there are none."""
    names = [quoted(name) for name, tensor in state.items() if not is_finite(tensor)]
    return f"in {listing(names, MOST)}" if names else None


def _values(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _count(values: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """The number of values that are not finite as a type, and the index of the first."""
    bad, first = 0, 0
    for index, chunk in enumerate(values.flatten().split(CHUNK)):
        wrong = ~chunk.to(dtype).double().isfinite()
        if not bad and wrong.any():
            first = index * CHUNK + int(wrong.int().argmax())
        bad += int(wrong.sum())
    return bad, first
