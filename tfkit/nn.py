"""The torch side of the contract: what every component's module is built from or called with.

Annotations are evaluated here, because TorchScript does not resolve those of a `NamedTuple` that are text.
"""

import hashlib
import linecache
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, fx, nn


class Context(NamedTuple):
    """What attention receives besides x. Computed once per forward by the stack, for all layers that share it.

    b batch, h heads, q queries, k keys.
    """

    mask: Tensor | None
    """Which keys a query reads: bool, True to read, or float, added to the scores; [b or 1, h or 1, q or 1, k]. None
    hides nothing, or only later keys where the module was built with `causal`."""
    rotary: Tensor | None
    """The table of the rotary positions, for the rotation of the same kind."""
    memory: Tensor | None
    """The sequence that cross-attention reads, [b, k, d_memory]; None in self-attention."""


class Linear(nn.Linear):
    """A linear layer whose weights are filled by the spec's `init`, not on construction.

    Args:
        d_in: width of the input.
        d_out: widths of the parts of the output; several for projections that are fused into one.
        bias: whether it has a bias.
        residual: whether the output is added to the residual stream.
    """

    def __init__(self, d_in: int, d_out: int | Sequence[int], *, bias: bool, residual: bool = False) -> None:
        self.parts = [d_out] if isinstance(d_out, int) else list(d_out)
        self.residual = residual
        super().__init__(d_in, sum(self.parts), bias=bias)

    def reset_parameters(self) -> None:
        """Nothing: the builder fills the weights once they have a place in memory."""


class Table(nn.Embedding):
    """An embedding table whose weights are filled by the spec's `init`, not on construction."""

    def reset_parameters(self) -> None:
        """Nothing: the builder fills the weights once they have a place in memory."""


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax of `scores` [b, h, q, k] over the keys that `mask` (see `Context`) lets through.

    A query that may read no key gets zeros, as in `scaled_dot_product_attention`, and no NaN in either direction.
    """
    if mask is None:
        return torch.softmax(scores, dim=-1)
    hidden = ~mask if mask.dtype == torch.bool else mask == -math.inf
    if mask.dtype != torch.bool:
        scores = scores + mask.masked_fill(hidden, 0.0)
    unreadable = hidden.all(dim=-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(hidden & ~unreadable, -math.inf), dim=-1)
    return weights.masked_fill(unreadable, 0.0)


class Value(str):
    """What a step of a `Program` gives, to be used as an argument of later steps."""


class Step(NamedTuple):
    """One line of a program: an argument of `forward`, a call, a weight, or what is returned."""

    op: str
    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Program:
    """Writes the `forward` of a module as straight-line code: one call per step, nothing decided at run time.

    Every step has a name; the module called in it becomes a child of that name.
    """

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._children: dict[str, nn.Module] = {}

    def input(self, name: str, annotation: Any = Tensor, *, optional: bool = False) -> Value:
        """An argument of `forward`; an optional one is None unless given."""
        default = {"default_value": None} if optional else {}
        return self._add("placeholder", name, annotation | None if optional else annotation, (), default)

    def call(self, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Value:
        """A call of `module`, which becomes the child `name`."""
        self._children[name] = module
        return self._add("call_module", name, name, args, kwargs)

    def apply(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Value:
        """A call of a function of torch or of `operator`."""
        return self._add("call_function", name, function, args, kwargs)

    def weight(self, path: str) -> Value:
        """A parameter of a child by its dotted path."""
        return self._add("get_attr", path.replace(".", "_"), path, (), {})

    def _add(self, op: str, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
        self._steps.append(Step(op, name, target, args, kwargs))
        return Value(f"%{len(self._steps)}")

    def build(self, output: Any, class_name: str) -> nn.Module:
        """The module whose `forward` returns `output`. Equal programs become objects of one class."""
        self._add("output", "output", "output", (output,), {})
        module = written_class(self._steps, class_name)()
        for name, child in self._children.items():
            module.add_module(name, child)
        return module

    def build_graph_module(self, output: Any, class_name: str) -> fx.GraphModule:
        """The same as a `torch.fx.GraphModule`, which can be taken apart and edited."""
        self._add("output", "output", "output", (output,), {})
        root = nn.Module()
        for name, child in self._children.items():
            root.add_module(name, child)
        return fx.GraphModule(root, _graph(self._steps), class_name=class_name)


class Written(nn.Module):
    """A module whose class was written by a `Program`: `code` is its forward."""

    steps: ClassVar[Sequence[Step]]
    code: ClassVar[str]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        return _empty, (self.steps, type(self).__name__), *state


def _empty(steps: Sequence[Step], class_name: str) -> Written:
    """A module without its state: what unpickling and copying start from."""
    return Written.__new__(written_class(steps, class_name))


_CLASSES: dict[tuple[Any, ...], type[Written]] = {}


def written_class(steps: Sequence[Step], class_name: str) -> type[Written]:
    """The class with these steps as its forward.

    All equal layers of a model are of one class, as if a person had written it: it is compiled once, by Python, by
    TorchScript, and by `torch.compile` of the layers.
    """
    key = (class_name, *[(op, name, target, repr(args), repr(kwargs)) for op, name, target, args, kwargs in steps])
    if key not in _CLASSES:
        _CLASSES[key] = _write_class(steps, class_name)
    return _CLASSES[key]


def _write_class(steps: Sequence[Step], class_name: str) -> type[Written]:
    text = _graph(steps).python_code("self")
    code = text.src.strip() + "\n"
    file = f"<tfkit {class_name} {hashlib.sha256(code.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)  # for TorchScript and tracebacks
    names = dict(text.globals)
    exec(compile(code, file, "exec"), names)
    body = {"steps": tuple(steps), "code": code, "forward": names["forward"], "__module__": __name__}
    return type(class_name, (Written,), body)


def _graph(steps: Sequence[Step]) -> fx.Graph:
    graph = fx.Graph()
    nodes: dict[Value, fx.Node] = {}

    def node(value: Any) -> Any:
        return nodes[value] if isinstance(value, Value) else value

    for number, (op, name, target, args, kwargs) in enumerate(steps, 1):
        args, kwargs = fx.node.map_aggregate(args, node), fx.node.map_aggregate(kwargs, node)
        if op == "placeholder":
            written = graph.placeholder(name, type_expr=target, **kwargs)
        elif op == "output":
            written = graph.output(*args)
        elif op == "get_attr":
            written = graph.get_attr(target)
        else:
            written = graph.create_node(op, target, args, kwargs, name=name)
        nodes[Value(f"%{number}")] = written
    return graph
