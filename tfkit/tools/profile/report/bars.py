"""Bars and tables of the report, without knowledge of their contents."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from tfkit.tools.common.page import Child, tag
from tfkit.tools.profile.result import Profile, rows

KNOWN = (
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
"""Names with colours of their own; every other name has one of `OTHERS`."""
OTHERS = 4
LETTERS = 92
"""Approximate number of letters that fit into a bar."""


def colour(name: str) -> str:
    """The class that gives an element its colour: equal for equal names in every picture."""
    return f"c-{name}" if name in KNOWN else f"c-other{zlib.crc32(name.encode(errors='replace')) % OTHERS}"


@dataclass(frozen=True)
class Segment:
    """A segment of a bar: `text` and `share` are in it if it is wide enough, `hint` appears under the pointer."""

    name: str
    value: float
    text: str
    share: str
    hint: str


def bar(segments: Iterable[Segment], whole: float) -> Element:
    """A stacked bar whose full width stands for `whole`."""
    made = tag("div", class_="bar")
    for segment in segments:
        if segment.value <= 0 or whole <= 0:
            continue
        share = segment.value / whole
        texts = (f"{segment.text} {segment.share}".strip(), segment.text, "")
        text = next(text for text in texts if not text or len(text) + 2 <= share * LETTERS)
        style = f"width:{100 * share:.3f}%"
        made.append(
            tag("div", tag("span", text), class_=f"segment {colour(segment.name)}", style=style, title=segment.hint)
        )
    return made


def labelled(label: str, middle: Element, right: str) -> Element:
    """A bar with its name before it and its sum after it."""
    return tag("div", tag("div", label, class_="name"), middle, tag("div", right, class_="sum"), class_="labelled")


def labels_of(profiles: Sequence[Profile]) -> dict[str, str]:
    """The label of each component that has run; its name if the models have different labels for it."""
    labels: dict[str, str] = {}
    for row in (row for profile in profiles for row in rows(profile)):
        labels[row.component] = row.label if labels.get(row.component, row.label) == row.label else row.component
    return labels


def legend(labels: Mapping[str, str]) -> Element:
    """The meaning of the colours: the label of each name."""
    entries = [tag("li", swatch(name), label) for name, label in labels.items()]
    return tag("ul", *entries, class_="legend")


def swatch(name: str) -> Element:
    """A small square in the colour of a name."""
    return tag("i", class_=f"swatch {colour(name)}")


def heading(name: str, several: bool) -> Element | None:
    """A name above its own contents, if there are several models."""
    return tag("h3", name) if several else None


def with_ratios(first: str, profiles: Sequence[Profile]) -> list[str]:
    """The head of a table that compares models: after each but the first, its ratio to that."""
    names = [name for profile in profiles[1:] for name in (profile.name, "ratio")]
    return [first, profiles[0].name, *names]


def by_model(profiles: Sequence[Profile], content: Callable[[Profile], Iterable[Child]]) -> list[Child]:
    """The contents of each model, below its name if there are several."""
    return [child for one in profiles for child in (heading(one.name, len(profiles) > 1), *content(one))]
