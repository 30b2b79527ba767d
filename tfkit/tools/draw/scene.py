"""What a picture of a model shows, as data: boxes, what is written in them, and what leads where. Nothing has a place.

Every box names the weights that it stands for, so that the numbers in a picture add up to the model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Note:
    """A few words in a box. Two pictures are compared by the notes' keys."""

    key: str
    text: str


@dataclass(frozen=True)
class Chip:
    """A part inside a box, in the colour of its slot. `parameters` are those that the box does not count."""

    key: str
    role: str
    text: str
    parameters: int = 0


@dataclass(frozen=True)
class Box:
    """A component, or a step that has weights.

    Attributes:
        key: what it is compared by with the box of another picture.
        role: the slot that it fills, which decides its colour.
        title: what it is called.
        notes: its kind and sizes.
        chips: components inside it that have a slot of their own.
        parts: boxes inside it; their parameters are among its own.
        parameters: how many it has.
        times: how many boxes like this one the model has, each with weights of its own.
        tied: whether it uses the weights of another box.
        tip: every value of its config, for whoever points at it.
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
        """The parameters of all boxes like this one."""
        return self.parameters * self.times + sum(chip.parameters for chip in self.chips)


@dataclass(frozen=True)
class Mark:
    """A number that multiplies what flows along a line."""

    key: str
    text: str


@dataclass(frozen=True)
class Added:
    """A box at the side of the line, whose output is added."""

    box: Box


@dataclass(frozen=True)
class Segment:
    """Sublayers whose outputs are added to the residual stream together: one, or several in parallel.

    Attributes:
        branches: what each of them goes through, bottom to top.
        stem: the norm in front of all of them.
        reads_input: whether they read what the layer got, and not the sum so far.
        onto: what they are added to: the stream in front of the segment, or what stands behind the first box.
        factor: a learned factor of what they are added to.
        after: the norm behind the sum.
    """

    branches: tuple[tuple[Box | Mark, ...], ...]
    stem: Box | None = None
    reads_input: bool = False
    onto: Literal["stream", "normed"] = "stream"
    factor: Box | None = None
    after: Box | None = None

    def boxes(self) -> Iterator[Box]:
        """All boxes."""
        yield from (box for box in (self.stem, self.factor, self.after) if box is not None)
        yield from (item for branch in self.branches for item in branch if isinstance(item, Box))


@dataclass(frozen=True)
class Layer:
    """Layers of a stack that are alike."""

    key: str
    name: str
    times: int
    notes: tuple[Note, ...]
    parameters: int
    segments: tuple[Segment, ...]

    def boxes(self) -> Iterator[Box]:
        """All boxes."""
        for segment in self.segments:
            yield from segment.boxes()


@dataclass(frozen=True)
class Tower:
    """A stack. `order` has for each layer the number of its kind among `layers`; `rest` is what no box counts."""

    key: str
    name: str
    notes: tuple[Note, ...]
    layers: tuple[Layer, ...]
    order: tuple[int, ...]
    closing: Box | None
    parameters: int
    rest: int = 0
    tip: tuple[tuple[str, str], ...] = ()

    def boxes(self) -> Iterator[Box]:
        """All boxes."""
        for layer in self.layers:
            yield from layer.boxes()
        if self.closing is not None:
            yield self.closing


@dataclass(frozen=True)
class Chain:
    """A node that is no stack: what its input goes through, bottom to top; nothing, if it is an input itself."""

    key: str
    name: str
    items: tuple[Box | Mark | Added, ...]
    rest: int = 0

    def boxes(self) -> Iterator[Box]:
        """All boxes."""
        for item in self.items:
            if not isinstance(item, Mark):
                yield item.box if isinstance(item, Added) else item


Node = Tower | Chain
WireKind = Literal["up", "side", "memory", "tie"]


@dataclass(frozen=True)
class Wire:
    """What leads from a node to another: up to the next, to the side of one or of its cross-attention; or a table."""

    source: str
    target: str
    way: WireKind


@dataclass(frozen=True)
class Scene:
    """The picture of one model.

    Attributes:
        columns: names of nodes, bottom to top.
        inputs: what the lowest node of a column reads, by the node's name.
        outputs: what leaves the model, by the node's name.
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
        """All boxes."""
        for node in self.nodes.values():
            yield from node.boxes()

    @property
    def counted(self) -> int:
        """The parameters of all boxes."""
        return sum(box.total for box in self.boxes()) + sum(node.rest for node in self.nodes.values())
