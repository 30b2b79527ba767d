"""The semantics of a graph: its nodes in order, computed for each sequence of the batch separately."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tfkit.graph.expand import Graph, Node

Array: TypeAlias = Annotated[NDArray[Any], np.ndarray, "an array"]
Function: TypeAlias = Callable[..., Any]
Kinds: TypeAlias = Mapping[str, Mapping[str, Function]]
"""By slot and kind, the function that defines it."""
Fused: TypeAlias = Mapping[str, Mapping[str, int]]
"""By path of a fused layer, the names and sizes of the parts of its output, in the order of its rows."""


class UnknownKind(ValueError):  # noqa: N818 - it reads as a sentence
    """A kind that no function defines."""

    def __init__(self, slot: str, kind: str) -> None:
        super().__init__(f"no function defines {slot} `{kind}`: give one, kinds={{'{slot}': {{'{kind}': function}}}}")
        self.slot, self.kind = slot, kind


class Value(NamedTuple):
    """A value on a wire: token ids [t], a sequence [t, width], a vector [width], a length."""

    x: Array
    pairs: Array
    """[q, k], True where position q may attend to token k. For a vector, False if it represents padding."""

    @property
    def tokens(self) -> Array:
        """[t], True at tokens, which attend to themselves."""
        return self.pairs.diagonal() if self.pairs.ndim else self.pairs

    @property
    def positions(self) -> Array:
        """[t], the number of earlier tokens to which each token may attend. Padding does not count."""
        return np.maximum(np.tril(self.pairs).sum(1) - 1, 0)


class Result(NamedTuple):
    """The values that a model and its components return."""

    outputs: Mapping[str, Array]
    """[b, ...], by the name of the node."""
    real: Mapping[str, Array]
    """False where an output represents padding and is undefined: [b, t], or [b] for vectors."""
    trace: list[tuple[str, Array]]
    """The path and the output, [b, ...], of each component, in the order in which the components return."""


@dataclass(frozen=True)
class Part:
    """A component at its path, or the full model: a call computes its output by the function of its kind."""

    graph: Graph
    weights: Mapping[str, Array]
    kinds: Kinds
    path: str = ""
    config: Any = None
    """The fields of the component. None for an empty slot, which returns its input, and for a layer of weights."""
    fused: Fused = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    """The names of all weights that have been read."""
    trace: list[tuple[str, Array]] = field(default_factory=list)

    def __call__(self, *args: Any, **wires: Any) -> Any:
        if self.config is None:
            return args[0]
        slot, kind = self.config.slot, self.config.kind_name()
        if kind not in self.kinds.get(slot, {}):
            raise UnknownKind(slot, kind)
        return self.record(self.kinds[slot][kind](self, *args, **wires))

    def record(self, y: Any) -> Any:
        """Add a value to the trace, and return it."""
        x = y.x if isinstance(y, Value) else y
        if isinstance(x, np.ndarray):
            self.trace.append((self.path, x))
        return y

    def at(self, name: str, config: Any = None) -> Part:
        """Return a part inside this part."""
        return replace(self, path=f"{self.path}.{name}".lstrip("."), config=config)

    def weight(self, name: str = "weight") -> Array:
        """Return a weight of this part."""
        name = self.at(name).path
        if name not in self.weights:
            raise ValueError(f"`{name}` is missing in the weights")
        self.read.add(name)
        return np.asarray(self.weights[name], np.float64)

    def linear(self, x: Array, bias: bool) -> Any:
        """Return a linear layer: x W^T + b, with the weight W [out, in]."""
        return self.record(x @ self.weight().T + (self.weight("bias") if bias else 0))

    def split(self, y: Array, sizes: Mapping[str, int]) -> Iterator[Array]:
        """Yield the parts of the output y of this layer by name, in the order that the model declares.

        By default, the order is the order of `sizes`. A weight map names these parts, so their order matters.
        """
        declared = self.fused.get(self.path, sizes)
        if declared != sizes:
            raise ValueError(f"`{self.path}` must have the parts {sizes}; got {dict(declared)}")
        ends = np.cumsum([*declared.values()])[:-1]
        parts = dict(zip(declared, np.split(y, ends, axis=-1), strict=True))
        yield from (parts[name] for name in sizes)


def computed(models: Sequence[Part], rows: Sequence[Mapping[str, Value]]) -> Sequence[Mapping[str, Value]]:
    """Return the value of each node and of each input, for each row of the batch.

    A block that compares rows takes each wire as a list with the values of all rows, and the index of its row. A value
    with a row for each image is a list of the values of the images.
    """
    outputs: list[Any]
    for node in models[0].graph.nodes:
        parts = [model.at(node.module, model.graph.node(node.module).config) for model in models]
        wires = [
            {name: _wire(model, node, name, values) for name in node.signals}
            for model, values in zip(models, rows, strict=True)
        ]
        if node.config.compares_rows:
            batch = {name: [values[name] for values in wires] for name in node.signals}
            wires = [{**batch, "row": row} for row in range(len(rows))]
        outputs = [
            _for_each_image(part, node, values) if node.output.per_image else part(**values)
            for part, values in zip(parts, wires, strict=True)
        ]
        rows = [{**values, node.name: output} for values, output in zip(rows, outputs, strict=True)]
    return rows


def _for_each_image(part: Part, node: Node, wires: Mapping[str, Any]) -> list[Any]:
    """Return the output of a part for each image of a row. In its trace, the first axis is the image."""
    lists = {name: isinstance(node.wires[name], list) for name in wires}
    tables = {name for name in wires if not lists[name] and node.signals[name].type == "table"}
    count = next(len(value[0] if lists[name] else value) for name, value in wires.items() if name not in tables)
    images = [replace(part, trace=[]) for _ in range(count)]
    outputs = []
    for number, image in enumerate(images):
        values = {name: value for name, value in wires.items() if name in tables}
        single = {name: value for name, value in wires.items() if name not in tables}
        values |= {name: [v[number] for v in value] if lists[name] else value[number] for name, value in single.items()}
        outputs.append(image(**values))
    traces = zip(*(image.trace for image in images), strict=True)
    part.trace.extend((same[0][0], np.stack([x for _, x in same])) for same in traces)
    return outputs


def _wire(model: Part, node: Node, name: str, values: Mapping[str, Value]) -> Any:
    source = node.wires[name]
    if isinstance(source, list):
        return [values.get(name) for name in source]
    return _table(model, source) if node.signals[name].type == "table" else values[source]


def _table(model: Part, name: str) -> Array:
    """Return the token table of an embedding, which may belong to another embedding."""
    name = model.graph.node(name).module
    tie = model.graph.node(name).wires.get("tie")
    return _table(model, tie) if isinstance(tie, str) else model.weight(f"{name}.tokens.weight")


def rows(table: Array, ids: Array) -> Array:
    """Look up rows of a table; NumPy would count negative ids from the end."""
    if ids.size and not 0 <= ids.min() <= ids.max() < len(table):
        raise ValueError(
            f"token ids must be from 0 to {len(table) - 1}, the rows of the table; got {ids.min()} to {ids.max()}"
        )
    return table[ids]
