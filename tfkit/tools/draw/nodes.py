"""Nodes on the canvas: a stack as a tower of layers, everything else as a chain of boxes."""

from __future__ import annotations

from dataclasses import replace

from tfkit.tools.common.units import short
from tfkit.tools.draw.boxes import SMALL, TITLE, Content, count_of, place_box
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
from tfkit.tools.draw.scene import Added, Box, Chain, Node, Note, Tower
from tfkit.tools.draw.shapes import Canvas, Disc, Rect
from tfkit.tools.draw.text import width_of

BESIDE = 22.0
"""From the line to a box at its side."""
MARGIN, STRIP = 14.0, 14.0
"""Space around the layers of a stack that differ, and the width of the strip that shows the variant of each layer."""


def place_node(canvas: Canvas, node: Node, cx: float, bottom: float) -> float:
    """Put a node above `bottom`; returns its top."""
    if isinstance(node, Chain):
        return _chain(canvas, node, cx, bottom)
    top = _layers(canvas, node, cx, bottom)
    return top if node.closing is None else place_above(canvas, node.closing, cx, top)


def _chain(canvas: Canvas, chain: Chain, cx: float, bottom: float) -> float:
    y = bottom
    for index, item in enumerate(chain.items):
        if isinstance(item, Added):
            y = _added(canvas, item.box, cx, y)
        elif index == 0 and isinstance(item, Box):
            y = place_box(canvas, Content.of(canvas, item, WIDTH), cx, y)
        else:
            y = place_above(canvas, item, cx, y)
    return y


def _added(canvas: Canvas, box: Box, cx: float, bottom: float) -> float:
    """Draw a circle on the line, and next to it the box that is added there."""
    content = Content.of(canvas, beside(box), beside_width(box))
    middle = bottom - GAP / 2 - content.height / 2
    left = cx + RADIUS + BESIDE
    top = place_box(canvas, content, left + content.width / 2, middle + content.height / 2)
    canvas.way((left, middle), (cx + RADIUS, middle), arrow=True)
    canvas.way((cx, bottom), (cx, middle + RADIUS), arrow=True)
    canvas.lines.append(Disc(cx, middle, RADIUS, "plus", box.key))
    canvas.way((cx, middle - RADIUS), (cx, top - GAP / 2))
    return top - GAP / 2


def _layers(canvas: Canvas, tower: Tower, cx: float, bottom: float) -> float:
    placer = LayerPlacer(canvas, cx, inner_width(tower.layers), side_width(tower.layers))
    total = (Note("total", f"{short(tower.parameters)} in all"),)
    if len(tower.layers) == 1:
        (layer,) = tower.layers
        differing = canvas.differing(tower.key) | canvas.differing(layer.key)
        return placer.place(layer, bottom, header_of(layer, differing, (*tower.notes, *total)))
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
    header = Header(tower.name, times, (*tower.notes, *total), (), canvas.differing(tower.key))
    top = header.place(canvas, left, y - MARGIN, cx + half - left)
    canvas.way((cx, y), (cx, top))
    canvas.back.insert(0, Rect(left, top, cx + half - left, bottom - top, 10, "frame outer"))
    _strip(canvas, tower, left + 9, bottom - MARGIN, y)
    return top


def _strip(canvas: Canvas, tower: Tower, x: float, bottom: float, top: float) -> None:
    """Draw a cell for each layer, the first at the bottom, in the colour of its variant."""
    height = (bottom - top) / len(tower.order)
    gap = 1.0 if height > 3 else 0.0
    for number, kind in enumerate(tower.order):
        y = bottom - height * (number + 1)
        canvas.back.append(Rect(x, y, STRIP - 4, height - gap, 1, f"cell cell{kind % 4}"))


def extent(node: Node) -> tuple[float, float]:
    """Return the extent of a node to the left and to the right of its line."""
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
    """Return a narrow version of a box for the side of a line, with its parameters among the notes."""
    if not box.parameters:
        return box
    return replace(box, notes=(*box.notes, Note("parameters", short(box.parameters))), parameters=0)


def beside_width(box: Box) -> float:
    """Return the width of a box at the side of a line."""
    widths = [width_of(note.text, SMALL, bold=True) for note in beside(box).notes]
    return 20 + max([width_of(box.title, TITLE, bold=True), *widths]) + (0 if count_of(beside(box)) == "" else 60)
