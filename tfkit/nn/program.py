"""Modules whose `forward` is written as straight-line code: the model, its layers, its embeddings and heads."""

import operator
import sys
from collections.abc import Callable, Mapping
from itertools import count
from textwrap import indent
from types import ModuleType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from tfkit.nn.code_files import run_text
from tfkit.nn.forward_text import GRAPH, LAYER, Operation, Value, forward_text, is_name
from tfkit.torch_private.compiler import forget_source

Steps = Mapping[Value, Operation]


class Program:
    """Writer of a module's `forward` as straight-line code: nothing is decided at run time.

    Every step has a name: the name of the child that it calls, or the variable of a result. In the text, a
    value gets this name if it is free; or `x`, if the previous x is no longer read; or it is inlined into the line that
    reads it.
    """

    def __init__(self) -> None:
        self._steps: dict[Value, Operation] = {}
        self._children: dict[str, nn.Module] = {}

    def input(self, name: str, annotation: Any = Tensor, *, optional: bool = False) -> Value:
        """Add an argument of `forward`; an optional argument is None by default."""
        if not is_name(name):
            raise ValueError(f"`{name}` cannot be the name of an argument")
        default = (None,) if optional else ()
        return self._add(
            Operation("placeholder", name, name, default, {}, annotation | None if optional else annotation)
        )

    def call(self, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Value:
        """Call `module`, which becomes the child `name`."""
        self.hold(name, module)
        return self.call_child(name, name, *args, **kwargs)

    def call_child(self, name: str, child: str, *args: Any, **kwargs: Any) -> Value:
        """Call a child, possibly not for the first time; `name` is the variable of the result."""
        return self._add(Operation("call_module", name, child, args, kwargs))

    def apply(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Value:
        """Call a function, for instance of torch or of `operator`."""
        return self._add(Operation("call_function", name, function, args, kwargs))

    def unpack(self, value: Value, *names: str) -> list[Value]:
        """Take a tuple apart; `names` are the variables of its parts."""
        return [self.apply(name, operator.getitem, value, index) for index, name in enumerate(names)]

    def weight(self, path: str) -> Value:
        """Add a parameter of a child, by its dotted path."""
        return self._add(Operation("get_attr", path.replace(".", "_"), path))

    def hold(self, name: str, module: nn.Module) -> None:
        """Make `module` the child `name` only for its weights, without a call."""
        self._children[name] = module

    def _add(self, step: Operation) -> Value:
        value = Value(f"%{len(self._steps)}")
        self._steps[value] = step
        return value

    def _finish(self, output: Any, returns: Any) -> None:
        if returns is None:
            returns = (Tensor,) * len(output) if isinstance(output, tuple) else Tensor
        annotation = tuple.__class_getitem__(returns) if isinstance(returns, tuple) else returns
        self._add(Operation("output", "output", "output", (output,), {}, annotation))

    def build(self, output: Any, class_name: str, returns: Any = None) -> nn.Module:
        """Build the module with a `forward` that returns `output`. Equal programs become objects of the same class.

        `returns` is the type of `output`, a tuple of types for a tuple of values; each is a Tensor unless given.
        """
        if not is_name(class_name):
            raise ValueError(f"`{class_name}` cannot be the name of a class")
        self._finish(output, returns)
        module = written_class(self._steps, class_name)()
        for name, child in self._children.items():
            module.add_module(name, child)
        return module

    def build_graph_module(
        self, output: Any, class_name: str, base: "type[WrittenGraph] | None" = None, returns: Any = None
    ) -> "WrittenGraph":
        """Build the module as a `torch.fx.GraphModule` or its subclass `base`, which can be edited."""
        self._finish(output, returns)
        root = nn.Module()
        for name, child in self._children.items():
            root.add_module(name, child)
        module = (base or WrittenGraph)(root, _graph(self._steps), class_name=class_name)
        for step in self._steps.values():
            if step.op == "get_attr":  # fx has copied the tensor: a later replacement must be read
                holder = step.target.rpartition(".")[0]
                module.set_submodule(holder, root.get_submodule(holder))
        return module


class WrittenGraph(fx.GraphModule):
    """A module with a `forward` written from its `graph`; after an edit, `recompile` writes it again."""

    def recompile(self) -> fx.graph.PythonCode:
        code = super().recompile()
        forget_source(type(self).forward)
        type(self).forward, self._code = written_forward(self.graph, type(self).__name__)
        return code

    def __str__(self) -> str:
        return f"{self!r}\n\n{self.code}"

    def __reduce__(self) -> Any:
        """Pickle the steps: fx would trace the code again, and trace into the functions that it calls."""
        generated = ("_graph", "_code", "_lineno_map", "_prologue_start")
        state = {name: value for name, value in vars(self).items() if name not in generated}
        return _empty_graph, (type(self).__mro__[1], type(self).__name__), (steps_of(self.graph), state)

    def __setstate__(self, state: Any) -> None:
        steps, attributes = state
        super().__setstate__(attributes)
        self.graph = _graph(steps)


def _empty_graph(base: type[WrittenGraph], class_name: str) -> WrittenGraph:
    """Create a graph module without its state, from which unpickling starts."""
    module = base.__new__(base)
    type(module).__name__ = class_name
    return module


def recomputed(layer: nn.Module, *args: Any) -> Any:
    """Return the result of a layer. Only its arguments are kept: the layer runs a second time in the backward pass."""
    return checkpoint(layer, *args, use_reentrant=False) if torch.is_grad_enabled() else layer(*args)


class Written(nn.Module):
    """A module of a class that a `Program` wrote: `code` is its forward."""

    steps: ClassVar[Steps]
    code: ClassVar[str]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        return _empty, (self.steps, type(self).__name__), *state


def _empty(steps: Steps, class_name: str) -> Written:
    """Create a module without its state, from which unpickling and copying start."""
    return Written.__new__(written_class(steps, class_name))


_CLASSES: dict[tuple[Any, ...], type[Written]] = {}
_COUNT = count()


def written_class(steps: Steps, class_name: str) -> type[Written]:
    """Return the class with these steps as its forward.

    All equal layers of a model are of one class, as if a person had written it: Python, TorchScript and `torch.compile`
    of the layers compile it once.
    """
    key = (class_name, *[(step.op, step.name, step.target, repr(step[3:])) for step in steps.values()])
    if key not in _CLASSES:
        _CLASSES[key] = _write_class(steps, class_name)
    return _CLASSES[key]


def _write_class(steps: Steps, class_name: str) -> type[Written]:
    names = {"Written": Written, class_name: ...}
    code = forward_text(steps, names, LAYER)
    module = ModuleType(f"{__name__}.{class_name}_{next(_COUNT)}")
    sys.modules[module.__name__] = module  # `inspect` looks here for the source of a class
    vars(module).update(names)
    kind: type[Written] = run_text(f"class {class_name}(Written):\n{indent(code, '    ')}", class_name, vars(module))[
        class_name
    ]
    kind.steps, kind.code = dict(steps), code
    return kind


def written_forward(graph: fx.Graph, name: str) -> tuple[Callable[..., Any], str]:
    """Compile a graph to a function, whose first argument is the module that it calls into; return its code too."""
    names: dict[str, Any] = {}
    code = forward_text(steps_of(graph), names, GRAPH)
    return run_text(code, name, names)["forward"], code


def _graph(steps: Steps) -> fx.Graph:
    """Convert steps to a graph of torch.fx."""
    graph = fx.Graph()
    nodes: dict[Value, fx.Node] = {}

    def node(value: Any) -> Any:
        return nodes[value] if isinstance(value, Value) else value

    for value, step in steps.items():
        args, kwargs = fx.node.map_aggregate(step.args, node), fx.node.map_aggregate(dict(step.kwargs), node)
        created = graph.create_node(step.op, step.target, args, kwargs, name=step.name, type_expr=step.annotation)
        if created.name != step.name:
            created.meta["variable"] = step.name
        nodes[value] = created
    return graph


def variable_of(node: fx.Node) -> str:
    """Return the preferred variable of a node; several nodes may use it in turn."""
    return str(node.meta.get("variable", node.name))


def steps_of(graph: fx.Graph) -> Steps:
    """Convert a graph of torch.fx to steps."""

    def value(part: Any) -> Any:
        return Value(part.name) if isinstance(part, fx.Node) else part

    return {
        Value(node.name): Operation(
            node.op,
            variable_of(node),
            node.target,
            fx.node.map_aggregate(node.args, value),
            fx.node.map_aggregate(node.kwargs, value),
            node.type,
        )
        for node in graph.nodes
    }
