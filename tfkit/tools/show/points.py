"""The values that `tfkit.trace` reads and writes: their names and shapes, and the modules that compute them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tfkit.component import Component, InnerValue, Layers, Signal, Step, SublayerConfig
from tfkit.graph.expand import Graph, Node
from tfkit.spec.messages import fault_in
from tfkit.spec.provenance import Provenance


@dataclass(frozen=True)
class TracePoint:
    """A value of a model: an argument or the output of one of its modules."""

    name: str
    shape: str
    """The sizes of its axes: b sequences, t positions, k keys."""
    module: str
    """The path of the module."""
    argument: int | None = None
    """The position of the argument; None for the output."""
    mixer: str | None = None
    """The path of the enclosing mixer, which moves padding behind the tokens of each row."""
    layer: int | None = None
    """The number of the layer; None outside of layers."""
    written_out: bool = False
    """True if only attention that is written out computes the value."""
    item: int = 0
    """The number of the value in an output that is a tuple."""
    state: int | None = None
    """The number of a state in the cache of the mixer."""
    read_only: bool = False
    """True if the model uses the value a second time, where a change would have no effect."""
    unit: tuple[int, int] | None = None
    """The axis of heads, or of channels in a value without heads, and the number of the unit; None for all units."""

    @property
    def sizes(self) -> list[str]:
        """The sizes of the axes."""
        return self.shape.strip("[]").split(", ")

    @property
    def position_axis(self) -> int | None:
        """The axis of positions; None if the value has no positions."""
        return next((self.sizes.index(name) for name in ("t", "k") if name in self.sizes), None)

    def units(self, number: str) -> Iterator[TracePoint]:
        """Yield the value of a head or a channel; for `*`, of each. Raise ValueError if the number is too high."""
        sizes = self.sizes
        axis = 1 if len(sizes) == 4 else len(sizes) - 1
        size = sizes.pop(axis)
        if not size.isdecimal():
            return
        if number != "*" and int(number) >= int(size):
            raise ValueError(f"the number after `{self.name}` must be less than {size}; got {number}")
        for unit in range(int(size)) if number == "*" else [int(number)]:
            yield replace(self, name=f"{self.name}.{unit}", shape=f"[{', '.join(sizes)}]", unit=(axis, unit))

    @property
    def pattern(self) -> str:
        """The name with `*` for the number of the layer."""
        return self.name if self.layer is None else self.name.replace(f".layers.{self.layer}.", ".layers.*.", 1)


def points_of(graph: Graph) -> Iterator[TracePoint]:
    """Yield the values of a model, node by node, layer by layer."""
    for node in graph.built_nodes:
        if node.stack is not None:
            yield from _stack_points(node, node.stack)
        yield TracePoint(node.name, _output_shape(node), node.name)


def _stack_points(node: Node, stack: Layers) -> Iterator[TracePoint]:
    for number, layer in enumerate(stack.layers):
        path, shape = f"{node.name}.layers.{number}", f"[b, t, {node.output.width}]"
        stream, of_stream = ("stream", shape) if stack.streams is None else ("streams", "[b, t, ...]")
        points = [TracePoint(f"{path}.{stream}.in", of_stream, path, 0)]
        for index, step in enumerate(layer.steps):
            points += _sublayer_points(f"{path}.{step.name}", step, shape)
            if index + 1 < len(layer.steps):
                name = f"{path}.{stream}.mid" + f"_{index + 1}" * (index > 0)
                points += _stream_between(name, of_stream, path, step, layer.steps[index + 1])
        points.append(TracePoint(f"{path}.{stream}.out", of_stream, path))
        yield from (replace(point, layer=number) for point in points)


def _stream_between(name: str, shape: str, path: str, step: Step, following: Step) -> Iterator[TracePoint]:
    """Yield the stream between two sublayers, if a module takes or returns it."""
    module = step.after or step.write
    if module is not None:
        yield TracePoint(name, shape, f"{path}.{module.name}")
    elif following.norm_in and not (following.read or step.reads_input or following.reads_input):
        yield TracePoint(name, shape, f"{path}.{following.name}_norm_in", 0, read_only=True)


def _sublayer_points(path: str, step: Step, shape: str) -> Iterator[TracePoint]:
    mixer = path if step.ordered else None
    yield TracePoint(f"{path}.in", shape, path, 0, mixer)
    for name, value in _inner_values(step.config).items():
        module = f"{path}.{value.module}".rstrip(".")
        point = TracePoint(
            f"{path}.{name}", value.shape, module, value.argument, mixer, item=value.item, state=value.state
        )
        yield replace(point, written_out=value.written_out)
    yield TracePoint(f"{path}.out", shape, path, None, mixer)


def _inner_values(config: Component) -> Mapping[str, InnerValue]:
    """Return the values inside a sublayer. Raise SpecError for a component that declares them incorrectly."""
    if not isinstance(config, SublayerConfig):
        return {}
    try:
        values = dict(config.inner_values)
        for name, value in values.items():
            if not isinstance(value, InnerValue):
                raise TypeError(f"`{name}` must be an InnerValue; got {value!r}")
    except Exception as error:
        raise fault_in(type(config), (), Provenance())("`inner_values`", error) from error
    return values


def _output_shape(node: Node) -> str:
    """Return the sizes of a node's output."""
    output = node.output
    if output.type == "image":
        return f"[b, {output.channels}, {output.rows}, {output.width}]"
    of_sequence = any(isinstance(value, Signal) and value.type == "sequence" for value in node.signals.values())
    positions = output.type == "sequence" or (output.type == "logits" and of_sequence)
    sizes = ["b", *([output.length or "t"] if positions else []), *([output.width] if output.width else [])]
    return f"[{', '.join(map(str, sizes))}]"
