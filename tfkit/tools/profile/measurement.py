"""Measurement of one model: steps without the profiler, with the profiler, and with all of its details."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.profiler import ProfilerActivity, schedule
from torch.profiler import profile as torch_profile

from tfkit.arguments import name_of
from tfkit.building.builder import graph_of
from tfkit.building.edits import MeasuredModel
from tfkit.errors import Diagnostic, SpecError
from tfkit.tools.common.loading_weights import build_with_weights
from tfkit.tools.common.memory_needs import check_free
from tfkit.tools.common.ownership import Ownership
from tfkit.tools.cost.cost import ComponentCost, Cost, UncountableError, cost, part_phases
from tfkit.tools.profile.attribution import (
    Owner,
    Times,
    Usage,
    device_times,
    host_times,
    located_work,
    memory_of,
    steps_of,
    undisturbed_steps,
)
from tfkit.tools.profile.limits import device_name, synchronize_device
from tfkit.tools.profile.profiled_step import (
    STEP_RANGES,
    ProfiledStep,
    Range,
    Settings,
    annotated_range,
    named_parts,
    named_ranges,
    quick_range,
)
from tfkit.tools.profile.result import ComponentTime, KernelTime, Limits, MemoryUse, Profile
from tfkit.tools.profile.torch_trace import ProfilerTrace, parse_trace, write_trace

OnStep: TypeAlias = Callable[[], Any]
DETAILS = {"record_shapes": True, "profile_memory": True, "with_stack": True}
DETAILED = 2
"""Number of untimed steps with memory, shapes and stacks. The trace of the first step lacks some memory."""


def count_steps(settings: Settings) -> int:
    """Count all steps that a model runs; the profiler warms up twice."""
    return settings.warmup + settings.steps + 1 + settings.steps + 1 + DETAILED


def measure_model(
    model: MeasuredModel, settings: Settings, limits: Limits, trace: Path | None, on_step: OnStep
) -> Profile:
    """Profile one model; `trace` is the file for a trace with stacks and shapes.

    Raises:
        SpecError: see `profile_models`; or a step fails, as a plugin's component may.
    """
    predicted = predict_cost(model, settings)
    try:
        options: dict[str, Any] = {"dtype": settings.dtype, "allow_change": settings.allow_change}
        built = build_with_weights(model, settings.weights, device=settings.device, **options)
        built.train(settings.mode == "train")
        profile = assemble_profile(built, settings, _run_steps(built, settings, trace, on_step), predicted, limits)
        changes = [f"changed: {text}" for text in model.edits]
        return replace(profile, notes=(*profile.notes, *changes)) if changes else profile
    except (SpecError, OSError):
        raise
    except Exception as error:
        memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        message = f"not enough memory on {settings.device}" if memory else f"a step of `{model.graph.name}` fails"
        cause = " ".join(str(error).split("\n")[0].split())
        raise SpecError(Diagnostic(f"{message}: {type(error).__name__}: {cause}")) from error


def _run_steps(model: fx.GraphModule, settings: Settings, trace: Path | None, on_step: OnStep) -> Measurements:
    runner = _Runner(model, settings, on_step)
    for _ in range(settings.warmup):
        runner.plain()
    plain = [runner.plain() for _ in range(settings.steps)]
    timed = parse_trace(runner.traced(settings.steps, quick_range)["traceEvents"])
    detailed = runner.traced(DETAILED, annotated_range, **DETAILS)
    run = Measurements(plain, runner.step.held(), timed, parse_trace(detailed["traceEvents"]))
    if trace is not None:
        write_trace(detailed, trace, named_parts(model))
    return run


class _Runner:
    """Runs steps one by one, and reports each."""

    def __init__(self, model: fx.GraphModule, settings: Settings, on_step: OnStep) -> None:
        self._model, self._settings, self._on_step = model, settings, on_step
        self.step = ProfiledStep(
            model, settings.mode, batch=settings.batch, length=settings.length, compile=settings.compile
        )

    def plain(self) -> float:
        """Return the seconds of one step without the profiler."""
        synchronize_device(self._settings.device)
        start = time.perf_counter()
        self.step(lambda name: nullcontext())
        seconds = time.perf_counter() - start
        self._on_step()
        return seconds

    def traced(self, steps: int, range_: Range, **options: Any) -> dict[str, Any]:
        """Trace a number of steps, after one step that warms up the profiler.

        A compiled model has no ranges around its components: their hooks would split the compiled code.
        """
        ranges = nullcontext() if self._settings.compile else named_ranges(self._model, range_)
        on_cuda = self._settings.device.type == "cuda"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            tracing = torch_profile(
                activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_cuda],
                schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
                on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
                **options,
            )
            with ranges, tracing as profiler:
                for _ in range(steps + 1):
                    self.step(range_)
                    profiler.step()
                    self._on_step()
            trace: dict[str, Any] = json.loads(path.read_bytes())
            return trace


UNPREDICTED = "no prediction: the model does not run on the meta device, where `tfkit cost` counts"


def predict_cost(model: MeasuredModel, settings: Settings) -> Cost | None:
    """Predict the costs of one step; None if a component, such as a plugin's, does not run without values.

    Raises:
        SpecError: the model cannot run like this, or the device does not have enough memory for it.
    """
    try:
        predicted = cost(
            model,
            batch=settings.batch,
            length=settings.length,
            mode=settings.mode,
            dtype=settings.dtype,
            kernels="cpu" if settings.device.type == "cpu" else "cuda",
        )
    except UncountableError:
        return None
    help = "a smaller `--batch` or `--length`; `tfkit cost` needs no memory"
    check_free(predicted.memory.peak, settings.device, f"a step of `{model.graph.name}`", help)
    return predicted


def works_of(predicted: Cost | None, *, compiled: bool) -> dict[str, tuple[ComponentCost, ...]]:
    """Return the work by the path of the owner; a compiled model is a single owner."""
    if predicted is None:
        return {}
    return {"[compiled]": predicted.parts} if compiled else {part.path: (part,) for part in predicted.parts}


def with_work(part: ComponentTime, works: Sequence[ComponentCost], limits: Limits) -> ComponentTime:
    """Add to an owner its work, and its minimum time: the larger of the times for FLOPs and for bytes.

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


MAX_KERNELS = 50
ALL_COMPILED = "compiled entirely: its kernels cross components, and their time is one row"


@dataclass(frozen=True)
class Measurements:
    """The measurements of a run."""

    plain_steps: Sequence[float]
    """Seconds without the profiler."""
    held: MemoryUse
    """Memory in use between two steps."""
    timed: ProfilerTrace
    detailed: ProfilerTrace
    """The trace with memory, of which the last step counts."""


def assemble_profile(
    model: fx.GraphModule, settings: Settings, run: Measurements, predicted: Cost | None, limits: Limits
) -> Profile:
    """Attribute the time and memory of a run to components, and add the predicted costs."""
    named = {} if settings.compile else named_parts(model)
    all_steps = steps_of(run.timed)
    chosen = undisturbed_steps(all_steps)
    located = [event for event in located_work(run.timed, named) if event.step in chosen]
    on_device = settings.device.type != "cpu"
    times = device_times(run.timed, located) if on_device else host_times(located)
    last = len(steps_of(run.detailed)) - 1
    usage = memory_of(located_work(run.detailed, named), last, run.held.at_start, on_device=on_device)
    ran = times.calls.keys() | {owner.path for owner, seconds in times.exclusive.items() if seconds > 0}
    owners = {path: part for path, part in (named | STEP_RANGES).items() if path in ran}
    works = works_of(predicted, compiled=settings.compile)
    parts = tuple(
        with_work(_component_time(path, part, times, usage, len(chosen)), works.get(path, ()), limits)
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
        kernels=_kernel_times(times, owners, len(chosen)),
        unattributed=fmean(steps) - sum(part.time for part in parts),
        idle=times.idle / len(chosen),
        memory=replace(run.held, peak=usage.peak, part=_path_text(usage.owner.path or ""), phase=usage.owner.phase),
        limits=limits,
        notes=(*[ALL_COMPILED] * settings.compile, *[UNPREDICTED] * (predicted is None)),
    )


def _path_text(path: str) -> str:
    return path.strip("[]")


def _component_time(path: str, part: Ownership, times: Times, usage: Usage, n_steps: int) -> ComponentTime:
    forward, backward = Owner(path, "forward"), Owner(path, "backward")
    return ComponentTime(
        path=_path_text(path),
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


def _kernel_times(times: Times, owners: Mapping[str, Ownership], n_steps: int) -> tuple[KernelTime, ...]:
    """Return the longest operators or kernels, summed over all modules of a component."""
    groups: dict[tuple[str, str, str, str], list[float]] = {}
    for (name, owner), runs in times.kernels.items():
        if owner.path is None:
            continue
        part = owners[owner.path]
        groups.setdefault((name, part.component, part.label, owner.phase), []).extend(runs)
    rows = [KernelTime(*key, calls=len(runs) / n_steps, time=sum(runs) / n_steps) for key, runs in groups.items()]
    return tuple(sorted(rows, key=lambda row: row.time, reverse=True)[:MAX_KERNELS])
