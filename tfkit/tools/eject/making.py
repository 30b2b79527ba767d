"""Values and modules as the expressions that make them in the file."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tfkit.tools.eject.call_graph import Whole
from tfkit.tools.eject.cleanup import Replaced, reads
from tfkit.tools.eject.ejected_class import CONFIG, Class
from tfkit.tools.eject.symbols import text_of
from tfkit.tools.eject.torch_modules import OF_PARAMETERS, arguments_of, is_container, made_by_torch, name_of
from tfkit.torch_private.tensors import storage_key


class Making:
    """Writes the expressions of an `__init__`.

    Attributes:
        of: the class of each module that has one.
        names: the numbers of the spec by name.
        derived: names of numbers that follow from those, each with its expression.
    """

    def __init__(self, whole: Whole, shapes: Mapping[int, tuple[Any, ...]], names: Mapping[str, Any]) -> None:
        self.whole = whole
        self.shapes = shapes
        self.names = names
        self.of: dict[nn.Module, Class] = {}
        self.derived: dict[str, str] = {}

    def sizes(self, tensor: Tensor) -> tuple[Any, ...]:
        """The shape of a tensor, with named numbers if it was made with them."""
        found = self.shapes.get(storage_key(tensor), ())
        return found if found == tuple(tensor.shape) else tuple(tensor.shape)

    def empty(self, sizes: str, tensor: Tensor) -> str:
        """The call that allocates memory for a tensor."""
        dtype = "" if tensor.dtype == torch.float32 else f", dtype={tensor.dtype}"
        return f"torch.empty({sizes or '()'}{dtype})"

    def text(self, value: Any) -> str:
        """A value as an expression, numbers of the spec by their names in the config."""
        if isinstance(value, nn.Module):
            return self._torch(value)
        if callable(value) and (name := name_of(value)) is not None:
            return name
        parts = value if isinstance(value, list | tuple) else [value]
        text, derived = text_of(value), {n: how for part in parts for n, how in getattr(part, "derived", {}).items()}
        # If the config has the name already, its expression is written out.
        clash = {name: ast.parse(derived.pop(name), mode="eval").body for name in derived.keys() & self.names.keys()}
        tree = Replaced(clash).visit(ast.parse(text, mode="eval"))
        names = dict(self.names) | {name: eval(how, dict(self.names)) for name, how in derived.items()}
        if not (reads(tree) & names.keys()):
            return text
        if eval(ast.unparse(tree), {"__builtins__": {}}, names) != value:
            return repr(value)
        self.derived |= derived
        return ast.unparse(_Prefixed(names).visit(tree))

    def value(self, text: str) -> Any:
        """The value of an expression over the config."""
        names = dict(self.names)
        names |= {name: eval(how, dict(self.names)) for name, how in self.derived.items()}
        return eval(text, {"__builtins__": {}}, {CONFIG: SimpleNamespace(**names), "torch": torch, "nn": nn})

    def container(self, module: nn.Module) -> str:
        """The expression that makes a list, a mapping or a sequence of modules."""
        children = [self.whole.alikes[child] for child in module._modules.values() if child is not None]
        items = [(name, self.make(child)) for name, child in zip(module._modules, children, strict=True)]
        kind = f"nn.{type(module).__name__}"
        if isinstance(module, nn.ModuleDict):
            return f"{kind}({{{', '.join(f'{name!r}: {text}' for name, text in items)}}})"
        if isinstance(module, nn.Sequential) and [name for name, _ in items] != [*map(str, range(len(items)))]:
            return f"{kind}(OrderedDict([{', '.join(f'({name!r}, {text})' for name, text in items)}]))"
        runs: list[tuple[str, int]] = []
        for _, text in items:
            same = bool(runs) and runs[-1][0] == text
            runs = [*runs[:-1], (text, runs[-1][1] + 1)] if same else [*runs, (text, 1)]
        if isinstance(module, nn.Sequential):
            return f"{kind}({', '.join(map(self._run, runs))})"
        if len(runs) == 1:
            return f"{kind}({runs[0][0]} for _ in range({self._count(runs[0][1])}))"
        return f"{kind}([{', '.join(map(self._run, runs))}])" if len(runs) <= 4 else self._by_turns(children)

    def _run(self, run: tuple[str, int]) -> str:
        """Items of a list that are made alike."""
        text, count = run
        return text if count == 1 else f"*({text} for _ in range({count}))"

    def _parameters(self, module: nn.Module) -> str:
        """The expression that makes a list or a mapping of parameters."""
        made = {
            name: f"nn.Parameter({self.empty(', '.join(map(self.text, self.sizes(one))), one)})"
            for name, one in module.named_parameters()
        }
        if isinstance(module, nn.ParameterDict):
            return f"nn.ParameterDict({{{', '.join(f'{name!r}: {text}' for name, text in made.items())}}})"
        return f"nn.ParameterList([{', '.join(made.values())}])"

    def _by_turns(self, children: list[nn.Module]) -> str:
        """The expression for layers that alternate: one class with different numbers, or several classes."""
        if len({id(self.of.get(child)) for child in children}) > 1 or children[0] not in self.of:
            return f"nn.ModuleList([{', '.join(self.make(child) for child in children)}])"
        owner = self.of[children[0]]
        names = list(dict.fromkeys(owner.arguments.values()))
        slots = [next(slot for slot, name in owner.arguments.items() if name == one) for one in names]
        differ = [s for s in slots if len({owner.slots[s][child] for child in children}) > 1]
        loop = [owner.arguments[slot] for slot in differ]
        given = {owner.arguments[s]: owner.arguments[s] if s in differ else owner.slots[s][children[0]] for s in slots}
        rows = [", ".join(owner.slots[slot][child] for slot in differ) for child in children]
        values = ", ".join(rows if len(differ) == 1 else [f"({row})" for row in rows])
        return f"nn.ModuleList({owner.made(given)} for {', '.join(loop)} in ({values}))"

    def _count(self, count: int) -> str:
        """A number of layers."""
        names = [name for name, value in self.names.items() if value == count and name.endswith("n_layers")]
        return f"{CONFIG}.{names[0]}" if names else str(count)

    def make(self, module: nn.Module) -> str:
        """The expression that makes a child."""
        module = self.whole.alikes[module]
        if module in self.of:
            return self.of[module].call(module)
        if is_container(module):
            return self.container(module)
        return self._parameters(module) if isinstance(module, OF_PARAMETERS) else self._torch(module)

    def _torch(self, module: nn.Module) -> str:
        return made_by_torch(module, {name: self.text(value) for name, value in arguments_of(module).items()})


class _Prefixed(ast.NodeTransformer):
    """Names of numbers as attributes of the config."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Attribute(ast.Name(CONFIG), node.id) if node.id in self.names else node
