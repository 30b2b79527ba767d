"""The picture of a scene, or of two scenes side by side with their differences marked, and the wires between nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tfkit.arguments import checked
from tfkit.building.edits import AnyModel, as_model
from tfkit.tools.draw.canvas import (
    Canvas,
    Differences,
    Differing,
    Disc,
    Point,
    Rect,
    Shape,
    TextRun,
    Words,
    joined_lines,
    line_width,
    role_class,
    shortened_text,
    wrapped_lines,
)
from tfkit.tools.draw.layout import NOTE, node_extent, place_node
from tfkit.tools.draw.model_scene import scene_of
from tfkit.tools.draw.scene import Note, Scene, Wire, scene_differences
from tfkit.tools.draw.svg import Picture
from tfkit.tools.show.differences import fields_of_causes

EXIT = 10.0
"""Distance from the top of a node to the point where a wire branches off the line to the next node."""
GUTTER, TRACK = 14.0, 11.0
"""Space next to a column, and additional space for each wire in it."""
CLEAR = 3.0
"""Minimum distance between a wire and a box."""
ASIDE = 14.0
"""Distance from the side of a box to a wire that enters from above."""


@dataclass
class SceneCoordinates:
    """Coordinates: the line of each column, the bottom and top of each node, and the occupied tracks of each gutter.

    Attributes:
        column: the index of a node's column.
        centres: the x of the line of each column.
        gutters: the left edge of the space before each column, and of the space after the last column.
    """

    column: dict[str, int]
    centres: list[float] = field(default_factory=list)
    gutters: list[float] = field(default_factory=list)
    bottoms: dict[str, float] = field(default_factory=dict)
    tops: dict[str, float] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)

    def gutter(self, wire: Wire) -> int:
        """Return the gutter of a wire: next to the target, on the side of the source; within a column, outside."""
        source, target = self.column[wire.source], self.column[wire.target]
        if source == target:
            return 0 if target == 0 else target + 1
        return target if source < target else target + 1

    def track(self, wire: Wire) -> float:
        """Return the next free track in the gutter of a wire."""
        gutter = self.gutter(wire)
        number = self.taken.get(gutter, 0)
        self.taken[gutter] = number + 1
        return self.gutters[gutter] + GUTTER + TRACK * number

    def leave(self, wire: Wire) -> tuple[Point, Point]:
        """Return the y of the source's top, and of the point where a wire leaves the line above the source."""
        x, top = self.centres[self.column[wire.source]], self.tops[wire.source]
        return (x, top), (x, top - EXIT)


def draw_wire(canvas: Canvas, scene: Scene, wire: Wire, coordinates: SceneCoordinates) -> None:
    """Draw a wire. All nodes must have been drawn before."""
    if wire.way == "tie":
        _draw_tie(canvas, scene, wire, coordinates)
        return
    top, leave = coordinates.leave(wire)
    column = scene.columns[coordinates.column[wire.source]]
    if column[-1] != wire.source or wire.source in scene.outputs:
        canvas.lines.append(Disc(*leave, 2.5, "dot"))
    if wire.way == "up":
        x, y = coordinates.centres[coordinates.column[wire.target]], coordinates.bottoms[wire.target]
        points = [*_horizontal_route(canvas, coordinates, wire, leave, x), (x, y)]
    else:
        x = coordinates.track(wire)
        points = [*_horizontal_route(canvas, coordinates, wire, leave, x), *_entry_route(canvas, wire.key, x)]
    look = "line" if wire.way == "up" else f"line {wire.way}"
    canvas.way(top, *points, look=look, arrow=True, start=wire.source, end=wire.key or wire.target)


def _horizontal_route(canvas: Canvas, coordinates: SceneCoordinates, wire: Wire, leave: Point, x: float) -> list[Point]:
    """Route a wire horizontally to `x`, at a different height if boxes are in the way."""
    if _is_free(canvas, leave[1], leave[0], x):
        return [leave, (x, leave[1])]
    column = coordinates.column[wire.source]
    aside = coordinates.gutters[column + 1] + 6 if x > leave[0] else coordinates.gutters[column] + 6
    levels = (leave[1] + step * sign for step in range(1, 400) for sign in (-1, 1))
    level = next((y for y in levels if _is_free(canvas, y, aside, x)), leave[1])
    return [leave, (aside, leave[1]), (aside, level), (x, level)]


def _entry_route(canvas: Canvas, key: str, x: float) -> list[Point]:
    """Route a wire into the side of a box, or from above if another box is next to it."""
    left, top, right, bottom = canvas.anchors[key]
    middle, end = (top + bottom) / 2, left if x < left else right
    between = [box for box in canvas.anchors.values() if box[1] < middle < box[3] and _has_overlap(box, x, end)]
    if not between:
        return [(x, middle), (end, middle)]
    over, inside = min(top, *(box[1] for box in between)) - 6, left + ASIDE if x < left else right - ASIDE
    return [(x, over), (inside, over), (inside, top)]


def _is_free(canvas: Canvas, y: float, start: float, end: float) -> bool:
    boxes = canvas.anchors.values()
    return not any(box[1] - CLEAR < y < box[3] + CLEAR and _has_overlap(box, start, end) for box in boxes)


def _has_overlap(box: tuple[float, float, float, float], start: float, end: float) -> bool:
    """Return True if a box overlaps the range between two x coordinates."""
    return box[0] < max(start, end) - 1 and box[2] > min(start, end) + 1


def _draw_tie(canvas: Canvas, scene: Scene, wire: Wire, coordinates: SceneCoordinates) -> None:
    table = next(scene.nodes[wire.source].boxes()).key
    x = coordinates.track(wire)
    ends = []
    for key in (table, wire.key):
        left, top, right, bottom = canvas.anchors[key]
        ends.append((left if x < left else right, (top + bottom) / 2))
    canvas.way(ends[0], (x, ends[0][1]), (x, ends[1][1]), ends[1], look="line tie", start=table, end=wire.key)


NODE_GAP = 26.0
"""Space between a node and the node above it."""
COLUMN_GAP = 24.0
"""Space between two columns without wires."""
MIN_WIDTH = 330.0
"""Minimum width of a picture, for its title."""
NAME, WORDS = 19.0, 12.0
"""Font sizes of the name of a model, and of the lines below it."""


def place_scene(canvas: Canvas, scene: Scene, left: float) -> tuple[float, float]:
    """Draw a model to the right of x = `left` and above y = 0. Return its right edge and its top."""
    locations = SceneCoordinates({name: number for number, column in enumerate(scene.columns) for name in column})
    right = _spread_columns(scene, locations, left)
    if right - left < MIN_WIDTH:
        shift, right = (MIN_WIDTH - right + left) / 2, left + MIN_WIDTH
        locations.centres = [centre + shift for centre in locations.centres]
        locations.gutters = [start + shift for start in locations.gutters]
    pens = [0.0] * len(scene.columns)
    for name, node in scene.nodes.items():
        column = locations.column[name]
        cx = locations.centres[column]
        y = locations.bottoms[name] = _node_bottom(canvas, scene, name, locations, pens[column])
        locations.tops[name] = pens[column] = place_node(canvas, node, cx, y)
        if name in scene.outputs:
            pens[column] = _draw_outputs(canvas, cx, pens[column], scene.outputs[name])
    for wire in scene.wires:
        draw_wire(canvas, scene, wire, locations)
    return right, min(pens)


def _spread_columns(scene: Scene, coordinates: SceneCoordinates, left: float) -> float:
    """Set the coordinates of each column. Return the right edge of the last gutter."""
    tracks = Counter(coordinates.gutter(wire) for wire in scene.wires if wire.way != "up")
    x = left
    for number, column in enumerate(scene.columns):
        coordinates.gutters.append(x)
        x += _gutter_width(tracks[number]) or (COLUMN_GAP if number else 0)
        ends = [node_extent(scene.nodes[name]) for name in column]
        before, behind = max(end[0] for end in ends), max(end[1] for end in ends)
        coordinates.centres.append(x + before)
        x += before + behind
    coordinates.gutters.append(x)
    return x + _gutter_width(tracks[len(scene.columns)])


def _gutter_width(tracks: int) -> float:
    return 2 * GUTTER + TRACK * (tracks - 1) if tracks else 0.0


def _node_bottom(canvas: Canvas, scene: Scene, name: str, coordinates: SceneCoordinates, pen: float) -> float:
    """Return the y of a node's bottom: above the node below it, its input, or a source in another column."""
    column = coordinates.column[name]
    cx, below = coordinates.centres[column], scene.columns[column].index(name) > 0
    reads = [wire.source for wire in scene.wires if wire.target == name and wire.way in ("up", "side")]
    y = min([pen - NODE_GAP if below else 0.0, *(coordinates.tops[source] - NODE_GAP for source in reads)])
    if below:
        canvas.way((cx, pen), (cx, y), arrow=True)
    elif name in scene.inputs:
        y = min(y, -36.0)
        canvas.text(cx, -2, scene.inputs[name], WORDS, "muted", "middle")
        canvas.way((cx, -16), (cx, y), arrow=any(scene.nodes[name].boxes()))
    return y


def _draw_outputs(canvas: Canvas, cx: float, top: float, text: str) -> float:
    """Draw the outputs of the model at the top of a node. Return the top of their names."""
    canvas.way((cx, top), (cx, top - 20), arrow=True)
    canvas.text(cx, top - 26, text, WORDS, "muted", "middle")
    return top - 40


def title_of(scene: Scene, width: float, differing: Differing) -> list[Words]:
    """Return the name, description, sizes and source of a model as lines of text, from y = 0 downwards."""
    facts = joined_lines([TextRun(note.text, differing.look(note.key)) for note in scene.facts], width, WORDS)
    described = [(TextRun(line),) for line in wrapped_lines(scene.description, width, WORDS)]
    source = [(TextRun(line),) for line in wrapped_lines(scene.source, width, NOTE)]
    total = (TextRun(f"{scene.total:,} parameters", differing.look("total") or "bold"),)
    lines = [Words(0, 0, (TextRun(shortened_text(scene.name, width, NAME, bold=True), "bold"),), NAME)]
    lines += [Words(0, 0, line, WORDS, "muted") for line in described]
    lines += [Words(0, 0, total, WORDS)]
    lines += [Words(0, 0, line, WORDS) for line in facts]
    lines += [Words(0, 0, line, NOTE, "muted") for line in source]
    y, placed = 0.0, []
    for line in lines:
        y += line.size * (1.0 if line.size == NAME else 1.45)
        placed.append(replace(line, y=y))
    return placed


BELOW_TITLE = 16.0
MARGIN, MODEL_GAP = 22.0, 56.0
"""Space around a picture, and between two models."""
LEGEND = (("cause", "differs in the specs"), ("consequence", "follows from it"))
LEGEND_HEIGHT = 30.0


@checked
def draw(*graphs: AnyModel) -> Picture:
    """Draw a spec, or the spec of a built model, or two side by side with their differences marked.

    Nothing is allocated: parameters are counted on the meta device.

    Raises:
        ValueError: there is no graph, or more than two.
    """
    if len(graphs) not in (1, 2):
        raise ValueError(f"a picture must show one or two models; got {len(graphs)}")
    models, scenes = [], []
    for graph in graphs:
        model = as_model(graph, "the picture shows the spec")
        scene, note = scene_of(model.graph), Note("edits", "the spec of a model whose modules were changed")
        models.append(model.graph)
        scenes.append(replace(scene, facts=(*scene.facts, note)) if model.edits else scene)
    return picture_of(scenes, fields_of_causes(*models) if len(models) == 2 else ())


def picture_of(scenes: Sequence[Scene], fields: Collection[str] = ()) -> Picture:
    """Draw one or two scenes, as `draw` does for models. `fields` are the fields whose values in the specs differ."""
    marked: Sequence[Differences] = scene_differences(scenes[0], scenes[1], fields) if len(scenes) == 2 else [{}]
    canvases = [Canvas(marks) for marks in marked]
    right, top, titles = -MODEL_GAP, 0.0, []
    for scene, canvas in zip(scenes, canvases, strict=True):
        left = right + MODEL_GAP
        right, highest = place_scene(canvas, scene, left)
        lines = title_of(scene, right - left, canvas.differing(""))
        titles += [replace(line, x=left) for line in lines]
        top = min(top, highest - BELOW_TITLE - lines[-1].y)
    legend = list(_legend_shapes()) if any(marked) else []
    height = 2 * MARGIN - top + (LEGEND_HEIGHT if legend else 0)
    page = Rect(-MARGIN, top - MARGIN, right + 2 * MARGIN, height, 8, "page")
    inner = Rect(page.x + 0.5, page.y + 0.5, page.width - 1, page.height - 1, 8, "page")
    kinds = zip(*((canvas.back, canvas.lines, canvas.front) for canvas in canvases), strict=True)
    placed = [shape for kind in kinds for shapes in kind for shape in shapes]
    shapes = (inner, *placed, *legend, *(replace(line, y=line.y + top) for line in titles))
    title = " and ".join(scene.name for scene in scenes)
    return Picture(page.x, page.y, page.width, page.height, shapes, title, _in_words(scenes))


def _legend_shapes() -> Iterator[Shape]:
    """Yield a small box and its meaning for each type of difference, below the models."""
    x = 0.0
    for look, text in LEGEND:
        line = (TextRun(text, look),)
        yield Rect(x, LEGEND_HEIGHT - 14, 18, 12, 3, f"box {role_class('step')} {look}")
        yield Words(x + 25, LEGEND_HEIGHT - 4, line, NOTE)
        x += 25 + line_width(line, NOTE) + 24


def _in_words(scenes: Sequence[Scene]) -> str:
    """Describe the picture for readers who cannot see it."""
    texts = []
    for scene in scenes:
        boxes = ", ".join(box.title for box in scene.boxes())
        texts.append(f"The architecture of {scene.name}, {scene.total:,} parameters, bottom to top: {boxes}.")
    return " ".join(texts)
