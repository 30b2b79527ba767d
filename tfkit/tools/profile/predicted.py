"""The prediction of `tfkit cost` for a step, beside the measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.expand import Graph
from tfkit.tools.common.memory import free_memory
from tfkit.tools.common.units import bytes_text
from tfkit.tools.cost.count import UncountableError, cost
from tfkit.tools.cost.result import Amounts, ComponentCost, Cost, part_phases
from tfkit.tools.profile.result import ComponentTime, Limits
from tfkit.tools.profile.steps import Settings

UNPREDICTED = "no prediction: the model does not run on the meta device, where `tfkit cost` counts"


def predict(graph: Graph, settings: Settings) -> Cost | None:
    """The costs of one step; None if a component does not run without values, as a plugin's may not.

    Raises:
        SpecError: the model cannot run like this, or the device does not have enough memory for it.
    """
    try:
        predicted = cost(
            graph,
            batch=settings.batch,
            length=settings.length,
            mode=settings.mode,
            dtype=settings.dtype,
            kernels="cpu" if settings.device.type == "cpu" else "cuda",
        )
    except UncountableError:
        return None
    _check_memory(graph.name, predicted, settings.device)
    return predicted


def _check_memory(name: str, predicted: Cost, device: torch.device) -> None:
    needed, free = predicted.memory.peak, free_memory(device)
    if free is None or needed <= free:
        return
    what = f"a step of `{name}` needs {bytes_text(needed)}, but {bytes_text(free)} is free"
    help = "a smaller `--batch` or `--length`; `tfkit cost` needs no memory"
    raise SpecError(Diagnostic(f"not enough memory on {device}: {what}", help=help))


def works_of(predicted: Cost | None, *, compiled: bool) -> dict[str, tuple[ComponentCost, ...]]:
    """The work by the path of its owner; a compiled model has one, for all of it."""
    if predicted is None:
        return {}
    return {"compiled": predicted.parts} if compiled else {part.path: (part,) for part in predicted.parts}


def with_work(part: ComponentTime, works: Sequence[ComponentCost], limits: Limits) -> ComponentTime:
    """An owner of time with its work, and with the least time for it."""
    if not works:
        return part
    return replace(
        part,
        flops=sum(work.visible for work in works),
        bytes=sum(work.traffic for work in works),
        floor=sum(_floor(work, limits) for work in works),
    )


def _floor(work: Amounts, limits: Limits) -> float:
    """The least seconds: the longer of computing and moving; hidden pairs of the mask need not be computed."""
    return sum(max(flops / limits.flops, moved / limits.bandwidth) for flops, moved in part_phases(work, visible=True))
