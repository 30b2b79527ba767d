"""The rows of a PyTorch profiler trace: the time of each event, its thread, and the event around it.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ON_HOST = ("cpu_op", "user_annotation")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
MICROSECOND = 1e-6


@dataclass
class Span:
    """An event on the host, by thread and time in seconds."""

    name: str
    start: float
    end: float
    thread: Any
    sequence: int | None
    """The sequence number of the backward's node that an operator makes, or that runs."""
    inner: float = 0.0
    """Time of events inside it."""

    @property
    def own(self) -> float:
        """Time without events inside it."""
        return self.end - self.start - self.inner


@dataclass(frozen=True)
class Launch:
    """A call that starts a kernel."""

    time: float
    thread: Any
    correlation: int


@dataclass(frozen=True)
class Kernel:
    """A kernel, or a copy, on an accelerator."""

    name: str
    start: float
    end: float
    correlation: int


@dataclass(frozen=True)
class Allocation:
    """Memory that was allocated, or freed, with a negative `size`."""

    time: float
    thread: Any
    address: int
    size: int
    on_device: bool


@dataclass
class Trace:
    """The rows of a trace, each kind in the order of time."""

    spans: list[Span] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)

    def on_host(self) -> Iterator[Span | Launch | Allocation]:
        """The events on the host in the order of time; an event comes before those inside it."""
        rows: list[Span | Launch | Allocation] = [*self.spans, *self.launches, *self.allocations]
        return iter(sorted(rows, key=_order))


def _order(row: Span | Launch | Allocation) -> tuple[float, float]:
    return (row.start, -row.end) if isinstance(row, Span) else (row.time, 0.0)


def read_trace(path: Path) -> Trace:
    """Read a trace that `torch.profiler` wrote, compressed if its name ends in `.gz`."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return parse_trace(json.loads(data)["traceEvents"])


def parse_trace(events: Iterable[Mapping[str, Any]]) -> Trace:
    """Sort the events of a trace."""
    trace = Trace()
    for event in events:
        kind, arguments = event.get("cat"), event.get("args", {})
        if event.get("name") == "[memory]":
            trace.allocations.append(_allocation(event, arguments))
        elif kind in _ON_HOST:
            start, end = _times(event)
            trace.spans.append(Span(event["name"], start, end, event["tid"], arguments.get("Sequence number")))
        elif kind in _LAUNCHES and "correlation" in arguments:
            trace.launches.append(Launch(event["ts"] * MICROSECOND, event["tid"], arguments["correlation"]))
        elif kind in _KERNELS and "correlation" in arguments:
            trace.kernels.append(Kernel(event["name"], *_times(event), arguments["correlation"]))
    trace.kernels.sort(key=lambda kernel: kernel.start)
    return trace


def _times(event: Mapping[str, Any]) -> tuple[float, float]:
    return event["ts"] * MICROSECOND, (event["ts"] + event["dur"]) * MICROSECOND


def _allocation(event: Mapping[str, Any], arguments: Mapping[str, Any]) -> Allocation:
    return Allocation(
        event["ts"] * MICROSECOND,
        event["tid"],
        arguments["Addr"],
        arguments["Bytes"],
        arguments["Device Type"] != 0,
    )
