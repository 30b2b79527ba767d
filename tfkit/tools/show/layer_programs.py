"""The steps of a layer as text: lines of code for `show`, sentences for `explain`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tfkit.component import Call, Dropout, Layer, Layers, Learned, NormConfig, Scale, Step
from tfkit.errors import listing, ranges
from tfkit.graph.expand import Graph
from tfkit.tools.show.resolved_values import number

NAMES = {"attention": "attention", "cross_attention": "cross-attention", "ffn": "the FFN"}


@dataclass(frozen=True)
class LayerProgram:
    """The steps of a layer, line by line, and the layers of the stack that run them."""

    node: str
    title: str
    lines: tuple[str, ...]


def programs_of(graph: Graph) -> list[LayerProgram]:
    """Return the programs of the layers of every stack."""
    return [program for node in graph.nodes if node.stack is not None for program in _programs(node.name, node.stack)]


def _programs(node: str, stack: Layers) -> Iterator[LayerProgram]:
    for name, indices in stack.variants.items():
        title = f"layers {ranges(indices)}" if len(indices) > 1 else f"layer {indices[0]}"
        title += "" if name == "base" else f", {name}"
        title += f", each {stack.repetition}" if stack.repeats > 1 else ""
        yield LayerProgram(node, title, tuple(as_code(stack.layers[indices[0]])))
    x = "x" if stack.streams is None else f"{stack.streams.kind_name()}(streams)"
    if stack.final_norm is not None or stack.streams is not None:
        yield LayerProgram(node, "after the last layer", (f"x = {_normed(stack.final_norm, x)}",))


def as_code(layer: Layer) -> Iterator[str]:
    """Yield a line of code for each sublayer, between a residual around them, and after a norm of the layer's input."""
    around = layer.around
    streams = "streams" if around is not None and around.enters else "x"
    if around is not None:
        yield f"x = {around.kind_name()}({streams})"
    if any(step.reads_input for step in layer.steps):
        yield f"input = {_normed(layer.input_norm, 'x')}"
    for step in layer.steps:
        y = read = "input" if step.reads_input else "x"
        for part in step.branch():
            y = _code(part, y, step)
        if step.write is not None:
            stream = "streams" if step.residual.enters else "x"
            written = f"{step.residual.kind_name()}({stream}, {y})"
            yield f"{stream} = {_normed(step.norm_after, written)}{_gives(step)}"
            continue
        if step.addition.onto == "nothing":
            yield f"x = {_normed(step.norm_after, y)}{_gives(step)}"
            continue
        onto = _normed(step.norm_in, read) if step.addition.onto == "normed" else "x"
        onto = onto if step.onto is None else _code(step.onto, onto, step)
        onto = onto if step.addition.scale_onto == 1 else _code(Scale(step.addition.scale_onto), onto, step)
        yield f"x = {_normed(step.norm_after, f'{onto} + {y}')}{_gives(step)}"
    if around is not None:
        yield f"{streams} = {around.kind_name()}({streams}, x)"


def _gives(step: Step) -> str:
    return f"; gives {', '.join(step.gives)}" if step.gives else ""


def _code(part: Call | Dropout | Learned | Scale, y: str, step: Step) -> str:
    """Return the expression of an operation on y."""
    if isinstance(part, Dropout):
        return f"dropout({y})"
    if isinstance(part, Learned):
        return f"learned_{part.shape} * {y}"
    if isinstance(part, Scale):
        return f"{part.number:g} * {y}"
    if part.name == step.name:
        return f"{step.name}({', '.join([y, *['memory'] * step.reads_memory, *step.takes])})"
    return f"{part.config.kind_name()}({y})"


def _normed(norm: NormConfig | None, y: str) -> str:
    return y if norm is None else f"{norm.kind_name()}({y})"


def as_sentences(layer: Layer) -> Iterator[str]:
    """Yield a sentence for each sublayer, between a residual around them, and after a norm of the layer's input."""
    if layer.around is not None:
        yield f"read the stream{'s' * layer.around.enters} by the residual {layer.around.kind_name()}"
    if layer.input_norm is not None:
        yield f"normalize the layer's input ({layer.input_norm.kind_name()})"
    for step in layer.steps:
        branch = list(step.branch())
        words = [_words(part, step, layer) for part in branch if isinstance(part, Call | Dropout)]
        factors = [_factor(part) for part in reversed(branch) if isinstance(part, Learned | Scale)]
        onto = "the normalized value" if step.addition.onto == "normed" else "the stream"
        if step.addition.scale_onto != 1:
            onto = f"{number(step.addition.scale_onto)} times {onto}"
        added = f"add {''.join(f'{factor} times ' for factor in factors)}{'it ' if factors else ''}to {onto}"
        if step.addition.onto == "nothing":
            added = "".join(f"{factor} times " for factor in factors) + "this replaces the stream"
        residual = f"the residual {step.residual.kind_name()}"
        if step.read is not None:
            words.insert(0, f"read the stream{'s' * step.residual.enters} by {residual}")
        words.append(added if step.write is None else f"write it back by {residual}")
        words += [f"normalize ({step.norm_after.kind_name()})"] if step.norm_after is not None else []
        yield ", ".join(words)
    if layer.around is not None:
        yield f"write the result back by the residual {layer.around.kind_name()}"


def _words(part: Call | Dropout, step: Step, layer: Layer) -> str:
    if isinstance(part, Dropout):
        return f"drop {part.rate:.0%}"
    if part.name != step.name:
        return f"normalize ({part.config.kind_name()})"
    normalized = "" if layer.input_norm is None else " normalized"
    source = f" of the layer's{normalized} input" if step.reads_input else ""
    name = NAMES.get(step.role, f"the {step.role.replace('_', ' ')}")
    takes, gives = (listing(names) for names in (step.takes, step.gives))
    wires = f"{f' with {takes} of an earlier layer' if takes else ''}{f', which gives {gives}' if gives else ''}"
    return f"{name}{source}{' to the memory' if step.reads_memory else ''}{wires}"


def _factor(part: Learned | Scale) -> str:
    return f"a learned {part.shape}" if isinstance(part, Learned) else number(part.number)
