"""Choosing the memory layout of weights that is fastest on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from tfkit.arguments import Positive, checked
from tfkit.building.model import BuiltModel, unwrapped_model
from tfkit.nn.kernels import Kernel, ask, large_weights, sample

Layout = Literal["rows", "columns"]
"""Values of a weight [d_out, d_in] that are contiguous: the row of an output, or the column of an input."""
LAYOUTS: tuple[Layout, Layout] = ("rows", "columns")
GAIN = 1.03
"""Minimum speedup that justifies a change of layout."""


@dataclass(frozen=True)
class Prepared:
    """Layout and kernel for the weights of one shape."""

    shape: tuple[int, int]
    """[d_out, d_in]."""
    count: int
    """Number of weights of the model that have this shape."""
    layout: Layout
    kernel: Kernel
    """Kernel that multiplies them: torch's or oneDNN's."""
    speeds: dict[Layout, dict[Kernel, float]]
    """Speed of each layout and kernel, in bytes of weights per second."""


@checked
@torch.no_grad()
def prepare_decoding(model: BuiltModel, batch: Positive = 1) -> list[Prepared]:
    """Give the large weights of a model the memory layout that this machine reads fastest when it decodes.

    All ways race on the model's own weights, and the fastest stays: where columns are read faster than rows, the
    weights are moved, one at a time. Their shapes, names and numbers do not change; their strides do, so that
    `Tensor.contiguous` is needed if a library asks for it. To decode another batch size, prepare again.

    It takes about as long as thirty tokens, and changes only float32 weights on the CPU.

    Args:
        model: the result of `tfkit.build`.
        batch: number of sequences that will be decoded at once.

    Returns:
        The measurements and the choice for each shape of a large weight.

    Raises:
        ValueError: the model was not built by tfkit.
    """
    return [_prepare_weights(group, batch) for group in large_weights(unwrapped_model(model))]


def _prepare_weights(weights: list[nn.Parameter], batch: int) -> Prepared:
    """Measure both layouts on the weights of a shape, and convert the weights to the faster layout."""
    samples = sample(weights)
    by_rows, by_columns = ask([[in_layout(weight, layout) for weight in samples] for layout in LAYOUTS], batch)
    layout: Layout = "columns" if max(by_columns.values()) > GAIN * max(by_rows.values()) else "rows"
    speeds = by_rows if layout == "rows" else by_columns
    for weight in weights:
        weight.data = in_layout(weight.data, layout)
    d_out, d_in = weights[0].shape
    kernel = max(speeds, key=speeds.__getitem__)
    return Prepared((d_out, d_in), len(weights), layout, kernel, {"rows": by_rows, "columns": by_columns})


def in_layout(weight: Tensor, layout: Layout) -> Tensor:
    """Return a weight in a memory layout, without a copy if it has this layout."""
    return weight.contiguous() if layout == "rows" else weight.t().contiguous().t()
