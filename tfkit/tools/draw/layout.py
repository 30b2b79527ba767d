"""Nodes on the canvas: a stack as a tower of layers, whose sublayers have norms and residual paths; else boxes.

A box contains, from top to bottom, its title and parameters, notes, chips, and inner boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tfkit.tools.common.units import count_text
from tfkit.tools.draw.canvas import (
    Canvas,
    Differing,
    Disc,
    Line,
    Rect,
    TextRun,
    Words,
    joined_lines,
    line_width,
    role_class,
    shortened_text,
    width_of,
    wrapped_lines,
)
from tfkit.tools.draw.scene import COUNT, MISSING, Added, Box, Chain, Chip, DrawnLayer, Mark, Node, Note, Segment, Tower

TITLE, NOTE, CHIP = 12.5, 11.0, 10.5
"""Font sizes of titles, of notes and of chips."""
PAD, ROW, CHIP_ROW = 10.0, 14.5, 13.0
"""Space at the sides of a box, and heights of lines."""
THIN = 24.0
"""Height of a box with only a title."""
PART, PART_GAP = 34.0, 5.0
"""Height of an inner box, and the space between two inner boxes."""


def count_of(box: Box) -> str:
    """Format the parameter count of a box."""
    count = count_text(box.parameters) if box.parameters else ""
    return " + ".join(text for text in ("tied" if box.tied else "", count) if text)


def note_runs(notes: Iterable[Note], differing: Differing) -> list[TextRun]:
    """Format notes as runs of text, with differences marked."""
    return [TextRun(note.text, differing.look(note.key)) for note in notes]


def natural_width(box: Box) -> float:
    """Return a width that fits the title and the longest word of the notes."""
    title = width_of(box.title, TITLE, bold=True) + 12 + width_of(count_of(box), NOTE, bold=True)
    notes = [width_of(note.text, NOTE, bold=True) for note in box.notes]
    return 2 * PAD + max([title, *(width for width in notes if width < 200)])


@dataclass(frozen=True)
class Content:
    """The contents of a box, in lines of at most its width."""

    box: Box
    width: float
    notes: list[Line]
    chips: list[list[tuple[Chip, list[str], float]]]
    differing: Differing

    @classmethod
    def of(cls, canvas: Canvas, box: Box, width: float) -> Content:
        """Break the texts of a box into lines."""
        differing = canvas.differing(box.key)
        inside = width - 2 * PAD
        return cls(
            box,
            width,
            joined_lines(note_runs(box.notes, differing), inside, NOTE),
            _chip_rows(box.chips, inside, differing),
            differing,
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
    """Draw a box above `bottom`, centred on `cx`. Return its top."""
    box, width = content.box, content.width
    left, top = cx - width / 2, bottom - content.height
    canvas.anchors[box.key] = (left, top, left + width, bottom)
    outline = f"box {role_class(box.role)} {content.differing.look()}".strip()
    with canvas.group(box.key, box.title, box.tip):
        if box.parts:
            for shift in (6, 3):
                canvas.front.append(
                    Rect(left + shift, top - shift, width, content.height, 5, f"box {role_class(box.role)}")
                )
        canvas.front.append(Rect(left, top, width, content.height, 5, outline))
        look = content.differing.look("title", MISSING) or "bold"
        canvas.text(left + PAD, top + 16.5, box.title, TITLE, look)
        count = count_of(box)
        if count:
            look = content.differing.look(COUNT, "tie") or "muted"
            canvas.text(left + width - PAD, top + 16.5, count, NOTE, look, "end")
        y = top + 27
        for line in content.notes:
            canvas.front.append(Words(left + PAD, y + 4.5, line, NOTE))
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
            look = content.differing.look(chip.key)
            height = CHIP_ROW * len(lines) + 4
            canvas.front.append(Rect(x, y - 3, width, height, 8, f"chip {role_class(chip.role)}"))
            for index, line in enumerate(lines):
                canvas.text(x + 8, y + 8.5 + CHIP_ROW * index, line, CHIP, look)
            x += width + 5
        y += _row_height(row) + 4
    return y


def _place_parts(canvas: Canvas, parts: Sequence[Box], left: float, y: float, width: float) -> None:
    """Draw the inner boxes in a row. Each gets the width that it needs and a part of the remaining space."""
    needs = [_part_width(part) for part in parts]
    spare = (width - sum(needs) - PART_GAP * (len(parts) - 1)) / len(parts)
    x = left
    for part, need in zip(parts, needs, strict=True):
        wide = need + spare
        canvas.front.append(Rect(x, y - 3, wide, PART, 4, "box part"))
        inside = shortened_text(part.title, wide - 6, CHIP, bold=True)
        canvas.text(x + wide / 2, y + 10.5, inside, CHIP, "bold", "middle")
        canvas.text(x + wide / 2, y + 24.5, shortened_text(count_of(part), wide - 6, CHIP), CHIP, "muted", "middle")
        x += wide + PART_GAP


def _part_width(part: Box) -> float:
    return max(width_of(part.title, CHIP, bold=True), width_of(count_of(part), CHIP)) + 10


def _part_rows(parts: Sequence[Box], width: float) -> list[list[Box]]:
    """Distribute inner boxes over rows, as many per row as fit."""
    rows: list[list[Box]] = []
    for part in parts:
        if rows and sum(_part_width(box) + PART_GAP for box in rows[-1]) + _part_width(part) <= width:
            rows[-1].append(part)
        else:
            rows.append([part])
    return rows


def _chip_rows(chips: Sequence[Chip], width: float, differing: Differing) -> list[list[tuple[Chip, list[str], float]]]:
    """Distribute chips over rows; each chip comes with its lines and its width."""
    rows: list[list[tuple[Chip, list[str], float]]] = []
    used = width
    for chip in chips:
        look = differing.look(chip.key)
        text = f"{chip.text} · {count_text(chip.parameters)}" if chip.parameters else chip.text
        lines = wrapped_lines(text, width - 16, CHIP, bold=look == "cause")
        wide = 16 + max(line_width((TextRun(line, look),), CHIP) for line in lines)
        if used + 5 + wide > width:
            rows.append([])
            used = -5
        rows[-1].append((chip, lines, wide))
        used += 5 + wide
    return rows


def _row_height(row: Sequence[tuple[Chip, list[str], float]]) -> float:
    return max(CHIP_ROW * len(lines) + 4 for _, lines, _ in row)


WIDTH = 250.0
"""Width of a box without a parallel box."""
GAP, STEP = 10.0, 12.0
"""Space between two boxes of a branch, and around a point where lines meet."""
TURN = 6.0
"""Distance from the point where a line turns upwards to its end."""
BRANCH_GAP = 14.0
"""Space between two branches."""
RADIUS = 7.0
"""Radius of the circle at an addition."""
SIDE = 28.0
"""Distance from the boxes to the sides of a frame. Residual paths run in this space."""
RAIL = 13.0
"""Distance from the boxes to a residual path."""


def branch_widths(segment: Segment) -> list[float]:
    """Return the width of each branch of a segment."""
    if len(segment.branches) == 1:
        return [WIDTH]
    boxes = [[item for item in branch if isinstance(item, Box)] for branch in segment.branches]
    return [max([180.0, *(natural_width(box) for box in branch)]) for branch in boxes]


def inner_width(layers: Iterable[DrawnLayer]) -> float:
    """Return the total width of the boxes of layers, side by side if they are parallel."""
    widths = [WIDTH]
    for layer in layers:
        for segment in layer.segments:
            each = branch_widths(segment)
            widths.append(sum(each) + BRANCH_GAP * (len(each) - 1))
    return max(widths)


def side_width(layers: Iterable[DrawnLayer]) -> float:
    """Return the distance from the boxes of layers to the sides of their frames."""
    factors = [segment.factor for layer in layers for segment in layer.segments if segment.factor is not None]
    return SIDE + max([0.0, *map(natural_width, factors)])


@dataclass(frozen=True)
class LayerPlacer:
    """Draws layers around the line x = cx. `inner` is the width that the boxes of all layers need."""

    canvas: Canvas
    cx: float
    inner: float
    side: float

    def place(self, layer: DrawnLayer, bottom: float, header: StackHeader) -> float:
        """Draw a layer with its frame above `bottom`. Return its top."""
        y = bottom
        for segment in layer.segments:
            y = self._segment(segment, y, bottom - STEP)
        half = self.inner / 2 + self.side
        top = header.place(self.canvas, self.cx - half, y - STEP, 2 * half)
        self.canvas.way((self.cx, y), (self.cx, top))
        self.canvas.back.append(Rect(self.cx - half, top, 2 * half, bottom - top, 10, "frame"))
        return top

    def _segment(self, segment: Segment, bottom: float, entrance: float) -> float:
        """Draw a segment above `bottom`. The line of the layer's input is at the height `entrance`."""
        canvas, cx = self.canvas, self.cx
        if segment.before is not None:
            bottom = place_above(canvas, segment.before, cx, bottom)
        if not segment.branches and segment.after is not None:
            return place_above(canvas, segment.after, cx, bottom)
        fork = bottom - STEP
        canvas.way((cx, bottom), (cx, fork))
        y = fork - (GAP if segment.reads_input else 0)
        if segment.reads_input:
            left = cx - self.inner / 2 - RAIL
            canvas.way((cx, entrance), (left, entrance), (left, y), (cx, y))
            canvas.lines.append(Disc(cx, entrance, 2.5, "dot"))
        elif segment.onto == "previous":
            canvas.lines.append(Disc(cx, fork, 2.5, "dot"))
        if segment.stem is not None:
            y = place_above(canvas, segment.stem, cx, y)
        y, normed = self._branches(segment, y)
        if segment.write is not None:
            top = place_above(canvas, segment.write, cx, y)
            self._residual(segment, fork, (y - GAP + top) / 2, edge=WIDTH / 2)
            y = top
        elif segment.onto != "nothing":
            plus = y - STEP - RADIUS
            canvas.way((cx, y), (cx, plus + RADIUS), arrow=True)
            self._residual(segment, fork if segment.onto == "previous" else normed, plus, edge=RADIUS)
            canvas.lines.append(Disc(cx, plus, RADIUS, "plus", _segment_key(segment)))
            y = plus - RADIUS
        return y if segment.after is None else place_above(canvas, segment.after, cx, y)

    def _branches(self, segment: Segment, y: float) -> tuple[float, float]:
        """Draw the branches above y. Return the y where they meet, and the top of the last branch's first box."""
        widths = branch_widths(segment)
        x = self.cx - (sum(widths) + BRANCH_GAP * (len(widths) - 1)) / 2
        tops, centres, normed = [], [], y
        apart = len(widths) > 1
        start = y - STEP - TURN if apart else y
        for branch, width in zip(segment.branches, widths, strict=True):
            centre, top = x + width / 2, start
            if apart:
                self.canvas.way((self.cx, y), (self.cx, y - STEP), (centre, y - STEP), (centre, start))
            for index, item in enumerate(branch):
                top = place_above(self.canvas, item, centre, top, width)
                normed = top - GAP / 2 if index == 0 else normed
            tops.append(top)
            centres.append(centre)
            x += width + BRANCH_GAP
        if not apart:
            return tops[0], normed
        meet = min(tops) - STEP
        for centre, top in zip(centres, tops, strict=True):
            self.canvas.way((centre, top), (centre, meet), (self.cx, meet))
        return meet, normed

    def _residual(self, segment: Segment, start: float, end: float, edge: float) -> None:
        """Draw the residual path around the branches, from height `start` to `end`, `edge` right of the centre."""
        cx, key = self.cx, _segment_key(segment)
        x = cx + self.inner / 2 + RAIL
        if segment.factor is not None:
            width = natural_width(segment.factor)
            x += width / 2
            middle = (start + end) / 2
            content = Content.of(self.canvas, segment.factor, width)
            place_box(self.canvas, content, x, middle + content.height / 2)
        if segment.onto == "normed":
            self.canvas.lines.append(Disc(cx, start, 2.5, "dot"))
        points = ((cx, start), (x, start), (x, end), (cx + edge, end))
        start_name = f"{'normed' if segment.onto == 'normed' else 'stream'} of {key}"
        self.canvas.way(*points, look="line residual", arrow=True, start=start_name, end=key)


def _segment_key(segment: Segment) -> str:
    return next(box.key for box in segment.boxes() if box.role not in ("norm", "step"))


def place_above(canvas: Canvas, item: Box | Mark, cx: float, bottom: float, width: float = WIDTH) -> float:
    """Draw a box with a line below it, or a mark next to the line, above `bottom`. Return its top."""
    if isinstance(item, Box):
        edge = bottom - GAP
        canvas.way((cx, bottom), (cx, edge), arrow=True)
        return place_box(canvas, Content.of(canvas, item, width), cx, edge)
    top = bottom - 18
    canvas.way((cx, bottom), (cx, top))
    canvas.text(cx + 7, bottom - 5, item.text, NOTE, canvas.differing(item.key).look())
    return top


@dataclass(frozen=True)
class StackHeader:
    """The header of a frame: a name, the number of repetitions, and notes."""

    name: str
    times: str
    notes: tuple[Note, ...]
    differing: Differing = field(default_factory=Differing)
    swatch: int | None = None

    def place(self, canvas: Canvas, left: float, bottom: float, width: float) -> float:
        """Draw the header above `bottom`. Return its top."""
        lines = joined_lines(note_runs(self.notes, self.differing), width - 24, NOTE)
        height = 27 + 14.5 * len(lines)
        top = bottom - height
        canvas.front.append(Rect(left, top, width, height, 10, f"band {self.differing.look()}".strip()))
        x = left + 12
        if self.swatch is not None:
            canvas.front.append(Rect(x, top + 8, 11, 11, 2, f"cell cell{self.swatch % 4}"))
            x += 17
        canvas.text(x, top + 18, self.name, TITLE, self.differing.look(MISSING) or "bold")
        look = self.differing.look("n_layers") or "bold"
        canvas.text(left + width - 12, top + 18.5, self.times, 14, look, "end")
        for index, line in enumerate(lines):
            canvas.front.append(Words(left + 12, top + 32 + 14.5 * index, line, NOTE, "muted"))
        return top


def header_of(
    layer: DrawnLayer, differing: Differing, notes: tuple[Note, ...] = (), swatch: int | None = None
) -> StackHeader:
    """Return the header of a layer's frame."""
    each = (Note(COUNT, f"{count_text(layer.parameters)} a layer"),) if layer.times > 1 else ()
    return StackHeader(layer.name, f"× {layer.times}", (*notes, *layer.notes, *each), differing, swatch)


BESIDE = 22.0
"""Distance from the line to a box at its side."""
MARGIN, STRIP = 14.0, 14.0
"""Space around the layers of a stack with variants, and width of the strip that shows the variant of each layer."""


def place_node(canvas: Canvas, node: Node, cx: float, bottom: float) -> float:
    """Draw a node above `bottom`. Return its top."""
    if isinstance(node, Chain):
        return _draw_chain(canvas, node, cx, bottom)
    top = _draw_tower(canvas, node, cx, bottom)
    return top if node.closing is None else place_above(canvas, node.closing, cx, top)


def _draw_chain(canvas: Canvas, chain: Chain, cx: float, bottom: float) -> float:
    y = bottom
    for index, item in enumerate(chain.items):
        if isinstance(item, Added):
            y = _draw_addition(canvas, item.box, cx, y)
        elif index == 0 and isinstance(item, Box):
            y = place_box(canvas, Content.of(canvas, item, WIDTH), cx, y)
        else:
            y = place_above(canvas, item, cx, y)
    return y


def _draw_addition(canvas: Canvas, box: Box, cx: float, bottom: float) -> float:
    """Draw an addition: a circle on the line, and next to it the box whose output is added."""
    content = Content.of(canvas, side_box(box), side_box_width(box))
    middle = bottom - GAP / 2 - content.height / 2
    left = cx + RADIUS + BESIDE
    top = place_box(canvas, content, left + content.width / 2, middle + content.height / 2)
    canvas.way((left, middle), (cx + RADIUS, middle), arrow=True)
    canvas.way((cx, bottom), (cx, middle + RADIUS), arrow=True)
    canvas.lines.append(Disc(cx, middle, RADIUS, "plus", box.key))
    canvas.way((cx, middle - RADIUS), (cx, top - GAP / 2))
    return top - GAP / 2


def _draw_tower(canvas: Canvas, tower: Tower, cx: float, bottom: float) -> float:
    placer = LayerPlacer(canvas, cx, inner_width(tower.layers), side_width(tower.layers))
    total = (Note("total", f"{count_text(tower.parameters)} in all"),)
    if len(tower.layers) == 1:
        (layer,) = tower.layers
        stack, each = canvas.differing(tower.key), canvas.differing(layer.key)
        differing = Differing(stack.causes | each.causes, stack.consequences | each.consequences)
        header = header_of(layer, differing, (*tower.notes, *total))
        if layer.times == 1 and not differing.look("n_layers"):
            header = replace(header, times="")
        return placer.place(layer, bottom, header)
    y = bottom - MARGIN
    canvas.way((cx, bottom), (cx, y))
    for index, layer in enumerate(tower.layers):
        if index:
            canvas.way((cx, y), (cx, y - MARGIN), arrow=True)
            y -= MARGIN
        y = placer.place(layer, y, header_of(layer, canvas.differing(layer.key), swatch=index))
    half = placer.inner / 2 + placer.side + MARGIN
    left = cx - half - STRIP - 4
    times = f"× {sum(layer.times for layer in tower.layers)}"
    header = StackHeader(tower.name, times, (*tower.notes, *total), canvas.differing(tower.key))
    top = header.place(canvas, left, y - MARGIN, cx + half - left)
    canvas.way((cx, y), (cx, top))
    canvas.back.insert(0, Rect(left, top, cx + half - left, bottom - top, 10, "frame outer"))
    _draw_layer_strip(canvas, tower, left + 9, bottom - MARGIN, y)
    return top


def _draw_layer_strip(canvas: Canvas, tower: Tower, x: float, bottom: float, top: float) -> None:
    """Draw a cell for each layer, the first at the bottom, in the colour of its variant."""
    height = (bottom - top) / len(tower.order)
    gap = 1.0 if height > 3 else 0.0
    for number, kind in enumerate(tower.order):
        y = bottom - height * (number + 1)
        canvas.back.append(Rect(x, y, STRIP - 4, height - gap, 1, f"cell cell{kind % 4}"))


def node_extent(node: Node) -> tuple[float, float]:
    """Return the widths of a node to the left and to the right of its line."""
    if isinstance(node, Tower):
        half = inner_width(node.layers) / 2 + side_width(node.layers)
        if len(node.layers) == 1:
            return half, half
        return half + MARGIN + STRIP + 4, half + MARGIN
    if not node.items:
        half = width_of(node.name, TITLE) / 2
        return half, half
    sides = [side_box_width(item.box) + RADIUS + BESIDE for item in node.items if isinstance(item, Added)]
    return WIDTH / 2, max([WIDTH / 2, *sides])


def side_box(box: Box) -> Box:
    """Return a narrow version of a box for the side of a line. Its parameters become a note."""
    if not box.parameters:
        return box
    return replace(box, notes=(*box.notes, Note("parameters", count_text(box.parameters))), parameters=0)


def side_box_width(box: Box) -> float:
    """Return the width of a box at the side of a line."""
    widths = [width_of(note.text, NOTE, bold=True) for note in side_box(box).notes]
    return 20 + max([width_of(box.title, TITLE, bold=True), *widths]) + (0 if count_of(side_box(box)) == "" else 60)
