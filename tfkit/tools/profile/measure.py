"""Measure one model: steps without the profiler, with it, and with all of its details."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.profiler import ProfilerActivity, schedule
from torch.profiler import profile as torch_profile

from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.expand import Graph
from tfkit.tools.common.loading_weights import build_with_weights
from tfkit.tools.profile.assemble import Run, assemble_profile, predict
from tfkit.tools.profile.limits import synchronize
from tfkit.tools.profile.report.trace import write_trace
from tfkit.tools.profile.result import Limits, Profile
from tfkit.tools.profile.steps import Range, Settings, Step, named_parts, named_ranges, quick, shown
from tfkit.tools.profile.trace import parse_trace

OnStep: TypeAlias = Callable[[], Any]
DETAILS = {"record_shapes": True, "profile_memory": True, "with_stack": True}
DETAILED = 2
"""Steps with memory, shapes and stacks, which take longer and are not timed. The first does not see all memory."""


def count_steps(settings: Settings) -> int:
    """Count all steps that a model runs; the profiler warms up twice."""
    return settings.warmup + settings.steps + 1 + settings.steps + 1 + DETAILED


def measure(graph: Graph, settings: Settings, limits: Limits, trace: Path | None, on_step: OnStep) -> Profile:
    """Profile one model; `trace` is the file for a trace with stacks and shapes.

    Raises:
        SpecError: see `profile_models`; or a step fails, as a plugin's component may.
    """
    predicted = predict(graph, settings)
    try:
        options: dict[str, Any] = {"dtype": settings.dtype, "allow_change": settings.allow_change}
        model = build_with_weights(graph, settings.weights, device=settings.device, **options)
        model.train(settings.mode == "train")
        return assemble_profile(model, settings, _run(model, settings, trace, on_step), predicted, limits)
    except (SpecError, OSError):
        raise
    except Exception as error:
        memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        what = f"not enough memory on {settings.device}" if memory else f"a step of `{graph.name}` fails"
        cause = " ".join(str(error).split("\n")[0].split())
        raise SpecError(Diagnostic(f"{what}: {type(error).__name__}: {cause}")) from error


def _run(model: fx.GraphModule, settings: Settings, trace: Path | None, on_step: OnStep) -> Run:
    runner = _Runner(model, settings, on_step)
    for _ in range(settings.warmup):
        runner.plain()
    plain = [runner.plain() for _ in range(settings.steps)]
    timed = parse_trace(runner.traced(settings.steps, quick)["traceEvents"])
    detailed = runner.traced(DETAILED, shown, **DETAILS)
    run = Run(plain, runner.step.held(), timed, parse_trace(detailed["traceEvents"]))
    if trace is not None:
        write_trace(detailed, trace, named_parts(model))
    return run


class _Runner:
    """Runs steps one by one, and reports each."""

    def __init__(self, model: fx.GraphModule, settings: Settings, on_step: OnStep) -> None:
        self._model, self._settings, self._on_step = model, settings, on_step
        self.step = Step(model, settings.mode, batch=settings.batch, length=settings.length, compile=settings.compile)

    def plain(self) -> float:
        """Return the seconds of one step without the profiler."""
        synchronize(self._settings.device)
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
