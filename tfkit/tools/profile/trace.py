"""The rows of a PyTorch profiler trace: the time of each event, its thread, and the event around it.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_ON_HOST = ("cpu_op", "user_annotation")
LAUNCHES = ("cuda_runtime", "cuda_driver")
"""Kinds of calls that start kernels."""
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
MICROSECOND = 1e-6


@dataclass(slots=True)
class Stretch:
    """A stretch of time, in seconds."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start

    def overlap(self, other: Stretch) -> float:
        """Return the seconds that belong to both."""
        return max(0.0, min(self.end, other.end) - max(self.start, other.start))


@dataclass(slots=True)
class Event(Stretch):
    """A row of the host."""

    name: str
    thread: Any


@dataclass(slots=True)
class Span(Event):
    """An operator or a range."""

    sequence: int | None
    """The sequence number of the backward's node that an operator makes, or that runs."""


@dataclass(slots=True)
class Launch(Event):
    """A call that starts a kernel."""

    correlation: int


@dataclass(slots=True)
class Allocation(Event):
    """Memory that is allocated, or freed, with a negative `size`, in no time."""

    address: int
    size: int
    on_device: bool


@dataclass(slots=True)
class Kernel(Stretch):
    """A kernel, or a copy, on an accelerator."""

    name: str
    correlation: int


@dataclass(slots=True)
class Trace:
    """The rows of a trace, in the order of time; on the host one comes before those inside it."""

    host: list[Event]
    kernels: list[Kernel]


def parse_trace(events: Iterable[Mapping[str, Any]]) -> Trace:
    """Parse the rows of a trace that `torch.profiler` wrote."""
    host: list[Event] = []
    kernels = []
    for event in events:
        kind, arguments = event.get("cat"), event.get("args", {})
        if event.get("name") == "[memory]":
            host.append(
                Allocation(*_on_host(event), arguments["Addr"], arguments["Bytes"], arguments["Device Type"] != 0)
            )
        elif kind in _ON_HOST:
            host.append(Span(*_on_host(event), arguments.get("Sequence number")))
        elif kind in LAUNCHES and "correlation" in arguments:
            host.append(Launch(*_on_host(event), arguments["correlation"]))
        elif kind in _KERNELS and "correlation" in arguments:
            kernels.append(Kernel(*_times(event), event["name"], arguments["correlation"]))
    return Trace(sorted(host, key=lambda row: (row.start, -row.end)), sorted(kernels, key=lambda row: row.start))


def _times(event: Mapping[str, Any]) -> tuple[float, float]:
    return event["ts"] * MICROSECOND, (event["ts"] + event.get("dur", 0)) * MICROSECOND


def _on_host(event: Mapping[str, Any]) -> tuple[float, float, str, Any]:
    return *_times(event), event["name"], event["tid"]
