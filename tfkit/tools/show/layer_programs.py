"""The steps of a layer as lines of code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tfkit.component import Call, Dropout, Layer, Layers, LearnedFactor, NormConfig, Scale, Step
from tfkit.errors import number_ranges
from tfkit.graph.expand import Graph


@dataclass(frozen=True)
class LayerProgram:
    """The steps of a layer, line by line, and the layers of the stack that run them."""

    node: str
    title: str
    lines: tuple[str, ...]


def programs_of(graph: Graph) -> list[LayerProgram]:
    """Return the programs of the layers of every stack."""
    return [
        program
        for node in graph.built_nodes
        if node.stack is not None
        for program in _stack_programs(node.name, node.stack)
    ]


def _stack_programs(node: str, stack: Layers) -> Iterator[LayerProgram]:
    for name, indices in stack.variants.items():
        title = f"layers {number_ranges(indices)}" if len(indices) > 1 else f"layer {indices[0]}"
        title += "" if name == "base" else f", {name}"
        title += f", {stack.repetition}" if stack.repeated else ""
        yield LayerProgram(node, title, tuple(as_code(stack.layers[indices[0]])))
    x = "x" if stack.streams is None else f"{stack.streams.kind_name()}(streams)"
    if stack.final_norm is not None or stack.streams is not None:
        yield LayerProgram(node, "after the last layer", (f"x = {_norm_code(stack.final_norm, x)}",))


def as_code(layer: Layer) -> Iterator[str]:
    """Yield a line of code for each sublayer, between a residual around them, and after a norm of the layer's input."""
    around = layer.around
    streams = "streams" if around is not None and around.enters else "x"
    if around is not None:
        yield f"x = {around.kind_name()}({streams})"
    if any(step.reads_input for step in layer.steps):
        yield f"input = {_norm_code(layer.input_norm, 'x')}"
    for step in layer.steps:
        y = read = "input" if step.reads_input else "x"
        for part in step.branch():
            y = _operation_code(part, y, step)
        if step.write is not None:
            stream = "streams" if step.residual.enters else "x"
            written = f"{step.residual.kind_name()}({stream}, {y})"
            yield f"{stream} = {_norm_code(step.norm_after, written)}{_gives_note(step)}"
            continue
        if step.addition.onto == "nothing":
            yield f"x = {_norm_code(step.norm_after, y)}{_gives_note(step)}"
            continue
        onto = _norm_code(step.norm_in, read) if step.addition.onto == "normed" else "x"
        onto = onto if step.onto is None else _operation_code(step.onto, onto, step)
        onto = onto if step.addition.scale_onto == 1 else _operation_code(Scale(step.addition.scale_onto), onto, step)
        yield f"x = {_norm_code(step.norm_after, f'{onto} + {y}')}{_gives_note(step)}"
    if around is not None:
        yield f"{streams} = {around.kind_name()}({streams}, x)"


def _gives_note(step: Step) -> str:
    return f"; gives {', '.join(step.gives)}" if step.gives else ""


def _operation_code(part: Call | Dropout | LearnedFactor | Scale, y: str, step: Step) -> str:
    """Return the expression of an operation on y."""
    if isinstance(part, Dropout):
        return f"dropout({y})"
    if isinstance(part, LearnedFactor):
        return f"learned_{part.shape} * {y}"
    if isinstance(part, Scale):
        return f"{part.number:g} * {y}"
    if part.name == step.name:
        return f"{step.name}({', '.join([y, *['memory'] * step.reads_memory, *step.takes])})"
    return f"{part.config.kind_name()}({y})"


def _norm_code(norm: NormConfig | None, y: str) -> str:
    return y if norm is None else f"{norm.kind_name()}({y})"
