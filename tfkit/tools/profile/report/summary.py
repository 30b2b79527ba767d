"""The first and the last section: the numbers of a step, and the way they were measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import pstdev
from xml.etree.ElementTree import Element

import torch

from tfkit.tools.common.page import Child, table, tag, terms
from tfkit.tools.profile.report.bars import by_model, with_ratios
from tfkit.tools.profile.report.numbers import (
    amount_text,
    memory_text,
    ratio_text,
    share_text,
    time_text,
)
from tfkit.tools.profile.result import Profile


def title(profiles: Sequence[Profile]) -> str:
    """`gpt2`, or `gpt2 and llama3_8b`."""
    return " and ".join(profile.name for profile in profiles)


def setting(profile: Profile) -> str:
    """The setting of the run: mode, sizes, type and device, in one line."""
    compiled = ["compiled"] if profile.compiled else []
    shape = f"{profile.batch:,} × {profile.length:,} tokens"
    return " · ".join([profile.mode, shape, profile.dtype, *compiled, profile.device_name])


def summary(profiles: Sequence[Profile]) -> list[Child]:
    """Tiles for one model; a table with ratios for several."""
    if len(profiles) == 1:
        tiles = [_tile(*line) for line in _figures(profiles[0])]
        return [tag("div", *tiles, class_="tiles")]
    figures = [_figures(profile) for profile in profiles]
    lines: list[list[Child]] = []
    for place, (name, *_) in enumerate(figures[0]):
        line: list[Child] = [name]
        for index, one in enumerate(figures):
            line.append(tag("span", one[place][1], tag("small", one[place][2])))
            line += [ratio_text(one[place][3], figures[0][place][3])] if index else []
        lines.append(line)
    return [table(with_ratios("", profiles), lines)]


def _figures(profile: Profile) -> list[tuple[str, str, str, float | None, float | None]]:
    """Name, text, remark, value, and the share of a limit if there is one."""
    flops = sum(part.flops or 0 for part in profile.parts)
    rate = flops / profile.plain_step if flops else None
    limit = profile.limits.flops
    share = rate / limit if rate else None
    spread = f"± {time_text(pstdev(profile.plain_steps))}, {len(profile.plain_steps)} steps"
    tokens = profile.tokens / profile.plain_step
    parameters = f"{amount_text(profile.parameters, '')} parameters"
    within = f"{100 * share:.1f}% of {amount_text(limit, 'FLOP/s')}" if share else "no limit to compare with"
    overhead = profile.step / profile.plain_step
    held = f"{memory_text(profile.memory.weights)} are weights"
    return [
        ("step", time_text(profile.plain_step), spread, profile.plain_step, None),
        ("throughput", f"{amount_text(tokens, '')} tokens/s", parameters, tokens, None),
        ("achieved", amount_text(rate, "FLOP/s"), within, rate, share),
        ("peak memory", memory_text(profile.memory.peak), held, float(profile.memory.peak), None),
        ("attributed", share_text(profile.attributed, 1), "of the step has a name", profile.attributed, None),
        ("profiler", ratio_text(profile.step, profile.plain_step), "of the step without it", overhead, None),
    ]


def _tile(name: str, text: str, note: str, _: float | None, share: float | None) -> Element:
    meter = tag("div", tag("i", style=f"width:{100 * min(1.0, share):.1f}%"), class_="gauge") if share else None
    return tag(
        "div",
        tag("div", name, class_="what"),
        tag("div", text, class_="figure"),
        meter,
        tag("div", note),
        class_="tile",
    )


def measured(profiles: Sequence[Profile]) -> list[Child]:
    """The method of the measurement, its notes, and the other files written."""
    return by_model(profiles, _measured)


def _measured(profile: Profile) -> list[Child]:
    limits = profile.limits
    said = f"{amount_text(limits.flops, 'FLOP/s')} and {amount_text(limits.bandwidth, 'B/s')}"
    facts = {
        "model": f"{profile.name}, {profile.parameters:,} parameters",
        "run": setting(profile),
        "device": f"{profile.device_name} ({profile.device})",
        "steps": f"{len(profile.steps)} under the profiler, {len(profile.plain_steps)} without it",
        "limits": f"{said} ({limits.source})",
        "torch": torch.__version__,
    }
    return [terms(facts), tag("ul", *(tag("li", note) for note in profile.notes), class_="notes")]
