"""The report of a profile: one HTML file with all pictures in it, which opens without a network."""

from __future__ import annotations

from collections.abc import Sequence

from tfkit.tools.common.page import page, section, tag
from tfkit.tools.profile.report.layers import layer_strips
from tfkit.tools.profile.report.limits import floors
from tfkit.tools.profile.report.memory import kernels, memory
from tfkit.tools.profile.report.roofline import roofline
from tfkit.tools.profile.report.summary import measured, setting, summary, title
from tfkit.tools.profile.report.table import component_tables
from tfkit.tools.profile.report.time import time_bars
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
