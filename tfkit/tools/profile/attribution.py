"""Attribution of time and memory: every row of a trace is assigned to its owner, a component of the model.

In the forward pass, everything inside the range of a module belongs to that module. In the backward pass, a node
belongs to the module whose operator created it: both have the same sequence number. A gradient that is added to its
parameter belongs to the node that computed the gradient, and so does the work of autograd until the next node begins,
such as freeing memory. A kernel belongs to the code that launched it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias

from tfkit.tools.profile.profiled_step import BACKWARD, STEP, STEP_RANGES
from tfkit.tools.profile.torch_trace import Allocation, Event, HostSpan, Launch, ProfilerTrace, Stretch

Phase: TypeAlias = Literal["forward", "backward"]
NODE = "autograd::engine::evaluate_function: "
"""The prefix of the names of nodes that the backward runs."""
ACCUMULATE = "AccumulateGrad"
PYTHON = "Python"
"""The name of a module's work between its operators."""


class Owner(NamedTuple):
    """A path of the model, or a range of `OWN`; None if there is none."""

    path: str | None
    phase: Phase


class Located(NamedTuple):
    """A row of a trace, its owner, and its step, from 0."""

    row: Event
    owner: Owner
    step: int
    exclusive: list[Stretch]
    """The time of a span without the spans inside it."""


@dataclass
class Times:
    """Seconds and counts of all steps together."""

    exclusive: defaultdict[Owner, float] = field(default_factory=lambda: defaultdict(float))
    """Time of an owner; on an accelerator, the time of its kernels, and of the host while no kernel runs."""
    device: defaultdict[Owner, float] = field(default_factory=lambda: defaultdict(float))
    """The part of `exclusive` in which the owner's kernels run."""
    calls: Counter[str] = field(default_factory=Counter)
    """Number of times that the owner's range is entered in the forward pass."""
    kernels: defaultdict[tuple[str, Owner], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of each run of an operator or kernel."""
    idle: float = 0.0


def steps_of(trace: ProfilerTrace) -> list[Event]:
    """Return the range of each step."""
    return [row for row in trace.host if row.name == STEP]


def undisturbed_steps(steps: Sequence[Stretch]) -> list[int]:
    """Return the steps that took no longer than the median, because other processes disturbed the remaining steps."""
    middle = median(step.seconds for step in steps)
    return [index for index, step in enumerate(steps) if step.seconds <= middle]


def located_work(trace: ProfilerTrace, paths: Collection[str]) -> list[Located]:
    """Assign the host's work within the steps to its owners, in the order of time."""
    steps, names = steps_of(trace), {*paths, *STEP_RANGES}
    starts = [step.start for step in steps]
    threads: defaultdict[Any, _Thread] = defaultdict(_Thread)
    makers: dict[int | None, str | None] = {}  # of the nodes of the backward, by sequence number
    located = []
    for row in trace.host:
        step = bisect_right(starts, row.start) - 1
        if step < 0 or row.start > steps[step].end:
            continue
        thread = threads[row.thread]
        thread.advance(row.start)
        if isinstance(row, HostSpan):
            located.append(Located(row, _span_owner(row, thread, names, makers), step, []))
            thread.begin(located[-1])
        else:
            located.append(Located(row, thread.owner, step, []))
    for thread in threads.values():
        thread.advance(inf)
    return located


@dataclass
class _Thread:
    """State of a host thread at a moment of the trace."""

    running: list[Located] = field(default_factory=list)
    """The spans that have begun and not ended; the innermost is last."""
    ended: Located | None = None
    """The last span to end, if none has begun since then."""
    reached: float = 0.0
    """The moment up to which the time belongs to spans."""
    node: str | None = None
    """The owner of the last node."""

    @property
    def owner(self) -> Owner:
        """The owner of the innermost running span."""
        return self.running[-1].owner if self.running else Owner(None, "forward")

    @property
    def in_backward(self) -> bool:
        """True directly inside the backward, and not in one of its nodes."""
        return bool(self.running) and self.running[-1].row.name == BACKWARD

    def advance(self, time: float) -> None:
        """End the spans that end up to a moment."""
        while self.running and self.running[-1].row.end <= time:
            self.ended = self.running.pop()
            self._give(self.ended, self.ended.row.end)

    def begin(self, event: Located) -> None:
        """Begin a span. The time before a node of the backward pass belongs to the previous node."""
        between = event.row.name.startswith(NODE) and self.in_backward
        if self.running:
            self._give((between and self.ended) or self.running[-1], event.row.start)
        self.reached, self.ended = event.row.start, None
        self.running.append(event)

    def _give(self, event: Located, end: float) -> None:
        if end > self.reached:
            event.exclusive.append(Stretch(self.reached, end))
            self.reached = end


def _span_owner(span: HostSpan, thread: _Thread, names: Collection[str], makers: dict[int | None, str | None]) -> Owner:
    around = thread.owner
    if span.name.startswith(NODE):
        if not span.name.endswith(ACCUMULATE):
            thread.node = makers.get(span.sequence)
        return Owner(thread.node, "backward")
    if span.name == BACKWARD:
        return Owner(None, "backward")
    if thread.in_backward:
        return Owner("[loss]", "backward")  # the first gradient, that of the loss itself
    if span.name in names:
        return Owner(span.name, around.phase)
    if span.sequence is not None and around.phase == "forward":
        makers[span.sequence] = around.path  # the last one with a number has it
    return around


def host_times(located: Sequence[Located]) -> Times:
    """Compute the times of the owners on the CPU."""
    times = Times()
    for event in located:
        if not isinstance(event.row, HostSpan):
            continue
        seconds = sum(stretch.seconds for stretch in event.exclusive)
        times.exclusive[event.owner] += seconds
        is_range = event.row.name == event.owner.path
        if is_range and event.owner.phase == "forward":
            times.calls[event.row.name] += 1
        if event.owner.path is not None:
            name = PYTHON if is_range else event.row.name.removeprefix(NODE)
            times.kernels[name, event.owner].append(seconds)
    return times


def device_times(trace: ProfilerTrace, located: Sequence[Located]) -> Times:
    """Compute the times of the owners on an accelerator. Every moment of the steps belongs to one owner.

    While a kernel runs, the time belongs to the owner that launched it. While no kernel runs, the next kernel was
    launched too late: the time until the launch belongs to the host's work, and then to the owner of that kernel.
    """
    times = Times(calls=host_times(located).calls)
    launches = {event.row.correlation: event for event in located if isinstance(event.row, Launch)}
    work = [
        (stretch, event.owner) for event in located if event.owner.path is not None for stretch in event.exclusive
    ]  # no waiting threads
    work.sort(key=_work_start)
    steps = steps_of(trace)
    ends = [step.start for step in steps]  # of the last kernel in each step
    for kernel in trace.kernels:
        launch = launches.get(kernel.correlation)
        if launch is None:
            continue
        free, owner = ends[launch.step], launch.owner
        launched = max(free, min(launch.row.start, kernel.start))
        start, end = max(free, kernel.start), max(free, kernel.end)
        _divide_time(work, Stretch(free, launched), times.exclusive)
        times.exclusive[owner] += end - launched
        times.device[owner] += end - start
        times.kernels[kernel.name, owner].append(kernel.seconds)
        times.idle += start - free
        ends[launch.step] = end
    for step in {event.step for event in located}:
        rest = Stretch(ends[step], max(ends[step], steps[step].end))
        _divide_time(work, rest, times.exclusive)
        times.idle += rest.seconds
    return times


def _divide_time(work: Sequence[tuple[Stretch, Owner]], stretch: Stretch, times: defaultdict[Owner, float]) -> None:
    """Divide a stretch of time among the owners of the host's work in it."""
    first = max(0, bisect_right(work, stretch.start, key=_work_start) - 1)
    for busy, owner in work[first : bisect_left(work, stretch.end, key=_work_start)]:
        times[owner] += busy.overlap(stretch)


def _work_start(work: tuple[Stretch, Owner]) -> float:
    return work[0].start


@dataclass(frozen=True)
class Usage:
    """The memory of one step, in bytes; mappings are by path of the model."""

    peak: int
    owner: Owner
    """The owner that runs when memory is at its peak."""
    allocated: Counter[str | None]
    """All bytes that were allocated, even if they were soon freed."""
    at_peak: Counter[str | None]
    """Bytes that were allocated in this step and are in use at the peak."""
    highest: dict[str | None, int]
    """Peak of the bytes in use, by all owners, while an owner runs."""


def memory_of(located: Sequence[Located], step: int, at_start: int, *, on_device: bool) -> Usage:
    """Follow the memory of a step, on the device or on the CPU, from the bytes in use `at_start`.

    The step must not be the first: on the CPU, the profiler does not record that older memory is freed.
    """
    rows = [event for event in located if event.step == step and _is_memory_row(event, on_device)]
    total = peak = at_start
    peak_at, owner = -1, Owner(None, "forward")
    allocated: Counter[str | None] = Counter()
    highest: dict[str | None, int] = {}
    for index, event in enumerate(rows):
        size, running = event.row.size if isinstance(event.row, Allocation) else 0, event.owner
        total += size
        allocated[running.path] += max(0, size)
        highest[running.path] = max(total, highest.get(running.path, 0))
        if total > peak:
            peak, peak_at, owner = total, index, running
    return Usage(peak, owner, allocated, _live_bytes(rows[: peak_at + 1]), highest)


def _is_memory_row(event: Located, on_device: bool) -> bool:
    return isinstance(event.row, HostSpan) or (isinstance(event.row, Allocation) and event.row.on_device == on_device)


def _live_bytes(rows: Sequence[Located]) -> Counter[str | None]:
    """Sum the allocations in these rows that were not freed."""
    allocations: dict[int, tuple[str | None, int]] = {}
    for event in rows:
        row = event.row
        if not isinstance(row, Allocation):
            continue
        if row.size > 0:
            allocations[row.address] = (event.owner.path, row.size)
        else:
            allocations.pop(row.address, None)
    living: Counter[str | None] = Counter()
    for path, size in allocations.values():
        living[path] += size
    return living
