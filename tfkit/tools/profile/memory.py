"""The owners of memory, and the one that runs at the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tfkit.tools.profile.attribution import Located, Owner
from tfkit.tools.profile.trace import Allocation, Span


@dataclass(frozen=True)
class Usage:
    """The memory of one step, in bytes; mappings are by path of the model."""

    peak: int
    owner: Owner
    """The owner that runs at the peak."""
    allocated: Counter[str | None]
    """All bytes that were allocated, even if they were soon freed."""
    at_peak: Counter[str | None]
    """Bytes that were allocated in this step and are in use at the peak."""
    highest: dict[str | None, int]
    """The most bytes in use, by all owners, while this one runs."""


def memory_of(located: Sequence[Located], step: int, at_start: int, *, on_device: bool) -> Usage:
    """Follow the memory of a step, on the device or on the CPU, from the bytes in use `at_start`.

    It must not be the first step: on the CPU the profiler does not see older memory being freed.
    """
    rows = [event for event in located if event.step == step and _counts(event, on_device)]
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
    return Usage(peak, owner, allocated, _living(rows[: peak_at + 1]), highest)


def _counts(event: Located, on_device: bool) -> bool:
    return isinstance(event.row, Span) or (isinstance(event.row, Allocation) and event.row.on_device == on_device)


def _living(rows: Sequence[Located]) -> Counter[str | None]:
    """Sum the allocations in these rows that were not freed."""
    held: dict[int, tuple[str | None, int]] = {}
    for event in rows:
        row = event.row
        if not isinstance(row, Allocation):
            continue
        if row.size > 0:
            held[row.address] = (event.owner.path, row.size)
        else:
            held.pop(row.address, None)
    living: Counter[str | None] = Counter()
    for path, size in held.values():
        living[path] += size
    return living
