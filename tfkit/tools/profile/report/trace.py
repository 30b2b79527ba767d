"""Adapts a trace so that TensorBoard's PyTorch plugin shows modules by their paths, and kernels below operators.

The plugin (torch-tb-profiler 0.4.3) is older than the traces of today's torch, and its module view knows only classes.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from tfkit.tools.profile.trace import LAUNCHES

MODULE = "nn.Module: "
"""The prefix of the class name of a running module in torch's traces."""

Event = dict[str, Any]


def write_trace(trace: dict[str, Any], path: Path, modules: Collection[str]) -> None:
    """Write a trace with stacks and modules for the plugin; other viewers show it as before, with better names.

    The forward of each of `modules`, paths, ran inside an annotation of that name. Raises OSError.
    """
    adapt_events(trace["traceEvents"], modules)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(trace, file, separators=(",", ":"))


def adapt_events(events: Iterable[Event], modules: Collection[str]) -> None:
    """Rewrite the events of a trace in place."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        kind, name = event.get("cat"), str(event.get("name"))
        if kind in LAUNCHES:
            event["cat"] = "runtime"  # the plugin recognizes calls that start kernels only under this name
        elif (kind == "python_function" and name.startswith(MODULE)) or (kind == "user_annotation" and name in modules):
            threads[event["tid"]].append(event)
    for thread in threads.values():
        _name_modules(sorted(thread, key=lambda event: (event["ts"], -event["dur"])))


def _name_modules(events: Iterable[Event]) -> None:
    """Give the module around each annotation the name of the annotation; `events` are in the order of their starts."""
    running: list[Event] = []
    for event in events:
        while running and event["ts"] >= running[-1]["ts"] + running[-1]["dur"]:
            running.pop()
        if event["cat"] == "python_function":
            running.append(event)
        elif running:
            running[-1]["name"] = MODULE + event["name"]
