"""Traces of PyTorch's profiler: their rows, and traces that TensorBoard shows with the names of modules.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

TensorBoard's PyTorch plugin (torch-tb-profiler 0.4.3) is older than the traces of current torch, and its module view
shows only classes. Traces for the plugin name modules by their paths, and show kernels below operators.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

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
        """Length of the stretch, in seconds."""
        return self.end - self.start

    def overlap(self, other: Stretch) -> float:
        """Return the seconds that belong to both."""
        return max(0.0, min(self.end, other.end) - max(self.start, other.start))


@dataclass(slots=True)
class Event(Stretch):
    """A row of a host thread."""

    name: str
    thread: Any


@dataclass(slots=True)
class HostSpan(Event):
    """An operator or a range."""

    sequence: int | None
    """Sequence number of the backward node that an operator creates, or of the backward node that runs."""


@dataclass(slots=True)
class Launch(Event):
    """A call that starts a kernel."""

    correlation: int


@dataclass(slots=True)
class Allocation(Event):
    """An allocation of memory, or a deallocation if `size` is negative. It has no duration."""

    address: int
    size: int
    on_device: bool


@dataclass(slots=True)
class Kernel(Stretch):
    """A kernel, or a copy, on an accelerator."""

    name: str
    correlation: int


@dataclass(slots=True)
class ProfilerTrace:
    """The rows of a trace, ordered by time. On the host, a row precedes the rows inside it."""

    host: list[Event]
    kernels: list[Kernel]


def parse_trace(events: Iterable[Mapping[str, Any]]) -> ProfilerTrace:
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
            host.append(HostSpan(*_on_host(event), arguments.get("Sequence number")))
        elif kind in LAUNCHES and "correlation" in arguments:
            host.append(Launch(*_on_host(event), arguments["correlation"]))
        elif kind in _KERNELS and "correlation" in arguments:
            kernels.append(Kernel(*_start_and_end(event), event["name"], arguments["correlation"]))
    return ProfilerTrace(
        sorted(host, key=lambda row: (row.start, -row.end)), sorted(kernels, key=lambda row: row.start)
    )


def _start_and_end(event: Mapping[str, Any]) -> tuple[float, float]:
    return event["ts"] * MICROSECOND, (event["ts"] + event.get("dur", 0)) * MICROSECOND


def _on_host(event: Mapping[str, Any]) -> tuple[float, float, str, Any]:
    return *_start_and_end(event), event["name"], event["tid"]


MODULE = "nn.Module: "
"""The prefix of the class name of a running module in torch's traces."""

JsonEvent: TypeAlias = dict[str, Any]


def write_trace(trace: dict[str, Any], path: Path, modules: Collection[str]) -> None:
    """Write a trace with stacks and modules for the plugin; other viewers show it as before, with better names.

    The forward of each of `modules`, paths, ran inside an annotation of that name. Raises OSError.
    """
    adapt_events(trace["traceEvents"], modules)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(trace, file, separators=(",", ":"))


def adapt_events(events: Iterable[JsonEvent], modules: Collection[str]) -> None:
    """Rewrite the events of a trace in place."""
    threads: dict[Any, list[JsonEvent]] = defaultdict(list)
    for event in events:
        kind, name = event.get("cat"), str(event.get("name"))
        if kind in LAUNCHES:
            event["cat"] = "runtime"  # the plugin recognizes calls that start kernels only under this name
        elif (kind == "python_function" and name.startswith(MODULE)) or (kind == "user_annotation" and name in modules):
            threads[event["tid"]].append(event)
    for thread in threads.values():
        _name_modules(sorted(thread, key=lambda event: (event["ts"], -event["dur"])))


def _name_modules(events: Iterable[JsonEvent]) -> None:
    """Give the module around each annotation the name of the annotation; `events` are in the order of their starts."""
    running: list[JsonEvent] = []
    for event in events:
        while running and event["ts"] >= running[-1]["ts"] + running[-1]["dur"]:
            running.pop()
        if event["cat"] == "python_function":
            running.append(event)
        elif running:
            running[-1]["name"] = MODULE + event["name"]
