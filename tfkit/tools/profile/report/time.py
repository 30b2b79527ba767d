"""The time of a step: bars by component, for each phase."""

from __future__ import annotations

from collections.abc import Sequence

from tfkit.tools.common.page import Child, remark, tag
from tfkit.tools.profile.report.bars import Segment, bar, labelled, labels_of, legend
from tfkit.tools.profile.report.numbers import share_text, time_text
from tfkit.tools.profile.result import Profile, rows

UPDATE = ("optimizer", "zero_grad")
"""The rows of a step outside forward and backward."""
REST = "between the components"


def time_bars(profiles: Sequence[Profile]) -> list[Child]:
    """The forward, the backward and the time around them, of all profiles to one scale."""
    of = [_phases(profile) for profile in profiles]
    longest = max(_length(pieces) for phases in of for pieces in phases.values())
    made: list[Child] = []
    for phase in of[0]:
        times = [_length(phases[phase]) for phases in of]
        if not any(times):
            continue
        made.append(tag("h3", phase) if len(profiles) > 1 else None)
        for profile, phases, time in zip(profiles, of, times, strict=True):
            label = profile.name if len(profiles) > 1 else phase
            text = f"{time_text(time)} · {share_text(time, profile.step)}"
            made.append(labelled(label, bar(phases[phase], longest), text))
    made += [_idle(profile) for profile in profiles if profile.idle]
    return [*made, legend(labels_of(profiles) | {"rest": REST})]


def _idle(profile: Profile) -> Child:
    share = share_text(profile.idle, profile.step)
    return remark(f"{profile.name}: the accelerator waits for {time_text(profile.idle)} of each step, {share}.")


def _phases(profile: Profile) -> dict[str, list[Segment]]:
    """The segments of each phase, in the order in which the phases run."""
    phases: dict[str, list[Segment]] = {"forward": [], "backward": [], "update": []}
    for row in rows(profile):
        before = "update" if row.component in UPDATE else "forward"
        phases[before].append(_segment(profile, row.component, row.label, before, row.forward))
        phases["backward"].append(_segment(profile, row.component, row.label, "backward", row.backward))
    phases["rest"] = [_segment(profile, "rest", REST, "", profile.unattributed)]
    return phases


def _length(pieces: Sequence[Segment]) -> float:
    return sum(piece.value for piece in pieces)


def _segment(profile: Profile, name: str, label: str, phase: str, time: float) -> Segment:
    share = share_text(time, profile.step)
    return Segment(name, time, label, share, f"{label} {phase}: {time_text(time)}, {share} of the step")
