"""Nodes on the canvas: a stack as a tower of layers, everything else as a chain of boxes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tfkit.tools.common.units import short
from tfkit.tools.draw.boxes import SMALL, TITLE, Content, Differences, count_of, place_box
from tfkit.tools.draw.layers import (
    GAP,
    RADIUS,
    WIDTH,
    Header,
    LayerPlacer,
    header_of,
    inner_width,
    place_above,
    side_width,
)
from tfkit.tools.draw.scene import Added, Box, Chain, Mark, Node, Note, Tower
from tfkit.tools.draw.shapes import Canvas, Disc, Rect
from tfkit.tools.draw.text import width_of

BESIDE = 22.0
"""From the line to a box at its side."""
MARGIN, STRIP = 14.0, 14.0
"""Space around the layers of a stack that differ, and the width of the strip that shows the variant of each layer."""


@dataclass(frozen=True)
class Placer:
    """Puts nodes on a canvas."""

    canvas: Canvas
    differences: Differences

    def place(self, node: Node, cx: float, bottom: float) -> float:
        """Put a node above `bottom`; returns its top."""
        if isinstance(node, Chain):
            return self._chain(node, cx, bottom)
        top = self._layers(node, cx, bottom)
        return top if node.closing is None else self._above(node.closing, cx, top)

    def _above(self, item: Box | Mark, cx: float, bottom: float) -> float:
        return place_above(self.canvas, item, cx, bottom, WIDTH, self.differences)

    def _chain(self, chain: Chain, cx: float, bottom: float) -> float:
        y = bottom
        for index, item in enumerate(chain.items):
            if isinstance(item, Added):
                y = self._added(item.box, cx, y)
            elif index == 0 and isinstance(item, Box):
                y = place_box(self.canvas, Content.of(item, WIDTH, self.differences), cx, y)
            else:
                y = self._above(item, cx, y)
        return y

    def _added(self, box: Box, cx: float, bottom: float) -> float:
        """A circle on the line, and at its side the box that is added there."""
        content = Content.of(beside(box), beside_width(box), self.differences)
        middle = bottom - GAP / 2 - content.height / 2
        left = cx + RADIUS + BESIDE
        top = place_box(self.canvas, content, left + content.width / 2, middle + content.height / 2)
        self.canvas.way((left, middle), (cx + RADIUS, middle), arrow=True)
        self.canvas.way((cx, bottom), (cx, middle + RADIUS), arrow=True)
        self.canvas.lines.append(Disc(cx, middle, RADIUS, "plus", box.key))
        self.canvas.way((cx, middle - RADIUS), (cx, top - GAP / 2))
        return top - GAP / 2

    def _layers(self, tower: Tower, cx: float, bottom: float) -> float:
        placer = LayerPlacer(self.canvas, cx, inner_width(tower.layers), side_width(tower.layers), self.differences)
        total = (Note("total", f"{short(tower.parameters)} in all"),)
        if len(tower.layers) == 1:
            keys = (tower.key, tower.layers[0].key)
            differing = frozenset[str]().union(*(self.differences.get(key, frozenset()) for key in keys))
            header = header_of(tower.layers[0], differing, (*tower.notes, *total))
            return placer.place(tower.layers[0], bottom, header)
        y = bottom - MARGIN
        self.canvas.way((cx, bottom), (cx, y))
        for index, layer in enumerate(tower.layers):
            if index:
                self.canvas.way((cx, y), (cx, y - MARGIN), arrow=True)
                y -= MARGIN
            differing = self.differences.get(layer.key, frozenset())
            y = placer.place(layer, y, header_of(layer, differing, swatch=index))
        half = placer.inner / 2 + placer.side + MARGIN
        left = cx - half - STRIP - 4
        header = Header(
            tower.name,
            f"× {sum(layer.times for layer in tower.layers)}",
            (*tower.notes, *total),
            (),
            self.differences.get(tower.key, frozenset()),
        )
        top = header.place(self.canvas, left, y - MARGIN, cx + half - left)
        self.canvas.way((cx, y), (cx, top))
        self.canvas.back.insert(0, Rect(left, top, cx + half - left, bottom - top, 10, "frame outer"))
        self._strip(tower, left + 9, bottom - MARGIN, y)
        return top

    def _strip(self, tower: Tower, x: float, bottom: float, top: float) -> None:
        """A cell for each layer, the first at the bottom, in the colour of its variant."""
        height = (bottom - top) / len(tower.order)
        gap = 1.0 if height > 3 else 0.0
        for number, kind in enumerate(tower.order):
            y = bottom - height * (number + 1)
            self.canvas.back.append(Rect(x, y, STRIP - 4, height - gap, 1, f"cell cell{kind % 4}"))


def extent(node: Node) -> tuple[float, float]:
    """The extent of a node to the left and to the right of its line."""
    if isinstance(node, Tower):
        half = inner_width(node.layers) / 2 + side_width(node.layers)
        if len(node.layers) == 1:
            return half, half
        return half + MARGIN + STRIP + 4, half + MARGIN
    if not node.items:
        half = width_of(node.name, TITLE) / 2
        return half, half
    sides = [beside_width(item.box) + RADIUS + BESIDE for item in node.items if isinstance(item, Added)]
    return WIDTH / 2, max([WIDTH / 2, *sides])


def beside(box: Box) -> Box:
    """A box at the side of a line: narrow, its parameters among the notes."""
    if not box.parameters:
        return box
    return replace(box, notes=(*box.notes, Note("parameters", short(box.parameters))), parameters=0)


def beside_width(box: Box) -> float:
    """The width of a box at the side of a line."""
    widths = [width_of(note.text, SMALL, bold=True) for note in beside(box).notes]
    return 20 + max([width_of(box.title, TITLE, bold=True), *widths]) + (0 if count_of(beside(box)) == "" else 60)
