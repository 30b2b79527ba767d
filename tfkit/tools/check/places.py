"""Two runs of a model, compared, and the component at which they begin to differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from tfkit.builder import evaluating
from tfkit.tools.check.measure import TOLERANCE, Measured, distance, unequal
from tfkit.tools.compare.comparison import Outputs, outputs

Pair = tuple[Tensor, Tensor]
Align = Callable[[Tensor, Tensor], Pair | None]
"""The parts of two outputs of one module that should be equal; None if they cannot be compared."""


def first_difference(
    model: fx.GraphModule,
    first_run: Callable[[], Any],
    second_run: Callable[[], Any],
    align: Align = lambda a, b: (a, b),
    *,
    second: fx.GraphModule | None = None,
    limit: float = TOLERANCE,
) -> str:
    """Return the path of the first component whose outputs differ by more than the limit; empty if none does.

    Args:
        model: the model that both runs call.
        first_run: a run.
        second_run: a second run.
        align: the parts of both outputs that should be equal.
        second: the model that the second run calls; None if it is the model of the first run.
        limit: the largest difference.
    """
    ours, theirs = outputs_of(model, first_run), outputs_of(second or model, second_run)
    for path, output in ours.items():
        pair = align(output, theirs[path]) if path in theirs else None
        if pair is not None and pair[0].shape == pair[1].shape and not distance(*pair) <= limit:
            return path
    return ""


def compared(
    model: fx.GraphModule,
    first_run: Callable[[], list[Tensor]],
    second_run: Callable[[], list[Tensor]],
    detail: str,
    align: Align = lambda a, b: (a, b),
    *,
    second: fx.GraphModule | None = None,
    limit: float = TOLERANCE,
) -> Iterator[Measured]:
    """Compare the outputs of two runs, bit by bit if the limit is 0; `{}` in the detail is the size of a difference.

    The other arguments are passed to `first_difference`, which finds the component.
    """
    where = partial(first_difference, model, first_run, second_run, align, second=second, limit=limit)
    for pair in map(align, first_run(), second_run()):
        if pair is not None:
            expected, changed = pair
            error = distance(changed, expected) if limit else unequal(changed, expected)
            yield Measured(error, detail.format(f"{error:.1e}"), limit, where)


def outputs_of(model: fx.GraphModule, run: Callable[[], Any], names: Iterable[str] | None = None) -> Outputs:
    """Return the outputs of the named modules, or of all components, in eval mode, the innermost first."""
    with evaluating(model), torch.no_grad():
        return outputs(model, model.meta["components"] if names is None else names, run, "the model")[0]


def along(columns: slice) -> Align:
    """Select positions of [b, t, ...]."""
    return lambda a, b: (a[:, columns], b[:, columns]) if a.dim() > 2 and a.shape == b.shape else None


def of_row(row: int, side: str) -> Align:
    """Align the output of a row alone with the tokens of the row in an output padded at `side`."""

    def align(alone: Tensor, padded: Tensor) -> Pair | None:
        if padded.dim() < 2 or alone.dim() != padded.dim() or alone.size(0) != 1:
            return None
        if padded.dim() == 2 and alone.size(1) == padded.size(1):  # a vector, or a row without padding
            return alone[0], padded[row]
        extra = padded.size(1) - alone.size(1)
        return alone[0], padded[row, : alone.size(1)] if side == "right" else padded[row, extra:]

    return align
