"""The time of a step: bars by component, for each phase."""

from __future__ import annotations

from collections.abc import Sequence

from tfkit.tools.common.page import Child, remark
from tfkit.tools.profile.report.bars import Segment, heading, labelled, legend
from tfkit.tools.profile.report.numbers import share_text, time_text
from tfkit.tools.profile.result import Profile, labels_of, rows

UPDATE = ("optimizer", "zero_grad")
"""The rows of a step outside forward and backward."""
REST = "between the components"


def time_bars(profiles: Sequence[Profile]) -> list[Child]:
    """Draw the forward, the backward and the time around them, of all profiles on one scale."""
    of = [_phases(profile) for profile in profiles]
    several = len(profiles) > 1
    longest = max(_length(segments) for phases in of for segments in phases.values())
    children: list[Child] = []
    for phase in of[0]:
        if not any(_length(phases[phase]) for phases in of):
            continue
        children.append(heading(phase, several))
        for profile, phases in zip(profiles, of, strict=True):
            time = _length(phases[phase])
            text = f"{time_text(time)} · {share_text(time, profile.step)}"
            children.append(labelled(profile.name if several else phase, phases[phase], longest, text))
    children += [_idle(profile) for profile in profiles if profile.idle]
    return [*children, legend(labels_of(profiles) | {"rest": REST})]


def _idle(profile: Profile) -> Child:
    share = share_text(profile.idle, profile.step)
    return remark(f"{profile.name}: the accelerator waits for {time_text(profile.idle)} of each step, {share}.")


def _phases(profile: Profile) -> dict[str, list[Segment]]:
    """Return the segments of each phase, in the order in which the phases run."""
    phases: dict[str, list[Segment]] = {"forward": [], "backward": [], "update": []}
    for row in rows(profile):
        before = "update" if row.component in UPDATE else "forward"
        phases[before].append(_segment(profile, row.component, row.label, before, row.forward))
        phases["backward"].append(_segment(profile, row.component, row.label, "backward", row.backward))
    phases["rest"] = [_segment(profile, "rest", REST, "", profile.unattributed)]
    return phases


def _length(segments: Sequence[Segment]) -> float:
    return sum(segment.value for segment in segments)


def _segment(profile: Profile, name: str, label: str, phase: str, time: float) -> Segment:
    share = share_text(time, profile.step)
    return Segment(name, time, label, share, f"{label} {phase}: {time_text(time)}, {share} of the step")
