"""The elements of a picture: colours, widths of texts, and shapes in pixels, y downwards.

Every text and line has a colour for light and a colour for dark surroundings. Widths of texts come from DejaVu Sans,
which is wider than the sans-serif fonts of common systems: a text that fits in it fits in every font.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Theme = Literal["auto", "light", "dark"]
FONTS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif'

FILLS = {
    # role: light fill, light outline, dark fill, dark outline
    "attention": ("#ffe1bd", "#d9964a", "#5c3f1b", "#b9813f"),
    "cross_attention": ("#ffd3cc", "#d97766", "#5f2f2a", "#c06a5e"),
    "ffn": ("#cfe6fb", "#6ca4d4", "#1f4263", "#5590c4"),
    "norm": ("#f8f2bd", "#c4b545", "#4b4716", "#a0963b"),
    "embedding": ("#fcd7e3", "#d6829f", "#5b2a3d", "#b9668a"),
    "position": ("#d5f1d6", "#72b577", "#20482a", "#559c5f"),
    "head": ("#e0d9f8", "#9683d6", "#3c3068", "#8675c4"),
    "step": ("#eceff2", "#a3abb4", "#31383f", "#757f8a"),
    "block": ("#e3edec", "#82a8a4", "#23403e", "#5f908b"),
}
DEFAULT_ROLE = "step"
"""Role whose colours apply to roles without colours."""
CELLS = (("#7b8794", "#8b96a3"), ("#d9964a", "#b9813f"), ("#6ca4d4", "#5590c4"), ("#9683d6", "#8675c4"))
"""The colours of layers that differ, light and dark."""
INKS = {
    # name: light, dark
    "text": ("#1c2127", "#edf1f5"),
    "muted": ("#4a525b", "#b8c1cb"),
    "line": ("#4f5963", "#a3adb8"),
    "memory": ("#b4432f", "#f0907f"),
    "tie": ("#7a4fc0", "#b79af0"),
    "cause": ("#0a4fc4", "#8fbcff"),
    "page": ("#ffffff", "#12161c"),
    "edge": ("#d5dae0", "#323a43"),
    "frame": ("#f5f7f9", "#1a2027"),
    "band": ("#e6eaee", "#2a323b"),
    "inside": ("#ffffff", "#12161c"),
}


def role_class(slot: str) -> str:
    """Return the class of a box in the colours of a slot."""
    return f"r-{slot if slot in FILLS else DEFAULT_ROLE}"


def css_rules(theme: Theme, used: set[str]) -> str:
    """Return the rules for the classes in `used`. With `auto`, a picture follows the reader's system preference."""
    shape = (
        f"text{{font-family:{FONTS}}}.bold{{font-weight:700}}"
        ".line{fill:none;stroke-width:1.4}.residual{stroke-width:1.8}.tie{stroke-dasharray:5 4}"
        ".box,.chip,.frame,.band,.page{stroke-width:1}.plus{stroke-width:1.4}"
        ".cause{font-weight:700}.consequence{font-style:italic}rect.cause{stroke-width:2.6}"
        "rect.consequence{stroke-width:1.6;stroke-dasharray:4 3}"
    )
    light, dark = _colour_rules(0, used), _colour_rules(1, used)
    if theme == "auto":
        return f"{shape}{light}@media(prefers-color-scheme:dark){{{dark}}}"
    return shape + (light if theme == "light" else dark)


def _colour_rules(which: int, used: set[str]) -> str:
    ink = {name: pair[which] for name, pair in INKS.items()}
    rules = [
        f"text{{fill:{ink['text']}}}.muted{{fill:{ink['muted']}}}.line,.plus{{stroke:{ink['line']}}}",
        f".tip,.dot{{fill:{ink['line']}}}.plus{{fill:{ink['page']}}}",
        f".page{{fill:{ink['page']};stroke:{ink['edge']}}}.frame{{fill:{ink['frame']};stroke:{ink['edge']}}}",
        f".band{{fill:{ink['band']};stroke:{ink['edge']}}}",
    ]
    rules += [f".{way}{{stroke:{ink[way]}}}.tip.{way}{{fill:{ink[way]};stroke:none}}" for way in ("memory", "tie")]
    for name in sorted(FILLS):
        fill, outline = FILLS[name][2 * which : 2 * which + 2]
        if role_class(name) in used:
            rules.append(f".{role_class(name)}{{fill:{fill};stroke:{outline}}}")
    rules.append(f".part{{fill:{ink['inside']};fill-opacity:.55}}")
    for number, pair in enumerate(CELLS):
        if f"cell{number}" in used:
            rules.append(f".cell{number}{{fill:{pair[which]}}}")
    for look, name in (("cause", "cause"), ("consequence", "muted")):
        rules.append(f"text.{look},tspan.{look}{{fill:{ink[name]}}}rect.{look}{{stroke:{ink[name]}}}")
    return "".join(rules)


_REGULAR = """
318 401 460 838 636 950 780 275 390 390 500 838 318 361 318 337 636 636 636 636 636 636 636 636 636 636 337 337 838 838
838 531 1000 684 686 698 770 632 575 775 752 295 295 656 557 863 748 787 603 787 695 635 611 732 684 989 685 611 685 390
337 390 838 500 500 613 635 550 635 615 352 635 634 278 278 579 278 974 634 612 635 635 411 521 392 634 592 818 592 592
525 636 337 636 838
"""
_BOLD = """
348 456 521 838 696 1002 872 306 457 457 523 838 380 415 380 365 696 696 696 696 696 696 696 696 696 696 400 400 838
838 838 580 1000 774 762 734 830 683 683 821 837 372 372 775 637 995 837 850 733 850 770 720 682 812 774 1103 771
724 725 457 365 457 838 500 500 675 716 593 716 678 435 716 712 343 343 665 343 1042 712 687 716 716 493 595 478 712
652 924 645 652 582 712 365 712 838
"""
FIRST_CODE_POINT = 32
"""Code point of the first character in the tables. Widths are in thousandths of the font size."""
REGULAR_WIDTHS, BOLD_WIDTHS = ([int(width) for width in table.split()] for table in (_REGULAR, _BOLD))
MIDDLE_DOT = {False: 318, True: 380}
DEFAULT_WIDTH = 1050
"""Width of characters outside the tables: at least the width of an ideograph."""


@dataclass(frozen=True)
class TextRun:
    """Text of one look in a line. `look` is its class: `bold`, `cause` (bold and coloured) or `consequence`."""

    text: str
    look: str = ""

    @property
    def bold(self) -> bool:
        """True for bold letters."""
        return self.look in ("bold", "cause")


Line = tuple[TextRun, ...]


def width_of(text: str, size: float, *, bold: bool = False) -> float:
    """Return the width of a text at a font size, both in pixels."""
    table = BOLD_WIDTHS if bold else REGULAR_WIDTHS
    total = 0
    for character in text:
        index = ord(character) - FIRST_CODE_POINT
        if 0 <= index < len(table):
            total += table[index]
        else:
            total += MIDDLE_DOT[bold] if character == "·" else DEFAULT_WIDTH
    return total * size / 1000


def line_width(line: Iterable[TextRun], size: float) -> float:
    """Return the width of a line of runs."""
    return sum(width_of(run.text, size, bold=run.bold) for run in line)


def joined_lines(items: Sequence[TextRun], width: float, size: float) -> list[Line]:
    """Arrange short texts in lines of at most `width`, separated by dots.

    A text that is wider than a line is broken between words. A word that is wider than a line is cut.
    """
    lines: list[list[TextRun]] = []
    for item in items:
        for index, piece in enumerate(wrapped_lines(item.text, width, size, bold=item.bold)):
            run, gap = TextRun(piece, item.look), TextRun(" · ")
            if index == 0 and lines and line_width([*lines[-1], gap, run], size) <= width:
                lines[-1] += [gap, run]
            else:
                lines.append([run])
    return [tuple(line) for line in lines]


def wrapped_lines(text: str, width: float, size: float, *, bold: bool = False) -> list[str]:
    """Break a text into lines of at most `width`."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if width_of(longer, size, bold=bold) <= width:
            lines[-1] = longer
        elif lines[-1]:
            lines.append(shortened_text(word, width, size, bold=bold))
        else:
            lines[-1] = shortened_text(word, width, size, bold=bold)
    return [line for line in lines if line]


def shortened_text(text: str, width: float, size: float, *, bold: bool = False) -> str:
    """Shorten a text to `width`. An ellipsis replaces the end."""
    if width_of(text, size, bold=bold) <= width:
        return text
    while text and width_of(f"{text}...", size, bold=bold) > width:
        text = text[:-1]
    return f"{text}..."


@dataclass(frozen=True)
class Differing:
    """Keys of the notes of a box that differ between two pictures.

    Attributes:
        causes: keys of values that the specs set.
        consequences: keys of sizes and counts that follow from these values.
    """

    causes: frozenset[str] = frozenset()
    consequences: frozenset[str] = frozenset()

    def look(self, *keys: str) -> str:
        """Return the class of a text with these keys, or of an outline if there are none; empty if nothing differs."""
        looks = (("cause", self.causes), ("consequence", self.consequences))
        return next((look for look, differing in looks if (differing.intersection(keys) if keys else differing)), "")


Differences = Mapping[str, Differing]
"""Differences from another picture, by the key of a box."""
Anchor = Literal["start", "middle", "end"]
Point = tuple[float, float]


@dataclass(frozen=True)
class Rect:
    """A rectangle with round corners; `look` names its classes."""

    x: float
    y: float
    width: float
    height: float
    radius: float
    look: str


@dataclass(frozen=True)
class Words:
    """A line of text; y is its baseline."""

    x: float
    y: float
    line: Line
    size: float
    look: str = ""
    anchor: Anchor = "start"

    def box(self) -> tuple[float, float, float, float]:
        """Return left, top, right and bottom of an area that contains the text."""
        width = line_width(self.line, self.size)
        left = self.x - {"start": 0.0, "middle": width / 2, "end": width}[self.anchor]
        return left, self.y - 0.8 * self.size, left + width, self.y + 0.22 * self.size


@dataclass(frozen=True)
class Way:
    """A line along points, straight or with round corners. `start` and `end` name the elements that it connects."""

    points: tuple[Point, ...]
    look: str = "line"
    arrow: bool = False
    start: str = ""
    end: str = ""


@dataclass(frozen=True)
class Disc:
    """A small disc where a line branches off; with `plus`, a circle where two lines are added."""

    x: float
    y: float
    radius: float
    look: Literal["dot", "plus"]
    key: str = ""


@dataclass(frozen=True)
class ShapeGroup:
    """The shapes of one box, and its tip."""

    key: str
    title: str
    tip: tuple[tuple[str, str], ...]
    shapes: tuple[Shape, ...]


Shape = Rect | Words | Way | Disc | ShapeGroup


@dataclass
class Canvas:
    """The shapes of one model in the order in which they cover each other: frames, lines, then boxes and texts.

    Attributes:
        differences: the differences to mark.
        anchors: the rectangles (left, top, right, bottom) of boxes that lines lead to, by the box's key.
    """

    differences: Differences = field(default_factory=dict)
    back: list[Shape] = field(default_factory=list)
    lines: list[Shape] = field(default_factory=list)
    front: list[Shape] = field(default_factory=list)
    anchors: dict[str, tuple[float, float, float, float]] = field(default_factory=dict)

    def differing(self, key: str) -> Differing:
        """Return the differences of a box."""
        return self.differences.get(key, Differing())

    def text(self, x: float, y: float, text: str, size: float, look: str = "", anchor: Anchor = "start") -> None:
        """Draw a text in one look: the look of a run, or `muted`."""
        line = (TextRun(text, "" if look == "muted" else look),)
        self.front.append(Words(x, y, line, size, "muted" if look == "muted" else "", anchor))

    def way(self, *points: Point, look: str = "line", arrow: bool = False, start: str = "", end: str = "") -> None:
        """Draw a line along points."""
        self.lines.append(Way(points, look, arrow, start, end))

    @contextmanager
    def group(self, key: str, title: str, tip: tuple[tuple[str, str], ...]) -> Iterator[None]:
        """Group the shapes that are drawn inside the context."""
        outer, self.front = self.front, []
        yield
        outer.append(ShapeGroup(key, title, tip, tuple(self.front)))
        self.front = outer
