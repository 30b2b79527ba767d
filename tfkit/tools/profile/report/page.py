"""The report of a profile: one HTML file with all pictures in it, which opens without a network."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import pstdev
from typing import NamedTuple
from xml.etree.ElementTree import Element

import torch

from tfkit.tools.common.pages import Child, page, section, tag, terms
from tfkit.tools.profile.report.bars import (
    amount_text,
    by_model,
    memory_text,
    ratio_text,
    share_text,
    side_by_side,
    time_text,
)
from tfkit.tools.profile.report.memory import kernels, memory
from tfkit.tools.profile.report.roofline import roofline
from tfkit.tools.profile.report.table import component_tables
from tfkit.tools.profile.report.time import floors, layer_strips, time_bars
from tfkit.tools.profile.result import Profile


def report(profiles: Sequence[Profile]) -> str:
    """Render a page about one profile, or about several side by side with their ratios to the first.

    The page is self-contained: it loads nothing, runs no script, follows light and dark, and prints. Everything from a
    spec is in it as text. Raises ValueError without a profile.
    """
    if not profiles:
        raise ValueError("a report needs at least one profile")
    sections = (
        ("time", "Where the time goes", time_bars(profiles)),
        ("components", "Components, layers and modules", component_tables(profiles)),
        ("layers", "Layer by layer", layer_strips(profiles)),
        ("roofline", "Against the limits of the device", roofline(profiles)),
        ("floor", "Measured and predicted", floors(profiles)),
        ("memory", "Memory", memory(profiles)),
        ("kernels", "The longest operators and kernels", kernels(profiles)),
        ("measured", "How it was measured", measured(profiles)),
    )
    settings = [tag("p", text, class_="setting") for text in dict.fromkeys(map(setting, profiles))]
    head = tag("header", tag("h1", title(profiles)), *settings)
    body = [section(name, words, content) for name, words, content in sections]
    first = tag("section", *summary(profiles), id="summary")
    return page(f"{title(profiles)}: profile", head, tag("main", first, *body))


class Figure(NamedTuple):
    """A number of a step, as a text with a note, and its share of a limit if there is one."""

    name: str
    text: str
    note: str
    value: float | None
    share: float | None = None


def title(profiles: Sequence[Profile]) -> str:
    """Return `gpt2`, or `gpt2 and llama3_8b`."""
    return " and ".join(profile.name for profile in profiles)


def setting(profile: Profile) -> str:
    """Format the settings of the run in one line: mode, sizes, dtype and device."""
    compiled = ["compiled"] if profile.compiled else []
    shape = f"{profile.batch:,} × {profile.length:,} tokens"
    return " · ".join([profile.mode, shape, profile.dtype, *compiled, profile.device_name])


def summary(profiles: Sequence[Profile]) -> list[Child]:
    """Return tiles for one model, or a table with ratios for several."""
    figures = [_figures(profile) for profile in profiles]
    if len(profiles) == 1:
        return [tag("div", *map(_tile, figures[0]), class_="tiles")]
    lines = zip(*figures, strict=True)
    cells = (
        (line[0].name, [(tag("span", figure.text, tag("small", figure.note)), figure.value) for figure in line])
        for line in lines
    )
    return [side_by_side("", profiles, cells)]


def _figures(profile: Profile) -> tuple[Figure, ...]:
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
    return (
        Figure("step", time_text(profile.plain_step), spread, profile.plain_step),
        Figure("throughput", f"{amount_text(tokens, '')} tokens/s", parameters, tokens),
        Figure("achieved", amount_text(rate, "FLOP/s"), within, rate, share),
        Figure("peak memory", memory_text(profile.memory.peak), held, profile.memory.peak),
        Figure("attributed", share_text(profile.attributed, 1), "of the step has a name", profile.attributed),
        Figure("profiler", ratio_text(profile.step, profile.plain_step), "of the step without it", overhead),
    )


def _tile(figure: Figure) -> Element:
    style = f"width:{100 * min(1.0, figure.share or 0):.1f}%"
    return tag(
        "div",
        tag("div", figure.name, class_="what"),
        tag("div", figure.text, class_="figure"),
        tag("div", tag("i", style=style), class_="gauge") if figure.share else None,
        tag("div", figure.note),
        class_="tile",
    )


def measured(profiles: Sequence[Profile]) -> list[Child]:
    """Describe the method of the measurement, its notes, and the other files written."""
    return by_model(profiles, _measured)


def _measured(profile: Profile) -> list[Child]:
    limits = profile.limits
    peaks = f"{amount_text(limits.flops, 'FLOP/s')} and {amount_text(limits.bandwidth, 'B/s')}"
    facts = {
        "model": f"{profile.name}, {profile.parameters:,} parameters",
        "run": setting(profile),
        "device": f"{profile.device_name} ({profile.device})",
        "steps": f"{len(profile.steps)} under the profiler, {len(profile.plain_steps)} without it",
        "limits": f"{peaks} ({limits.source})",
        "torch": torch.__version__,
    }
    return [terms(facts), tag("ul", *(tag("li", note) for note in profile.notes), class_="notes")]
