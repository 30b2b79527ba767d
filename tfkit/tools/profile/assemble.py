"""A `Profile` from the rows of a trace, with the costs that `tfkit cost` predicts for a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from torch import fx

from tfkit.building.builder import graph_of
from tfkit.building.placement import name_of
from tfkit.graph.expand import Graph
from tfkit.tools.common.memory_needs import check_free
from tfkit.tools.common.ownership import Ownership
from tfkit.tools.cost.cost import ComponentCost, Cost, UncountableError, cost, part_phases
from tfkit.tools.profile.attribution import (
    Owner,
    Times,
    Usage,
    device_times,
    host_times,
    locate,
    memory_of,
    steps_of,
    undisturbed,
)
from tfkit.tools.profile.limits import device_name
from tfkit.tools.profile.result import ComponentTime, KernelTime, Limits, Memory, Profile
from tfkit.tools.profile.steps import OWN, Settings, named_parts
from tfkit.tools.profile.trace import Trace

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


MOST_KERNELS = 50
ALL_COMPILED = "compiled as a whole: its kernels cross components, and their time is one row"


@dataclass(frozen=True)
class Run:
    """The measurements of a run."""

    plain_steps: Sequence[float]
    """Seconds without the profiler."""
    held: Memory
    """Between two steps."""
    timed: Trace
    detailed: Trace
    """The trace with memory, of which the last step counts."""


def assemble_profile(
    model: fx.GraphModule, settings: Settings, run: Run, predicted: Cost | None, limits: Limits
) -> Profile:
    """Attribute the time and memory of a run to components, and add the predicted costs."""
    named = {} if settings.compile else named_parts(model)
    all_steps = steps_of(run.timed)
    chosen = undisturbed(all_steps)
    located = [event for event in locate(run.timed, named) if event.step in chosen]
    on_device = settings.device.type != "cpu"
    times = device_times(run.timed, located) if on_device else host_times(located)
    last = len(steps_of(run.detailed)) - 1
    usage = memory_of(locate(run.detailed, named), last, run.held.at_start, on_device=on_device)
    ran = times.calls.keys() | {owner.path for owner, seconds in times.exclusive.items() if seconds > 0}
    owners = {path: part for path, part in (named | OWN).items() if path in ran}
    works = works_of(predicted, compiled=settings.compile)
    parts = tuple(
        with_work(_part(path, part, times, usage, len(chosen)), works.get(path, ()), limits)
        for path, part in owners.items()
    )
    steps = tuple(all_steps[index].seconds for index in chosen)
    return Profile(
        name=graph_of(model).name,
        device=str(settings.device),
        device_name=device_name(settings.device),
        mode=settings.mode,
        dtype=name_of(settings.dtype),
        batch=settings.batch,
        length=settings.length,
        compiled=settings.compile,
        parameters=sum(event.numel() for event in model.parameters()),
        steps=steps,
        plain_steps=tuple(run.plain_steps),
        parts=parts,
        kernels=_kernels(times, owners, len(chosen)),
        unattributed=fmean(steps) - sum(part.time for part in parts),
        idle=times.idle / len(chosen),
        memory=replace(run.held, peak=usage.peak, part=_shown(usage.owner.path or ""), phase=usage.owner.phase),
        limits=limits,
        notes=(*[ALL_COMPILED] * settings.compile, *[UNPREDICTED] * (predicted is None)),
    )


def _shown(path: str) -> str:
    return path.strip("[]")


def _part(path: str, part: Ownership, times: Times, usage: Usage, n_steps: int) -> ComponentTime:
    forward, backward = Owner(path, "forward"), Owner(path, "backward")
    return ComponentTime(
        path=_shown(path),
        component=part.component,
        label=part.label,
        node=part.node,
        layer=part.layer,
        calls=round(times.calls[path] / n_steps),
        forward=times.exclusive[forward] / n_steps,
        backward=times.exclusive[backward] / n_steps,
        device=(times.device[forward] + times.device[backward]) / n_steps,
        allocated=usage.allocated[path],
        at_peak=usage.at_peak[path],
        highest=usage.highest.get(path, 0),
    )


def _kernels(times: Times, owners: Mapping[str, Ownership], n_steps: int) -> tuple[KernelTime, ...]:
    """Return the longest operators or kernels, summed over all modules of a component."""
    groups: dict[tuple[str, str, str, str], list[float]] = {}
    for (name, owner), runs in times.kernels.items():
        if owner.path is None:
            continue
        part = owners[owner.path]
        groups.setdefault((name, part.component, part.label, owner.phase), []).extend(runs)
    rows = [KernelTime(*key, calls=len(runs) / n_steps, time=sum(runs) / n_steps) for key, runs in groups.items()]
    return tuple(sorted(rows, key=lambda row: row.time, reverse=True)[:MOST_KERNELS])
