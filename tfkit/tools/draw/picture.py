"""Scenes to a picture: one model, or two side by side with the differences marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tfkit.arguments import checked
from tfkit.graph.expand import AnySpec, as_graph
from tfkit.tools.draw.compare import differences
from tfkit.tools.draw.model import scene_of
from tfkit.tools.draw.panel import place_scene, title_of
from tfkit.tools.draw.scene import Scene
from tfkit.tools.draw.shapes import Canvas, Differences, Rect
from tfkit.tools.draw.svg import Picture

BELOW_TITLE = 16.0
MARGIN, APART = 22.0, 56.0
"""Space around a picture, and between two models."""


@checked
def draw(*graphs: AnySpec) -> Picture:
    """Draw a model or its spec, or two side by side with their differences marked.

    Nothing is allocated: parameters are counted on the meta device.

    Raises:
        ValueError: there is no graph, or more than two.
    """
    if len(graphs) not in (1, 2):
        raise ValueError(f"a picture shows one model or two, not {len(graphs)}")
    return picture_of([scene_of(as_graph(graph)) for graph in graphs])


def picture_of(scenes: Sequence[Scene]) -> Picture:
    """Draw scenes, as `draw` does for models."""
    marked: Sequence[Differences] = differences(*scenes) if len(scenes) == 2 else [{}]
    canvases = [Canvas(marks) for marks in marked]
    right, top, titles = -APART, 0.0, []
    for scene, canvas in zip(scenes, canvases, strict=True):
        left = right + APART
        right, highest = place_scene(canvas, scene, left)
        lines = title_of(scene, right - left, canvas.differing(""))
        titles += [replace(line, x=left) for line in lines]
        top = min(top, highest - BELOW_TITLE - lines[-1].y)
    page = Rect(-MARGIN, top - MARGIN, right + 2 * MARGIN, 2 * MARGIN - top, 8, "page")
    inner = Rect(page.x + 0.5, page.y + 0.5, page.width - 1, page.height - 1, 8, "page")
    kinds = zip(*((canvas.back, canvas.lines, canvas.front) for canvas in canvases), strict=True)
    placed = [shape for kind in kinds for shapes in kind for shape in shapes]
    shapes = (inner, *placed, *(replace(line, y=line.y + top) for line in titles))
    title = " and ".join(scene.name for scene in scenes)
    return Picture(page.x, page.y, page.width, page.height, shapes, title, _in_words(scenes))


def _in_words(scenes: Sequence[Scene]) -> str:
    """Describe the picture for readers who cannot see it."""
    texts = []
    for scene in scenes:
        boxes = ", ".join(box.title for box in scene.boxes())
        texts.append(f"The architecture of {scene.name}, {scene.total:,} parameters, bottom to top: {boxes}.")
    return " ".join(texts)
