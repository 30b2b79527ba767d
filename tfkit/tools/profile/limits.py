"""The limits of a device: from the table of `tfkit cost` if it is listed there, measured otherwise."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tfkit.arguments import name_of
from tfkit.tools.cost.devices import device_of_driver
from tfkit.tools.profile.result import Limits

PATIENCE = 0.3
"""Duration of each of the two measurements, in seconds."""
SIDE = 1024
COPIED = 2**26
"""Number of bytes to copy, which must exceed the caches."""


def limits_of(device: torch.device, dtype: torch.dtype) -> Limits:
    """Return the FLOP/s of matrix products in a dtype, and the memory bandwidth in bytes per second."""
    name = device_name(device)
    listed = device_of_driver(name) if device.type == "cuda" else None
    words = name_of(dtype)
    if listed is not None and words in listed.tera_flops:
        tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
        return Limits(name, listed.flops("tf32" if tf32 else words), listed.bandwidth, listed.source)
    left, right = (torch.rand(SIDE, SIDE, device=device).to(dtype) for _ in range(2))
    product = _shortest_time(lambda: left @ right, device)
    block = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(block)
    copy = _shortest_time(lambda: target.copy_(block), device)
    return Limits(name, 2 * SIDE**3 / product, 2 * COPIED / copy, "measured")


def device_name(device: torch.device) -> str:
    """Return the display name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_processor_name()}, {threads} thread{'s' * (threads != 1)}"


def _processor_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        return next(line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _shortest_time(run: Callable[[], object], device: torch.device) -> float:
    """Return the shortest time of several runs."""
    seconds: list[float] = []
    end = time.perf_counter() + PATIENCE
    while len(seconds) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        synchronize_device(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def synchronize_device(device: torch.device) -> None:
    """Wait until a device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
