"""The width of a text in an unknown font.

The advances come from DejaVu Sans, wider than the sans-serif fonts of common systems: a text that fits in it fits in
those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_PLAIN = """
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
FIRST = 32
"""The code of the first character of the tables; their unit is a thousandth of the font's size."""
PLAIN, BOLD = ([int(width) for width in table.split()] for table in (_PLAIN, _BOLD))
MIDDLE_DOT = {False: 318, True: 380}
UNKNOWN = 1050
"""The advance of every other character: wider than all others but ideographs, and as wide as those."""


@dataclass(frozen=True)
class Run:
    """A piece of a line in one weight."""

    text: str
    bold: bool = False


Line = tuple[Run, ...]


def width_of(text: str, size: float, *, bold: bool = False) -> float:
    """Return the width of a text at a font size, both in pixels."""
    table = BOLD if bold else PLAIN
    total = 0
    for character in text:
        index = ord(character) - FIRST
        if 0 <= index < len(table):
            total += table[index]
        else:
            total += MIDDLE_DOT[bold] if character == "·" else UNKNOWN
    return total * size / 1000


def line_width(line: Iterable[Run], size: float) -> float:
    """Return the width of a line of runs."""
    return sum(width_of(run.text, size, bold=run.bold) for run in line)


def flow(items: Sequence[Run], width: float, size: float) -> list[Line]:
    """Arrange short texts in lines of at most `width`, separated by dots.

    A text that is wider than a line is broken between its words; a word that is wider is cut.
    """
    lines: list[list[Run]] = []
    for item in items:
        for index, piece in enumerate(wrap(item.text, width, size, bold=item.bold)):
            run, gap = Run(piece, item.bold), Run(" · ")
            if index == 0 and lines and line_width([*lines[-1], gap, run], size) <= width:
                lines[-1] += [gap, run]
            else:
                lines.append([run])
    return [tuple(line) for line in lines]


def wrap(text: str, width: float, size: float, *, bold: bool = False) -> list[str]:
    """Break a text into lines of at most `width`."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if width_of(longer, size, bold=bold) <= width:
            lines[-1] = longer
        elif lines[-1]:
            lines.append(cut(word, width, size, bold=bold))
        else:
            lines[-1] = cut(word, width, size, bold=bold)
    return [line for line in lines if line]


def cut(text: str, width: float, size: float, *, bold: bool = False) -> str:
    """Shorten a text to `width`, with dots for the omitted rest."""
    if width_of(text, size, bold=bold) <= width:
        return text
    while text and width_of(f"{text}...", size, bold=bold) > width:
        text = text[:-1]
    return f"{text}..."
