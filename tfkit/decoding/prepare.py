"""Weights laid out in memory as this machine reads them fastest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from tfkit.arguments import Positive, checked
from tfkit.model import BuiltModel
from tfkit.nn.kernels import Kernel, ask, large_weights, sample
from tfkit.wrapped import unwrapped

Layout = Literal["rows", "columns"]
"""Which numbers of a weight [d_out, d_in] lie together: those of one output, or those of one input."""
LAYOUTS: tuple[Layout, Layout] = ("rows", "columns")
GAIN = 1.03
"""How many times as fast another layout must be to be worth the change."""


@dataclass(frozen=True)
class Prepared:
    """How the weights of one shape are read."""

    shape: tuple[int, int]
    """[d_out, d_in]."""
    count: int
    """How many weights of the model have it."""
    layout: Layout
    kernel: Kernel
    """What multiplies them: torch's own kernel or oneDNN's."""
    speeds: dict[Layout, dict[Kernel, float]]
    """Bytes of weights that each way read in a second."""


@checked
@torch.no_grad()
def prepare_decoding(model: BuiltModel, batch: Positive = 1) -> list[Prepared]:
    """Lay the large weights of a model out as this machine reads them fastest when it decodes.

    Every way races on the model's own weights. What wins stays: where columns are read faster than rows, the weights
    are moved, one at a time. Their shapes, names and numbers stay what they were; their strides change, so that
    `Tensor.contiguous` is needed where a library asks for it. To decode other batches, prepare again.

    It takes about as long as thirty tokens, and touches float32 weights on the CPU alone.

    Args:
        model: what `tfkit.build` returned.
        batch: how many sequences will be decoded at once.

    Returns:
        What was measured and chosen for each shape of a large weight.

    Raises:
        ValueError: the model was not built by tfkit.
    """
    return [_prepared(group, batch) for group in large_weights(unwrapped(model))]


def _prepared(weights: list[nn.Parameter], batch: int) -> Prepared:
    """Race on the weights of one shape in both layouts, and leave them all in the faster one."""
    some = sample(weights)
    by_rows, by_columns = ask([[in_layout(weight, layout) for weight in some] for layout in LAYOUTS], batch)
    layout: Layout = "columns" if max(by_columns.values()) > GAIN * max(by_rows.values()) else "rows"
    speeds = by_rows if layout == "rows" else by_columns
    for weight in weights:
        weight.data = in_layout(weight.data, layout)
    d_out, d_in = weights[0].shape
    kernel = max(speeds, key=speeds.__getitem__)
    return Prepared((d_out, d_in), len(weights), layout, kernel, {"rows": by_rows, "columns": by_columns})


def in_layout(weight: Tensor, layout: Layout) -> Tensor:
    """The same numbers in a layout; the tensor itself where it has it."""
    return weight.contiguous() if layout == "rows" else weight.t().contiguous().t()
