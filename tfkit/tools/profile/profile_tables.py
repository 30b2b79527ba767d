"""The printed form of profiles: tables of time, memory and kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfkit.console.output import percent, print_tables, table
from tfkit.tools.common.ownership import By
from tfkit.tools.common.units import bytes_text, count_text
from tfkit.tools.profile.result import ComponentTime, KernelTime, Profile, labels_of, summed_rows, undecided_notes

if TYPE_CHECKING:
    from rich.table import Table

KERNELS = 8
"""Maximum number of kernels in the printed table; the report contains more."""
NAME = 34
TERA = 1e12


def show_profiles(profiles: Sequence[Profile], by: By) -> None:
    """Print one profile, or a comparison of two."""
    if len(profiles) == 1:
        _show_profile(profiles[0], by)
    else:
        _show_side_by_side(profiles, by)
        if notes := list(undecided_notes(profiles)):
            print_tables("", *notes)


def _show_profile(profile: Profile, by: By) -> None:
    print_tables(
        *_summary_lines(profile),
        "",
        _time_table(profile, by),
        "",
        _memory_table(profile, by),
        "",
        _kernel_table(profile),
    )


def _summary_lines(profile: Profile) -> list[str]:
    tokens = f"{profile.batch} x {profile.length} tokens"
    if profile.mode == "decode":
        tokens = f"{profile.batch} x token {profile.length:,}"
    compiled = ", compiled" if profile.compiled else ""
    rate = count_text(round(profile.tokens / profile.plain_step))
    lines = [
        f"{profile.name}: {profile.mode}, {tokens}, {profile.dtype}{compiled}",
        f"on {profile.device_name}",
        f"a step takes {_milliseconds_text(profile.plain_step)} ms, {rate} tokens/s; "
        f"under the profiler {_milliseconds_text(profile.step)} ms",
    ]
    limits, memory = profile.limits, profile.memory
    how = " (measured)" if limits.source == "measured" else ""
    floor = sum(part.floor or 0 for part in profile.parts)
    bound = f"; the model takes at least {_milliseconds_text(floor)} ms" if floor else ""
    lines.append(f"limits{how}: {_rate_text(limits.flops, 'FLOP/s')}, {_rate_text(limits.bandwidth, 'B/s')}{bound}")
    held = {"weights": memory.weights, "gradients": memory.gradients, "optimizer": memory.optimizer}
    held_texts = [f"{name} {bytes_text(size)}" for name, size in {**held, "cache": memory.cache}.items() if size]
    lines.append(f"memory: peak {bytes_text(memory.peak)} in {memory.part or 'no component'}, {memory.phase}")
    lines.append(f"  of it {', '.join(held_texts)}")
    return [*lines, *profile.notes]


def _rate_text(amount: float, unit: str) -> str:
    return f"{amount / TERA:,.1f} T{unit}" if amount >= TERA else f"{amount / 1e9:,.1f} G{unit}"


def _milliseconds_text(seconds: float) -> str:
    amount = 1000 * seconds
    return f"{amount:,.2f}" if amount < 1000 else f"{amount:,.0f}"


def _time_table(profile: Profile, by: By) -> Table:
    train, large = profile.mode == "train", profile.limits.flops > 10 * TERA
    unit, scale = ("T", TERA) if large else ("G", 1e9)
    columns = [by, "ms", "share", *(["forward", "backward"] if train else []), f"{unit}FLOP/s", "GB/s", "floor"]
    lines = []
    for row in summed_rows(profile, by):
        phases = [_milliseconds_text(row.forward), _milliseconds_text(row.backward)] if train else []
        lines.append(
            [
                row.label,
                _milliseconds_text(row.time),
                _share_text(row.time, profile),
                *phases,
                *_achieved_cells(row, scale),
            ]
        )
    remainder, empty = profile.unattributed, [""] * (len(columns) - 3)
    lines.append(["not attributed", _milliseconds_text(remainder), _share_text(remainder, profile), *empty])
    lines.append(["step", _milliseconds_text(profile.step), _share_text(profile.step, profile), *empty])
    return table(columns, lines, right=columns[1:], footer=1)


def _share_text(seconds: float, profile: Profile) -> str:
    return percent(round(seconds * 1e9), round(profile.step * 1e9))


def _achieved_cells(row: ComponentTime, scale: float) -> list[str]:
    """Format the achieved FLOP/s and GB/s, and the floor as a percentage of the time."""
    flops, moved = row.flops_per_second, row.bytes_per_second
    near = f"{100 * row.floor / row.time:.0f}%" if row.floor and row.time else ""
    return [f"{flops / scale:,.1f}" if flops else "", f"{moved / 1e9:,.1f}" if moved else "", near]


def _memory_table(profile: Profile, by: By) -> Table:
    columns = [by, "allocates", "kept at the peak", "peak while it runs"]
    lines = [
        [row.label, *(bytes_text(size) for size in (row.allocated, row.at_peak, row.highest))]
        for row in summed_rows(profile, by)
        if row.allocated
    ]
    return table(columns, lines, right=columns[1:])


def _kernel_table(profile: Profile) -> Table:
    columns = ["operator" if profile.device == "cpu" else "kernel", "of", "calls", "ms", "share"]
    lines = [
        [
            _kernel_name(kernel),
            _kernel_owner(kernel, profile),
            f"{kernel.calls:g}",
            _milliseconds_text(kernel.time),
            _share_text(kernel.time, profile),
        ]
        for kernel in profile.kernels[:KERNELS]
    ]
    return table(columns, lines, right=columns[2:])


def _kernel_name(kernel: KernelTime) -> str:
    name = kernel.name.removeprefix("aten::")
    return name if len(name) <= NAME else f"{name[: NAME - 3]}..."


def _kernel_owner(kernel: KernelTime, profile: Profile) -> str:
    return f"{kernel.label}, {kernel.phase}" if profile.mode == "train" else kernel.label


def _show_side_by_side(profiles: Sequence[Profile], by: By) -> None:
    of = [{row.path: row.time for row in summed_rows(profile, by)} for profile in profiles]
    lines = [
        [label, *_time_cells([times.get(name) for times in of], profiles)]
        for name, label in labels_of(profiles, by).items()
    ]
    lines.append(["not attributed", *_time_cells([profile.unattributed for profile in profiles], profiles)])
    lines.append(["step", *_time_cells([profile.step for profile in profiles], profiles)])
    first, second = (profile.name for profile in profiles)
    columns = [by, f"{first} ms", "share", f"{second} ms", "share ", "ratio"]
    print_tables(table(columns, lines, right=columns[1:], footer=1))
    for profile in profiles:
        print_tables("", *_summary_lines(profile))


def _time_cells(times: Sequence[float | None], profiles: Sequence[Profile]) -> list[str]:
    """Format the times of two profiles, their fractions of a step, and the ratio of the second time to the first."""
    cells: list[str] = []
    for seconds, profile in zip(times, profiles, strict=True):
        cells += ["-", "-"] if seconds is None else [_milliseconds_text(seconds), _share_text(seconds, profile)]
    first, second = times
    return [*cells, f"{second / first:.2f}" if first and second else "-"]
