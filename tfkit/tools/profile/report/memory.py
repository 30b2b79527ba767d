"""The contents of memory at its peak, and the longest kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tfkit.tools.common.pages import Child, remark, table, tag
from tfkit.tools.profile.report.bars import (
    Segment,
    amount_text,
    by_model,
    heading,
    labelled,
    legend,
    memory_text,
    share_text,
    swatch,
    time_text,
)
from tfkit.tools.profile.result import Profile, rows

KERNELS = 20
"""The number of kernels shown."""
OTHERS = "inputs and others"


def memory(profiles: Sequence[Profile]) -> list[Child]:
    """Draw the memory in use at the peak on one scale, with a table by component."""
    of = [_at_peak(profile) for profile in profiles]
    largest = max(sum(piece.value for piece in pieces) for pieces in of)
    children: list[Child] = []
    for profile, pieces in zip(profiles, of, strict=True):
        children += [heading(profile.name, len(profiles) > 1), _moment(profile)]
        children.append(labelled("at the peak", pieces, largest, memory_text(profile.memory.peak)))
    names = {piece.name: piece.text for pieces in of for piece in pieces if piece.value > 0}
    return [*children, legend(names), *by_model(profiles, _by_component)]


def _moment(profile: Profile) -> Child:
    held = profile.memory
    where = tag("p", "The peak of ", tag("b", memory_text(held.peak)), class_="moment")
    if held.part:
        where.extend([tag("span", f" comes in the {held.phase} of "), tag("code", held.part)])
    where.append(tag("span", f". Before the step, {memory_text(held.at_start)} are in use."))
    return where


def _at_peak(profile: Profile) -> list[Segment]:
    """Return the bytes that persist between steps, the bytes of each component including gradients, and the rest."""
    held = profile.memory
    pieces = [("weights", "weights", held.weights), ("optimizer", "optimizer state", held.optimizer)]
    pieces.append(("cache", "cache", held.cache))
    pieces += [(row.component, row.label, row.at_peak) for row in rows(profile)]
    pieces.append(("rest", OTHERS, max(0, held.peak - sum(size for _, _, size in pieces))))
    return [
        Segment(name, size, label, share_text(size, held.peak), f"{label}: {memory_text(size)}")
        for name, label, size in pieces
    ]


def _by_component(profile: Profile) -> list[Child]:
    """Tabulate the bytes of each component: in use at the peak, allocated in a step, and the maximum while it runs."""
    lines: list[list[Child]] = [
        [
            tag("span", swatch(row.component), row.label),
            memory_text(row.at_peak or None),
            share_text(row.at_peak or None, profile.memory.peak),
            memory_text(row.allocated or None),
            memory_text(row.highest or None),
        ]
        for row in rows(profile)
    ]
    head = ["component", "in use at the peak", "share", "allocated in a step", "most in use while it runs"]
    return [table(head, lines)]


def kernels(profiles: Sequence[Profile]) -> list[Child]:
    """Tabulate the longest operators or kernels of each profile, with the component that launched them."""
    return by_model(profiles, _kernels)


def _kernels(profile: Profile) -> Iterator[Child]:
    lines: list[list[Child]] = [
        [
            tag("code", kernel.name, title=kernel.name),
            tag("span", swatch(kernel.component), kernel.label),
            kernel.phase,
            amount_text(kernel.calls, ""),
            time_text(kernel.time),
            share_text(kernel.time, profile.step),
        ]
        for kernel in profile.kernels[:KERNELS]
    ]
    kind = "operator" if profile.device == "cpu" else "kernel"
    head = [kind, "launched by", "phase", "calls", "time", "share"]
    yield table(head, lines, text=3)
    if rest := profile.kernels[KERNELS:]:
        yield remark(f"{len(rest):,} more take {time_text(sum(kernel.time for kernel in rest))} together.")
