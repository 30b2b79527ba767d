"""The contents of a model's picture as data: boxes, their texts, and the wires. No element has coordinates.

The parameters of all boxes add up to the parameters of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tfkit.tools.draw.canvas import Differences, Differing

COUNT = "parameters"
"""The key of the number of parameters among the differences."""
MISSING = "missing"
"""The key of the difference that the other picture lacks the box."""
STRUCTURE = frozenset({"title", "kind", MISSING})
"""Keys that are always causes: the component itself differs."""


@dataclass(frozen=True)
class Note:
    """A few words in a box. Notes with the same key correspond in two pictures.

    The key of a value of a config is the name of its field, which shows whether the value causes other differences.
    """

    key: str
    text: str


@dataclass(frozen=True)
class Chip:
    """A component inside a box, in the colour of its slot. The box does not count its `parameters`."""

    key: str
    role: str
    text: str
    parameters: int = 0


@dataclass(frozen=True)
class Box:
    """A component, or a step that has weights.

    Attributes:
        key: the key of the corresponding box in another picture.
        role: the slot that it fills, which decides its colour.
        notes: its kind and sizes.
        chips: components inside it that fill a slot.
        parts: boxes inside it; their parameters are included in its parameters.
        times: the number of identical boxes in the model, each with separate weights.
        tied: True if it uses the weights of another box.
        tip: every value of its config, shown under the pointer.
    """

    key: str
    role: str
    title: str
    notes: tuple[Note, ...] = ()
    chips: tuple[Chip, ...] = ()
    parts: tuple[Box, ...] = ()
    parameters: int = 0
    times: int = 1
    tied: bool = False
    tip: tuple[tuple[str, str], ...] = ()

    @property
    def total(self) -> int:
        """Total parameters of all `times` boxes."""
        return self.parameters * self.times + sum(chip.parameters for chip in self.chips)


@dataclass(frozen=True)
class Mark:
    """A number that multiplies the values on a line."""

    key: str
    text: str


@dataclass(frozen=True)
class Added:
    """A box at the side of the line, whose output is added."""

    box: Box


@dataclass(frozen=True)
class Segment:
    """Sublayers whose outputs are added to the residual stream together: a single sublayer, or several in parallel.

    Attributes:
        branches: the boxes of each sublayer, bottom to top.
        before: the module of a residual around the layer that computes the stream of the sublayers.
        stem: the norm before all sublayers.
        reads_input: True if the sublayers take the layer's input instead of the current stream.
        onto: the value to which the outputs are added: the stream before the segment, the output of the first box, or
            nothing, so that they replace the stream.
        factor: a learned factor of that value.
        write: the module that puts the output into the stream; None if it is added.
        after: the norm after the sum, or the module that writes the result of a layer to the stream.
    """

    branches: tuple[tuple[Box | Mark, ...], ...]
    before: Box | None = None
    stem: Box | None = None
    reads_input: bool = False
    onto: Literal["previous", "normed", "nothing"] = "previous"
    factor: Box | None = None
    write: Box | None = None
    after: Box | None = None

    def boxes(self) -> Iterator[Box]:
        yield from (box for box in (self.before, self.stem, self.factor, self.after) if box is not None)
        yield from (item for branch in self.branches for item in branch if isinstance(item, Box))
        if self.write is not None:  # a wire to the layer ends at the first box
            yield self.write


@dataclass(frozen=True)
class DrawnLayer:
    """Equal layers of a stack."""

    key: str
    name: str
    times: int
    notes: tuple[Note, ...]
    parameters: int
    segments: tuple[Segment, ...]

    def boxes(self) -> Iterator[Box]:
        for segment in self.segments:
            yield from segment.boxes()


@dataclass(frozen=True)
class Tower:
    """A stack. `order` has the index in `layers` for each layer; `rest` are parameters outside all boxes."""

    key: str
    name: str
    notes: tuple[Note, ...]
    layers: tuple[DrawnLayer, ...]
    order: tuple[int, ...]
    closing: Box | None
    parameters: int
    rest: int = 0
    tip: tuple[tuple[str, str], ...] = ()

    def boxes(self) -> Iterator[Box]:
        for layer in self.layers:
            yield from layer.boxes()
        if self.closing is not None:
            yield self.closing


@dataclass(frozen=True)
class Chain:
    """A node that is not a stack: the boxes that its input passes, bottom to top; empty for an input of the model."""

    key: str
    name: str
    items: tuple[Box | Mark | Added, ...]
    rest: int = 0

    def boxes(self) -> Iterator[Box]:
        for item in self.items:
            if not isinstance(item, Mark):
                yield item.box if isinstance(item, Added) else item


Node = Tower | Chain
WireKind = Literal["up", "side", "memory", "tie"]


@dataclass(frozen=True)
class Wire:
    """A wire outside the columns, from a node to a box of a second node, or (`up`) to the bottom of that node.

    Attributes:
        way: `memory` leads to a cross-attention; `tie` leads from a table to a node that uses it.
        key: the key of the box.
    """

    source: str
    target: str
    way: WireKind
    key: str = ""


@dataclass(frozen=True)
class Scene:
    """The picture of one model.

    Attributes:
        columns: names of nodes, bottom to top.
        inputs: the inputs of the lowest node of a column, by the name of the node.
        outputs: the outputs of the model, by the name of the node that returns them.
    """

    name: str
    description: str
    source: str
    facts: tuple[Note, ...]
    total: int
    nodes: Mapping[str, Node]
    columns: tuple[tuple[str, ...], ...]
    wires: tuple[Wire, ...]
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)

    def boxes(self) -> Iterator[Box]:
        for node in self.nodes.values():
            yield from node.boxes()

    @property
    def counted(self) -> int:
        """The parameters of all boxes."""
        return sum(box.total for box in self.boxes()) + sum(node.rest for node in self.nodes.values())


KeyedContents = Mapping[str, object]


def scene_differences(a: Scene, b: Scene, fields: Collection[str]) -> tuple[Differences, Differences]:
    """Return, for each of two scenes, the keys of differing notes by the key of their box.

    `fields` are the fields whose values in the specs differ.
    """
    left, right = dict(_scene_contents(a)), dict(_scene_contents(b))
    return _differences_from(left, right, fields), _differences_from(right, left, fields)


def _differences_from(
    contents: Mapping[str, KeyedContents], other: Mapping[str, KeyedContents], fields: Collection[str]
) -> Differences:
    differences = {}
    for key, content in contents.items():
        there = other.get(key)
        if there is None:
            differences[key] = Differing(frozenset([MISSING]))
        elif differing := {name for name in content.keys() | there.keys() if content.get(name) != there.get(name)}:
            causes = frozenset(name for name in differing if name in STRUCTURE or name.rpartition(".")[2] in fields)
            differences[key] = Differing(causes, frozenset(differing) - causes)
    return differences


def _scene_contents(scene: Scene) -> Iterator[tuple[str, KeyedContents]]:
    """Yield the contents of each box, frame and mark, by its key."""
    yield "", {"total": scene.total} | {note.key: note.text for note in scene.facts}
    for box in scene.boxes():
        notes = {note.key: note.text for note in box.notes} | {chip.key: chip.text for chip in box.chips}
        yield box.key, {"title": box.title, "tie": box.tied, COUNT: box.parameters, **notes}
    for node in scene.nodes.values():
        if isinstance(node, Tower):
            yield node.key, {note.key: note.text for note in node.notes} | {"total": node.parameters}
            for layer in node.layers:
                yield layer.key, {"n_layers": layer.times, COUNT: layer.parameters}
        yield from _mark_contents(node)


def _mark_contents(node: Chain | Tower) -> Iterator[tuple[str, KeyedContents]]:
    if isinstance(node, Chain):
        items = list(node.items)
    else:
        branches = [branch for layer in node.layers for part in layer.segments for branch in part.branches]
        items = [item for branch in branches for item in branch]
    yield from ((item.key, {"scale": item.text}) for item in items if isinstance(item, Mark))
