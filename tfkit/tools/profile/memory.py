"""Whose memory it is, and who runs when there is the most of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tfkit.tools.profile.attribution import Located, Owner
from tfkit.tools.profile.trace import Allocation, Span


@dataclass(frozen=True)
class Usage:
    """The memory of one step, in bytes; by path of the model where it is a mapping."""

    peak: int
    owner: Owner
    """Who runs at the peak."""
    allocated: Counter[str | None]
    """All that was asked for, even if it was soon given back."""
    at_peak: Counter[str | None]
    """What was asked for in this step and is in use at the peak."""
    highest: dict[str | None, int]
    """The most in use, of everybody, while a part runs."""


def memory_of(located: Sequence[Located], step: int, at_start: int, *, on_device: bool) -> Usage:
    """Follow the memory of one step.

    Args:
        located: the rows of a trace.
        step: which one. Not the first: the profiler does not see on the CPU when older memory is given back.
        at_start: bytes in use when it begins.
        on_device: whether on the accelerator or on the CPU.
    """
    rows = [one for one in located if one.step == step and _counts(one, on_device)]
    total = peak = at_start
    peak_at, owner = -1, Owner(None, "forward")
    allocated: Counter[str | None] = Counter()
    highest: dict[str | None, int] = {}
    for index, (row, running, _) in enumerate(rows):
        size = row.size if isinstance(row, Allocation) else 0
        total += size
        allocated[running.path] += max(0, size)
        highest[running.path] = max(total, highest.get(running.path, 0))
        if total > peak:
            peak, peak_at, owner = total, index, running
    return Usage(peak, owner, allocated, _living(rows[: peak_at + 1]), highest)


def _counts(one: Located, on_device: bool) -> bool:
    return isinstance(one.row, Span) or (isinstance(one.row, Allocation) and one.row.on_device == on_device)


def _living(rows: Sequence[Located]) -> Counter[str | None]:
    """What was asked for in these rows and was not given back."""
    held: dict[int, tuple[str | None, int]] = {}
    for row, owner, _ in rows:
        if not isinstance(row, Allocation):
            continue
        if row.size > 0:
            held[row.address] = (owner.path, row.size)
        else:
            held.pop(row.address, None)
    living: Counter[str | None] = Counter()
    for path, size in held.values():
        living[path] += size
    return living
