"""The least time of a step by the limits of its device, and its measured time."""

from __future__ import annotations

from collections.abc import Sequence

from tfkit.tools.common.page import Child, remark
from tfkit.tools.profile.report.bars import Segment, heading, labelled
from tfkit.tools.profile.report.numbers import ratio_text, time_text
from tfkit.tools.profile.result import ComponentTime, Profile, labels_of, rows


def floors(profiles: Sequence[Profile]) -> list[Child]:
    """Draw the measured time by component, and within it the least time for its FLOPs and bytes."""
    of = [{row.component: row for row in rows(profile) if row.floor} for profile in profiles]
    if not any(of):
        return [remark("There is no prediction: the work of this model was not counted.")]
    longest = max(row.time for components in of for row in components.values())
    several = len(profiles) > 1
    children: list[Child] = []
    for name, label in labels_of(profiles).items():
        bars = [
            _bullet(profile.name if several else label, components[name], longest)
            for profile, components in zip(profiles, of, strict=True)
            if name in components
        ]
        children += [heading(label, several), *bars] if bars else []
    words = "The bar is measured; its dark section is the floor, the least time by the limits of the device."
    return [*children, remark(f"{words} A component at 1.00× could not be faster without doing less.")]


def _bullet(label: str, row: ComponentTime, longest: float) -> Child:
    """Draw the floor as the dark section of the measured time, or as all of it if the measured time is shorter."""
    floor = row.floor or 0.0
    hint = f"{row.label}: measured {time_text(row.time)}, floor {time_text(floor)}"
    sections = (min(floor, row.time), max(0.0, row.time - floor))
    text = f"{time_text(floor)} → {time_text(row.time)} · {ratio_text(row.time, floor)}"
    segments = [Segment(row.component, seconds, "", "", hint) for seconds in sections]
    return labelled(label, segments, longest, text, look="bar bullet")
