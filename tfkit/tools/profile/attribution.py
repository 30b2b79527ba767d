"""The owner of each stretch of time: every row of a trace assigned to a place in the model.

In the forward, everything inside the range of a module belongs to it. In the backward, a node belongs to the module
whose operator made it: both have the same sequence number. A gradient that is added to its parameter belongs to the
node that computed it, and so does the work of autograd until the next node begins, such as freeing memory. A kernel
belongs to the code that launched it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias

from tfkit.tools.profile.ranges import BACKWARD, OWN, STEP
from tfkit.tools.profile.trace import Allocation, Launch, Span, Trace

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

    row: Span | Launch | Allocation
    owner: Owner
    step: int


class _Open(NamedTuple):
    span: Span
    owner: Owner
    in_node: bool
    """True if the backward runs it."""


@dataclass
class Times:
    """Seconds and counts of all steps together."""

    own: defaultdict[Owner, float] = field(default_factory=lambda: defaultdict(float))
    """The time of an owner; on an accelerator that of its kernels, and of the host while none runs."""
    device: defaultdict[Owner, float] = field(default_factory=lambda: defaultdict(float))
    """Of this, its kernels."""
    calls: Counter[str] = field(default_factory=Counter)
    """The number of times that its range is entered in the forward."""
    kernels: defaultdict[tuple[str, Owner], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of each run of an operator or kernel."""
    idle: float = 0.0


def steps_of(trace: Trace) -> list[tuple[float, float]]:
    """Begin and end of each step."""
    return sorted((span.start, span.end) for span in trace.spans if span.name == STEP)


def locate(trace: Trace, paths: Collection[str]) -> list[Located]:
    """Assign the host's work within the steps to its owners, in the order of time; fills `Span.inner`."""
    return list(_Walk(steps_of(trace), {*paths, *OWN}).run(trace))


class _Walk:
    """Follows all threads through time, and knows the open rows of each."""

    def __init__(self, steps: Sequence[tuple[float, float]], names: Collection[str]) -> None:
        self._steps = steps
        self._starts = [start for start, _ in steps]
        self._names = names
        self._open: defaultdict[Any, list[_Open]] = defaultdict(list)
        self._makers: dict[int, str | None] = {}  # of the nodes of the backward, by sequence number
        self._latest: dict[Any, str | None] = {}  # the owner of the last node in a thread
        self._ended: dict[Any, Span | None] = {}  # the last row to end in a thread, if nothing began since then

    def run(self, trace: Trace) -> Any:
        for row in trace.on_host():
            time = row.start if isinstance(row, Span) else row.time
            step = bisect_right(self._starts, time) - 1
            if step < 0 or time > self._steps[step][1]:
                continue
            stack = self._open[row.thread]
            while stack and stack[-1].span.end <= time:
                self._ended[row.thread] = stack.pop().span
            if isinstance(row, Span):
                opened = self._enter(row, stack)
                stack.append(opened)
                self._ended[row.thread] = None
                yield Located(row, opened.owner, step)
            else:
                yield Located(row, stack[-1].owner if stack else Owner(None, "forward"), step)

    def _enter(self, span: Span, stack: Sequence[_Open]) -> _Open:
        around = stack[-1] if stack else _Open(span, Owner(None, "forward"), False)
        if stack:
            around.span.inner += min(span.end, around.span.end) - span.start
        if span.name.startswith(NODE):
            self._close_gap(span, around.span)
            return _Open(span, Owner(self._maker(span), "backward"), True)
        if span.name == BACKWARD:
            return _Open(span, Owner(None, "backward"), False)
        if around.span.name == BACKWARD:
            return _Open(span, Owner("[loss]", "backward"), False)  # the first gradient, that of the loss itself
        if span.name in self._names:
            return _Open(span, Owner(span.name, around.owner.phase), around.in_node)
        if span.sequence is not None and not around.in_node:
            self._makers[span.sequence] = around.owner.path  # the last one with a number has it
        return _Open(span, around.owner, around.in_node)

    def _close_gap(self, node: Span, around: Span) -> None:
        """Let the previous node last until this one begins, if both run in the same backward."""
        before = self._ended.get(node.thread)
        if before is None or around.name != BACKWARD or before.start < around.start:
            return
        gap = node.start - before.end
        before.end += gap
        around.inner += gap

    def _maker(self, node: Span) -> str | None:
        if not node.name.endswith(ACCUMULATE):
            self._latest[node.thread] = self._makers.get(-1 if node.sequence is None else node.sequence)
        return self._latest.get(node.thread)


def undisturbed(steps: Sequence[tuple[float, float]]) -> list[int]:
    """The steps that took no longer than the median: the others were disturbed."""
    seconds = [end - start for start, end in steps]
    return [index for index, one in enumerate(seconds) if one <= median(seconds)]


def host_times(located: Sequence[Located], paths: Collection[str]) -> Times:
    """The times of the owners on the CPU."""
    times = Times()
    for row, owner, _ in located:
        if not isinstance(row, Span):
            continue
        times.own[owner] += row.own
        is_range = row.name in paths or row.name in OWN
        if is_range and owner.phase == "forward" and row.name == owner.path:
            times.calls[row.name] += 1
        name = PYTHON if is_range else row.name.removeprefix(NODE)
        if owner.path is not None:
            times.kernels[name, owner].append(row.own)
    return times


def device_times(trace: Trace, located: Sequence[Located], paths: Collection[str]) -> Times:
    """The times of the owners on an accelerator: every moment of the steps of `located` belongs to one of them.

    While a kernel runs, the owner is the one that launched it. While none runs, the next one was launched too late: the
    time belongs to the host's work until the launch, and from then on to the owner of that kernel.
    """
    times = Times(calls=host_times(located, paths).calls)
    launches = {one.row.correlation: one for one in located if isinstance(one.row, Launch)}
    host = _Host(located)
    ends = [start for start, _ in steps_of(trace)]  # of the last kernel in each step
    for kernel in trace.kernels:
        launch = launches.get(kernel.correlation)
        if launch is None:
            continue
        assert isinstance(launch.row, Launch)
        free, owner = ends[launch.step], launch.owner
        waited = max(0.0, kernel.start - free)
        times.idle += waited
        before = max(0.0, min(launch.row.time, kernel.start) - free)
        host.share(free, free + before, times.own)
        busy = max(0.0, kernel.end - max(kernel.start, free))
        times.own[owner] += busy + waited - before
        times.device[owner] += busy
        times.kernels[kernel.name, owner].append(kernel.end - kernel.start)
        ends[launch.step] = max(free, kernel.end)
    for step in {one.step for one in located}:
        end = steps_of(trace)[step][1]
        times.idle += max(0.0, end - ends[step])
        host.share(ends[step], end, times.own)
    return times


class _Host:
    """The owner of the host's time at any moment."""

    def __init__(self, located: Sequence[Located]) -> None:
        self._pieces = sorted(_own_pieces(located))
        self._starts = [start for start, _, _ in self._pieces]

    def share(self, start: float, end: float, times: defaultdict[Owner, float]) -> None:
        """Divide the time between two moments among its owners."""
        index = max(0, bisect_right(self._starts, start) - 1)
        while index < len(self._pieces) and self._starts[index] < end:
            first, last, owner = self._pieces[index]
            times[owner] += max(0.0, min(last, end) - max(first, start))
            index += 1


def _own_pieces(located: Sequence[Located]) -> list[tuple[float, float, Owner]]:
    """The time of each owner without rows inside it, in intervals; waiting threads are left out."""
    pieces: list[tuple[float, float, Owner]] = []
    stacks: defaultdict[Any, list[tuple[Span, Owner]]] = defaultdict(list)
    reached: dict[Any, float] = {}

    def close(thread: Any, time: float) -> None:
        stack, start = stacks[thread], reached.get(thread, time)
        if stack and time > start and stack[-1][1].path is not None:
            pieces.append((start, time, stack[-1][1]))
        reached[thread] = time

    def advance(thread: Any, time: float) -> None:
        stack = stacks[thread]
        while stack and stack[-1][0].end <= time:
            close(thread, stack[-1][0].end)
            stack.pop()
        close(thread, time)

    for row, owner, _ in located:
        if isinstance(row, Span):
            advance(row.thread, row.start)
            stacks[row.thread].append((row, owner))
    for thread in list(stacks):
        advance(thread, inf)
    return pieces
