"""The prediction of `tfkit cost` for a step, to compare with the measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tfkit.graph.expand import Graph
from tfkit.tools.common.memory import check_free
from tfkit.tools.cost.count import UncountableError, cost
from tfkit.tools.cost.result import ComponentCost, Cost, part_phases
from tfkit.tools.profile.result import ComponentTime, Limits
from tfkit.tools.profile.steps import Settings

UNPREDICTED = "no prediction: the model does not run on the meta device, where `tfkit cost` counts"


def predict(graph: Graph, settings: Settings) -> Cost | None:
    """Predict the costs of one step; None if a component, such as a plugin's, does not run without values.

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
    help = "a smaller `--batch` or `--length`; `tfkit cost` needs no memory"
    check_free(predicted.memory.peak, settings.device, f"a step of `{graph.name}`", help)
    return predicted


def works_of(predicted: Cost | None, *, compiled: bool) -> dict[str, tuple[ComponentCost, ...]]:
    """Return the work by the path of its owner; a compiled model is a single owner."""
    if predicted is None:
        return {}
    return {"[compiled]": predicted.parts} if compiled else {part.path: (part,) for part in predicted.parts}


def with_work(part: ComponentTime, works: Sequence[ComponentCost], limits: Limits) -> ComponentTime:
    """Add to an owner its work, and the least time for it: the longer of computing and moving.

    Hidden pairs of the mask need not be computed.
    """
    if not works:
        return part
    phases = [phase for work in works for phase in part_phases(work, visible=True)]
    return replace(
        part,
        flops=sum(flops for flops, _ in phases),
        bytes=sum(moved for _, moved in phases),
        floor=sum(max(flops / limits.flops, moved / limits.bandwidth) for flops, moved in phases),
    )
