"""The meaning of a graph: its nodes in order, for one sequence of the batch after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tfkit.graph.expand import Graph, Node

Array: TypeAlias = Annotated[NDArray[Any], np.ndarray, "an array"]
Function: TypeAlias = Callable[..., Any]
Kinds: TypeAlias = Mapping[str, Mapping[str, Function]]
"""By slot and kind, the function that defines it."""


class UnknownKind(ValueError):  # noqa: N818 - it reads as a sentence
    """A kind that no function defines."""

    def __init__(self, slot: str, kind: str) -> None:
        super().__init__(f"no function defines {slot} `{kind}`: give one, kinds={{'{slot}': {{'{kind}': function}}}}")
        self.slot, self.kind = slot, kind


class Value(NamedTuple):
    """A value on a wire: token ids [t], a sequence [t, width], a vector [width], a length."""

    x: Array
    real: Array
    """False for padding, [t], or for what a token may not read, [t, t]; of a vector, False if it stands for padding."""

    @property
    def tokens(self) -> Array:
        """True where there is a token: in a mask of pairs, one that reads itself."""
        return self.real.diagonal() if self.real.ndim == 2 else self.real


class Result(NamedTuple):
    """The values that a model returns, and those of its components."""

    outputs: Mapping[str, Array]
    """By the name of the node, [b, ...]."""
    real: Mapping[str, Array]
    """False where an output stands for padding and has no meaning: [b, t], or [b] for vectors."""
    trace: list[tuple[str, Array]]
    """The output of each component, [b, ...], with its path, in the order in which they end."""


@dataclass
class Model:
    """The weights of a model and the functions of its kinds, for one sequence."""

    graph: Graph
    weights: Mapping[str, Array]
    kinds: Kinds
    read: set[str] = field(default_factory=set)
    """The names of the weights that were read."""
    trace: list[tuple[str, Array]] = field(default_factory=list)

    def __call__(self, values: dict[str, Value]) -> dict[str, Value]:
        """The value of each node and of each input."""
        for node in self.graph.nodes:
            wires = {name: self._wire(node, name, source, values) for name, source in node.wires.items()}
            values = {**values, node.name: Part(self, node.name, node.config)(**wires)}
        return values

    def _wire(self, node: Node, name: str, source: str | list[str], values: Mapping[str, Value]) -> Any:
        if isinstance(source, list):
            return [values.get(one) for one in source]
        return self.table(source) if node.signals[name].type == "table" else values[source]

    def table(self, name: str) -> Array:
        """The token table of an embedding, which may be that of another one."""
        tie = self.graph.node(name).wires.get("tie")
        return self.table(tie) if isinstance(tie, str) else self.weight(f"{name}.tokens.weight")

    def weight(self, name: str) -> Array:
        """The weight of that name in the state dict."""
        if name not in self.weights:
            raise ValueError(f"the weights lack `{name}`")
        self.read.add(name)
        return np.asarray(self.weights[name], np.float64)


@dataclass(frozen=True)
class Part:
    """A component at its place: a call computes its output by the function of its kind."""

    model: Model
    path: str
    config: Any = None

    def __call__(self, *args: Any, **wires: Any) -> Any:
        slot, kind = self.config.slot, self.config.kind_name()
        if kind not in self.model.kinds.get(slot, {}):
            raise UnknownKind(slot, kind)
        return self.record(self.model.kinds[slot][kind](self, *args, **wires))

    def record(self, y: Any) -> Any:
        """Return a value after it was added to the trace."""
        x = y.x if isinstance(y, Value) else y
        if isinstance(x, np.ndarray):
            self.model.trace.append((self.path, x))
        return y

    def at(self, name: str, config: Any = None) -> Part:
        """A part of this one; without a config it has only weights."""
        return Part(self.model, f"{self.path}.{name}", config)

    def optional(self, name: str, config: Any, x: Array) -> Any:
        """The output of what fills a slot, or x if it is empty."""
        return x if config is None else self.at(name, config)(x)

    def weight(self, name: str = "weight") -> Array:
        """A weight of this part."""
        return self.model.weight(f"{self.path}.{name}")

    def linear(self, x: Array, bias: bool) -> Any:
        """A linear layer: x W^T + b, with the weight W [out, in]."""
        return self.record(x @ self.weight().T + (self.weight("bias") if bias else 0))


def rows(table: Array, ids: Array) -> Array:
    """The rows of a table; NumPy would count negative ids from the end."""
    if ids.size and not 0 <= ids.min() <= ids.max() < len(table):
        raise ValueError(f"ids from {ids.min()} to {ids.max()} for a table of {len(table)} rows")
    return table[ids]
