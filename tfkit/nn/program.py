"""Modules whose `forward` is written as straight-line code: the model, its layers, its embeddings and heads."""

import hashlib
import linecache
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint


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

    def hold(self, name: str, module: nn.Module) -> None:
        """Make `module` the child `name` for the sake of its weights, without a call."""
        self._children[name] = module

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

    def build_graph_module(
        self, output: Any, class_name: str, base: type[fx.GraphModule] = fx.GraphModule
    ) -> fx.GraphModule:
        """The same as a `torch.fx.GraphModule`, which can be taken apart and edited; or as a kind of it, `base`."""
        self._add("output", "output", "output", (output,), {})
        root = nn.Module()
        for name, child in self._children.items():
            root.add_module(name, child)
        module = base(root, _graph(self._steps), class_name=class_name)
        for step in self._steps:
            if step.op == "get_attr":  # of which fx has copied the tensor: what takes its place later is to be read
                holder = step.target.rpartition(".")[0]
                module.set_submodule(holder, root.get_submodule(holder))
        return module


class CallTracer(fx.Tracer):
    """Reads the code of a model again, as unpickling does, and leaves the functions that it calls as calls."""

    def trace(self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        forward = cast(Any, type(root).forward if isinstance(root, nn.Module) else root)
        called = {id(value) for value in forward.__globals__.values() if isinstance(value, FunctionType)}
        self._autowrap_function_ids |= called
        return super().trace(root, concrete_args)


def recomputed(layer: nn.Module, *args: Any) -> Any:
    """The result of a layer, of which only the arguments are kept for the backward: it then runs a second time."""
    return checkpoint(layer, *args, use_reentrant=False) if torch.is_grad_enabled() else layer(*args)


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
    forward, code = written_forward(_graph(steps), class_name)
    body = {"steps": tuple(steps), "code": code, "forward": forward, "__module__": __name__}
    return type(class_name, (Written,), body)


def written_forward(graph: fx.Graph, name: str) -> tuple[Callable[..., Any], str]:
    """A graph as a function whose first argument is the module with what it calls, and its code."""
    text = graph.python_code("self")
    code = text.src.strip() + "\n"
    file = f"<tfkit {name} {hashlib.sha256(code.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)  # for TorchScript and tracebacks
    names: dict[str, Any] = dict(text.globals)
    exec(compile(code, file, "exec"), names)
    return names["forward"], code


def _graph(steps: Sequence[Step]) -> fx.Graph:
    graph = fx.Graph(tracer_cls=CallTracer)
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
