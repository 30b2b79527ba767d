"""A whole model on the canvas: its columns side by side, inputs below, outputs above, and its title."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tfkit.tools.draw.boxes import SMALL
from tfkit.tools.draw.nodes import extent, place_node
from tfkit.tools.draw.scene import Scene
from tfkit.tools.draw.shapes import Canvas, Words
from tfkit.tools.draw.text import Run, cut, flow, wrap
from tfkit.tools.draw.wires import GUTTER, TRACK, Places, draw_wire

BETWEEN = 26.0
"""Space between a node and the one above it."""
APART = 24.0
"""Space between two columns without wires."""
LEAST = 330.0
"""Least width of a picture: its title needs some room."""
NAME, WORDS = 19.0, 12.0
"""Sizes of fonts."""


def place_scene(canvas: Canvas, scene: Scene, left: float) -> tuple[float, float]:
    """Put a model on the canvas, from x = `left` on and above y = 0; returns its right end and its top."""
    places = Places({name: number for number, column in enumerate(scene.columns) for name in column})
    right = _spread(scene, places, left)
    if right - left < LEAST:
        shift, right = (LEAST - right + left) / 2, left + LEAST
        places.centres = [centre + shift for centre in places.centres]
        places.gutters = [start + shift for start in places.gutters]
    pens = [0.0] * len(scene.columns)
    for name, node in scene.nodes.items():
        column = places.column[name]
        cx = places.centres[column]
        y = places.bottoms[name] = _start(canvas, scene, name, places, pens[column])
        places.tops[name] = pens[column] = place_node(canvas, node, cx, y)
        if name in scene.outputs:
            pens[column] = _leave(canvas, cx, pens[column], scene.outputs[name])
    for wire in scene.wires:
        draw_wire(canvas, scene, wire, places)
    return right, min(pens)


def _spread(scene: Scene, places: Places, left: float) -> float:
    """Give each column its place; returns the right end of the last gutter."""
    tracks = Counter(places.gutter(wire) for wire in scene.wires if wire.way != "up")
    x = left
    for number, column in enumerate(scene.columns):
        places.gutters.append(x)
        x += _gutter_width(tracks[number]) or (APART if number else 0)
        ends = [extent(scene.nodes[name]) for name in column]
        before, behind = max(end[0] for end in ends), max(end[1] for end in ends)
        places.centres.append(x + before)
        x += before + behind
    places.gutters.append(x)
    return x + _gutter_width(tracks[len(scene.columns)])


def _gutter_width(tracks: int) -> float:
    return 2 * GUTTER + TRACK * (tracks - 1) if tracks else 0.0


def _start(canvas: Canvas, scene: Scene, name: str, places: Places, pen: float) -> float:
    """Return the height where a node begins: above the node below it, its input, or its source elsewhere."""
    column = places.column[name]
    cx, below = places.centres[column], scene.columns[column].index(name) > 0
    reads = [wire.source for wire in scene.wires if wire.target == name and wire.way in ("up", "side")]
    y = min([pen - BETWEEN if below else 0.0, *(places.tops[source] - BETWEEN for source in reads)])
    if below:
        canvas.way((cx, pen), (cx, y), arrow=True)
    elif name in scene.inputs:
        y = min(y, -36.0)
        canvas.text(cx, -2, scene.inputs[name], WORDS, "muted", "middle")
        canvas.way((cx, -16), (cx, y), arrow=any(scene.nodes[name].boxes()))
    return y


def _leave(canvas: Canvas, cx: float, top: float, text: str) -> float:
    """Place the outputs of the model at the top of a node; returns the top of their names."""
    canvas.way((cx, top), (cx, top - 20), arrow=True)
    canvas.text(cx, top - 26, text, WORDS, "muted", "middle")
    return top - 40


def title_of(scene: Scene, width: float, differing: frozenset[str]) -> list[Words]:
    """Name, description, sizes and source, in lines from y = 0 downwards."""
    facts = flow([Run(note.text, note.key in differing) for note in scene.facts], width, WORDS)
    described = [(Run(line),) for line in wrap(scene.description, width, WORDS)]
    source = [(Run(line),) for line in wrap(scene.source, width, SMALL)]
    total = (Run(f"{scene.total:,} parameters", bold=True),)
    lines = [Words(0, 0, (Run(cut(scene.name, width, NAME, bold=True), bold=True),), NAME, "bold")]
    lines += [Words(0, 0, line, WORDS, "muted") for line in described]
    lines += [Words(0, 0, total, WORDS, "" if "total" in differing else "bold")]
    lines += [Words(0, 0, line, WORDS) for line in facts]
    lines += [Words(0, 0, line, SMALL, "muted") for line in source]
    y, placed = 0.0, []
    for line in lines:
        y += line.size * (1.0 if line.size == NAME else 1.45)
        placed.append(replace(line, y=y))
    return placed
