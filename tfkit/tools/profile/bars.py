"""Formatting of quantities, and generic bars and tables, for the report."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from tfkit.tools.common import pages
from tfkit.tools.common.pages import PageContent, page_table, tag
from tfkit.tools.common.units import bytes_text, scaled_amount
from tfkit.tools.profile.result import Profile

_PREFIXES = "kMGTPE"
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
NONE = "–"
"""The text for a missing value."""


def time_text(seconds: float | None) -> str:
    """Format a time: `12.3 ms`."""
    if seconds is None:
        return NONE
    scale, unit = next((pair for pair in _TIMES if abs(seconds) >= 0.9995 * pair[0]), _TIMES[-1])
    return f"{_number_text(seconds / scale)} {unit}"


def amount_text(amount: float | None, unit: str) -> str:
    """Format `412 TFLOP/s` for 4.12e14 and `FLOP/s`; `412T` without a unit, and `7` for a small integer."""
    if amount is None:
        return NONE
    if amount < 1000 and amount == int(amount):
        return f"{amount:.0f} {unit}".rstrip()
    amount, prefix = scaled_amount(amount, _PREFIXES, maximum=999.5)
    return f"{_number_text(amount)}{' ' if unit else ''}{prefix}{unit}"


def decade_text(power: int) -> str:
    """Format a power of ten: `100T` for 14, `0.01` for -2."""
    amount, prefix = scaled_amount(10.0**power, _PREFIXES)
    return f"{amount:g}{prefix}"


def memory_text(count: float | None) -> str:
    """Format bytes in powers of 1000: `3.2 GB`."""
    return NONE if count is None else bytes_text(round(count))


def share_text(part: float | None, total: float | None) -> str:
    """Format a fraction: `68.3%`."""
    return NONE if part is None or not total else f"{100 * part / total:.1f}%"


def ratio_text(value: float | None, base: float | None) -> str:
    """Format the ratio of two values, as in `1.42×`."""
    return NONE if value is None or not base else f"{_number_text(value / base)}×"


def _number_text(number: float) -> str:
    """Format a number with three significant digits."""
    size = abs(number)
    if size >= 99.95 or not number:
        return f"{number:,.0f}"
    return f"{number:.1f}" if size >= 9.995 else f"{number:.2f}"


COLOURED_NAMES = (
    "embedding",
    "position",
    "attention",
    "cross_attention",
    "ffn",
    "norm",
    "head",
    "loss",
    "optimizer",
    "weights",
    "cache",
    "rest",
)
"""Names with a fixed colour; every other name has one of the `OTHER_COLOURS` colours."""
OTHER_COLOURS = 4
LETTERS = 92
"""Approximate number of letters that fit into a bar."""


def colour_of(name: str) -> str:
    """Return the class that colours an element; equal names have equal colours in every picture."""
    return (
        f"c-{name}" if name in COLOURED_NAMES else f"c-other{zlib.crc32(name.encode(errors='replace')) % OTHER_COLOURS}"
    )


@dataclass(frozen=True)
class BarSegment:
    """A segment of a bar. A wide segment contains `text` and `share`; `hint` appears under the pointer."""

    name: str
    value: float
    text: str
    share: str
    hint: str


def labelled_bar(label: str, segments: Iterable[BarSegment], total: float, right: str, *, look: str = "bar") -> Element:
    """Draw a stacked bar whose full width stands for `total`, between its `label` and the text `right`."""
    bar = tag("div", class_=look)
    for segment in segments:
        if segment.value <= 0 or total <= 0:
            continue
        share = segment.value / total
        texts = (f"{segment.text} {segment.share}".strip(), segment.text, "")
        text = next(text for text in texts if not text or len(text) + 2 <= share * LETTERS)
        kind, style = f"segment {colour_of(segment.name)}", f"width:{100 * share:.3f}%"
        bar.append(tag("div", tag("span", text), class_=kind, style=style, title=segment.hint))
    return tag("div", tag("div", label, class_="name"), bar, tag("div", right, class_="sum"), class_="labelled")


def colour_legend(labels: Mapping[str, str]) -> Element:
    """Draw a legend: the label of each colour."""
    return pages.legend((colour_of(name), label) for name, label in labels.items())


def name_swatch(name: str) -> Element:
    """Draw a small square in the colour of a name."""
    return pages.colour_swatch(colour_of(name))


def optional_heading(name: str, several: bool) -> Element | None:
    """Return a heading for a model; empty for a single model."""
    return tag("h3", name) if several else None


def side_by_side(
    first: str,
    profiles: Sequence[Profile],
    lines: Iterable[tuple[PageContent, Iterable[tuple[PageContent, float | None]]]],
) -> Element:
    """Build a table that compares models, with the ratio of each model to the first model.

    A line has a name, and a cell and a value for each model.
    """
    names = [name for profile in profiles[1:] for name in (profile.name, "ratio")]
    rows: list[list[PageContent]] = []
    for name, ((cell, value), *rest) in lines:
        ratios = [child for other, amount in rest for child in (other, ratio_text(amount, value))]
        rows.append([name, cell, *ratios])
    return page_table([first, profiles[0].name, *names], rows)


def by_model(profiles: Sequence[Profile], content: Callable[[Profile], Iterable[PageContent]]) -> list[PageContent]:
    """Return the contents of each model, below its name if there are several models."""
    return [
        child
        for profile in profiles
        for child in (optional_heading(profile.name, len(profiles) > 1), *content(profile))
    ]
