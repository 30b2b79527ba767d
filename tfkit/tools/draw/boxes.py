"""A box on the canvas: its title and parameters, notes below, then chips and the boxes inside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tfkit.tools.common.units import short
from tfkit.tools.draw.scene import COUNT, MISSING, Box, Chip, Note
from tfkit.tools.draw.shapes import Canvas, Line, Rect, Run, Words, cut, flow, line_width, role, width_of, wrap

TITLE, SMALL, CHIP = 12.5, 11.0, 10.5
"""Sizes of fonts."""
PAD, ROW, CHIP_ROW = 10.0, 14.5, 13.0
"""Space at the sides of a box, and heights of lines."""
THIN = 24.0
"""Height of a box with only a title."""
PART, PART_GAP = 34.0, 5.0
"""Height of a box inside a box, and the space between two."""


def count_of(box: Box) -> str:
    """Format the parameter count of a box."""
    count = short(box.parameters) if box.parameters else ""
    return " + ".join(text for text in ("tied" if box.tied else "", count) if text)


def runs(notes: Iterable[Note], differing: frozenset[str]) -> list[Run]:
    """Format notes as runs of text, with differences in bold."""
    return [Run(note.text, note.key in differing) for note in notes]


def natural_width(box: Box) -> float:
    """Return a width that fits the title and the longest word of the notes."""
    title = width_of(box.title, TITLE, bold=True) + 12 + width_of(count_of(box), SMALL, bold=True)
    notes = [width_of(note.text, SMALL, bold=True) for note in box.notes]
    return 2 * PAD + max([title, *(width for width in notes if width < 200)])


@dataclass(frozen=True)
class Content:
    """The contents of a box, in lines of at most its width."""

    box: Box
    width: float
    notes: list[Line]
    chips: list[list[tuple[Chip, list[str], float]]]
    differing: frozenset[str]

    @classmethod
    def of(cls, canvas: Canvas, box: Box, width: float) -> Content:
        """Break the texts of a box into lines."""
        differing = canvas.differing(box.key)
        inside = width - 2 * PAD
        return cls(
            box, width, flow(runs(box.notes, differing), inside, SMALL), _rows(box.chips, inside, differing), differing
        )

    @property
    def height(self) -> float:
        """Height of the box."""
        if not (self.notes or self.chips or self.box.parts):
            return THIN
        chips = sum(_row_height(row) + 4 for row in self.chips)
        return (
            27
            + ROW * len(self.notes)
            + chips
            + (PART + 4) * len(_part_rows(self.box.parts, self.width - 2 * PAD))
            - (4 if self.box.parts else 1)
        )


def place_box(canvas: Canvas, content: Content, cx: float, bottom: float) -> float:
    """Put a box above `bottom`, centred; returns its top."""
    box, width = content.box, content.width
    left, top = cx - width / 2, bottom - content.height
    canvas.anchors[box.key] = (left, top, left + width, bottom)
    outline = " differs" if content.differing else ""
    with canvas.group(box.key, box.title, box.tip):
        if box.parts:
            for shift in (6, 3):
                canvas.front.append(Rect(left + shift, top - shift, width, content.height, 5, f"box {role(box.role)}"))
        canvas.front.append(Rect(left, top, width, content.height, 5, f"box {role(box.role)}{outline}"))
        look = "bold accent" if content.differing & {"title", MISSING} else "bold"
        canvas.text(left + PAD, top + 16.5, box.title, TITLE, look)
        count = count_of(box)
        if count:
            look = "bold accent" if COUNT in content.differing else "muted"
            canvas.text(left + width - PAD, top + 16.5, count, SMALL, look, "end")
        y = top + 27
        for line in content.notes:
            canvas.front.append(Words(left + PAD, y + 4.5, line, SMALL))
            y += ROW
        y = _place_chips(canvas, content, left + PAD, y)
        if box.parts:
            for row in _part_rows(box.parts, width - 2 * PAD):
                _place_parts(canvas, row, left + PAD, y, width - 2 * PAD)
                y += PART + 4
    return top


def _place_chips(canvas: Canvas, content: Content, left: float, y: float) -> float:
    for row in content.chips:
        x = left
        for chip, lines, width in row:
            bold = "bold accent" if chip.key in content.differing else ""
            height = CHIP_ROW * len(lines) + 4
            canvas.front.append(Rect(x, y - 3, width, height, 8, f"chip {role(chip.role)}"))
            for index, line in enumerate(lines):
                canvas.text(x + 8, y + 8.5 + CHIP_ROW * index, line, CHIP, bold)
            x += width + 5
        y += _row_height(row) + 4
    return y


def _place_parts(canvas: Canvas, parts: Sequence[Box], left: float, y: float, width: float) -> None:
    """Place the inner boxes in a row. Each gets the width that it needs and a share of the remaining space."""
    needs = [_need(part) for part in parts]
    spare = (width - sum(needs) - PART_GAP * (len(parts) - 1)) / len(parts)
    x = left
    for part, need in zip(parts, needs, strict=True):
        wide = need + spare
        canvas.front.append(Rect(x, y - 3, wide, PART, 4, "box part"))
        inside = cut(part.title, wide - 6, CHIP, bold=True)
        canvas.text(x + wide / 2, y + 10.5, inside, CHIP, "bold", "middle")
        canvas.text(x + wide / 2, y + 24.5, cut(count_of(part), wide - 6, CHIP), CHIP, "muted", "middle")
        x += wide + PART_GAP


def _need(part: Box) -> float:
    return max(width_of(part.title, CHIP, bold=True), width_of(count_of(part), CHIP)) + 10


def _part_rows(parts: Sequence[Box], width: float) -> list[list[Box]]:
    """Distribute inner boxes over rows, as many per row as fit."""
    rows: list[list[Box]] = []
    for part in parts:
        if rows and sum(_need(box) + PART_GAP for box in rows[-1]) + _need(part) <= width:
            rows[-1].append(part)
        else:
            rows.append([part])
    return rows


def _rows(chips: Sequence[Chip], width: float, differing: frozenset[str]) -> list[list[tuple[Chip, list[str], float]]]:
    """Distribute chips over rows; each chip comes with its lines and its width."""
    rows: list[list[tuple[Chip, list[str], float]]] = []
    used = width
    for chip in chips:
        bold = chip.key in differing
        text = f"{chip.text} · {short(chip.parameters)}" if chip.parameters else chip.text
        lines = wrap(text, width - 16, CHIP, bold=bold)
        wide = 16 + max(line_width((Run(line, bold),), CHIP) for line in lines)
        if used + 5 + wide > width:
            rows.append([])
            used = -5
        rows[-1].append((chip, lines, wide))
        used += 5 + wide
    return rows


def _row_height(row: Sequence[tuple[Chip, list[str], float]]) -> float:
    return max(CHIP_ROW * len(lines) + 4 for _, lines, _ in row)
