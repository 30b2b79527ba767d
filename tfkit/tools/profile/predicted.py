"""The prediction of `tfkit cost` for a step, beside the measurement."""

from __future__ import annotations

from dataclasses import replace

import torch

from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.expand import Graph
from tfkit.tools.common.memory import free_memory
from tfkit.tools.common.units import bytes_text
from tfkit.tools.cost.count import UncountableError, cost
from tfkit.tools.cost.result import Amounts, ComponentCost, Cost, part_phases
from tfkit.tools.profile.result import ComponentTime, Limits, Profile
from tfkit.tools.profile.steps import Settings

UNPREDICTED = "no prediction: the model does not run on the meta device, where `tfkit cost` counts"


def predict(graph: Graph, settings: Settings, length: int) -> Cost | None:
    """The costs of one step; None if a component does not run without values, as a plugin's may not.

    Raises:
        SpecError: the model cannot run like this, or the device does not have enough memory for it.
    """
    try:
        predicted = cost(
            graph,
            batch=settings.batch,
            length=length,
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


def with_prediction(profile: Profile, predicted: Cost | None, limits: Limits) -> Profile:
    """The profile with the work of each component, and with the least time for it."""
    if predicted is None:
        return replace(profile, limits=limits, notes=(*profile.notes, UNPREDICTED))
    known: dict[str, tuple[ComponentCost, ...]] = {part.path: (part,) for part in predicted.parts}
    if profile.compiled:
        known = {"compiled": predicted.parts}
    parts = [_with_work(part, known[part.path], limits) if part.path in known else part for part in profile.parts]
    return replace(profile, parts=tuple(parts), limits=limits)


def _with_work(part: ComponentTime, works: tuple[ComponentCost, ...], limits: Limits) -> ComponentTime:
    return replace(
        part,
        flops=sum(work.visible for work in works),
        bytes=sum(work.traffic for work in works),
        floor=sum(_floor(work, limits) for work in works),
    )


def _floor(work: Amounts, limits: Limits) -> float:
    """The least seconds: the longer of computing and moving; hidden pairs of the mask need not be computed."""
    return sum(max(flops / limits.flops, moved / limits.bandwidth) for flops, moved in part_phases(work, visible=True))
