"""A warning about experts that miss the fast kernel."""

from __future__ import annotations

from collections.abc import Iterator

import tfkit
from tfkit_moe.moe import MoEConfig
from tfkit_moe.stacked import ALIGNMENT

WIDTHS = ALIGNMENT // 2  # of bfloat16


def slow_widths(graph: tfkit.Graph) -> Iterator[tfkit.Diagnostic]:
    """The widths of experts for which torch has no grouped product in bfloat16, the type that all devices have it for.

    The experts are then multiplied one after the other, and compiled code computes all of them for every token.
    """
    for path, config in graph.configs(MoEConfig):
        for name, width in (("d_model", config.d_model), ("d_ff", config.d_ff)):
            if width % WIDTHS:
                nearest = max(1, round(width / WIDTHS)) * WIDTHS
                yield tfkit.Diagnostic(
                    f"experts of `{name}` {width:,} are multiplied one after the other",
                    path=f"{path}.{name}",
                    notes=(f"torch multiplies all of them at once if widths are multiples of {WIDTHS}",),
                    help=f"`{name}: {nearest}` is near",
                )
