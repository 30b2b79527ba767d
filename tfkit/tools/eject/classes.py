"""Modules to classes: what is alike but for its numbers is one class, and numbers that differ are its arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn

from tfkit.graph.expand import Graph
from tfkit.tools.eject.alike import is_torch, plain
from tfkit.tools.eject.ejected_class import CONFIG, Class
from tfkit.tools.eject.functions import function_text
from tfkit.tools.eject.naming import argument_name, name_apart
from tfkit.tools.eject.symbols import text_of
from tfkit.tools.eject.tidy import Replaced, reads
from tfkit.tools.eject.torch_modules import STANDS_FOR, arguments_of, is_container, made_by_torch
from tfkit.tools.eject.whole import Specialised, Whole


class Classes:
    """The classes of a model, from the leaves to the root."""

    def __init__(
        self, graph: Graph, whole: Whole, shapes: Mapping[int, tuple[Any, ...]], names: Mapping[str, Any]
    ) -> None:
        self.whole = whole
        self.shapes = shapes
        self.names = names
        self.of: dict[nn.Module, Class] = {}
        self.order: list[Class] = []
        self._by_signature: dict[Any, Class] = {}
        self._methods: dict[nn.Module, dict[str, Specialised]] = {}
        self.derived: dict[str, str] = {}
        """Names of numbers that follow from those of the config, and how."""
        for key, entry in whole.functions.items():
            if len(key) == 2:
                self._methods.setdefault(key[0], {})[key[1]] = entry
        self._gather(whole.alikes[whole.model])
        taken = {name for entry in whole.functions.values() for name in entry.uses}
        name_apart(self.order, self._places(), graph, taken | {kind.__name__ for kind in whole.records})
        for one in self.order:
            self._fill(one)

    def _places(self) -> dict[int, list[str]]:
        """The paths of the modules of each class, by the `id` of the class."""
        places: dict[int, list[str]] = {}
        for path, module in self.whole.model.named_modules():
            if (first := self.whole.alikes[module]) in self.of:
                places.setdefault(id(self.of[first]), []).append(path)
        return places

    def _gather(self, module: nn.Module) -> Any:
        """Find the class of a module and of all below it; what comes back is equal for equal classes."""
        children = list(self.children(module).items())
        if is_container(module):
            inner = [self._gather(child) for _, child in children]
            kinds = tuple(dict.fromkeys(inner))
            names = tuple(name for name, _ in children) if isinstance(module, nn.ModuleDict) else ()
            return type(module).__name__, kinds if len(kinds) == 1 and not names else tuple(inner), names
        if is_torch(module) or type(module) in STANDS_FOR:
            return type(module).__name__, tuple(arguments_of(module))
        below = tuple((name, self._gather(child)) for name, child in children)
        if module in self.of:
            return id(self.of[module])
        methods = {
            name: function_text(name, one, self.whole, method=True) for name, one in self._sorted_methods(module)
        }
        parameters = tuple((n, p.requires_grad) for n, p in module._parameters.items() if p is not None)
        key = (type(module).__name__, below, tuple(methods.items()), parameters, tuple(self.attributes(module)))
        if key not in self._by_signature:
            owners = [one for _, child in children for one in self._classes_in(child)]
            base = "nn.ModuleDict" if isinstance(module, nn.ModuleDict) else "nn.Module"
            docs = vars(type(module)).get("__doc__") or ""
            self._by_signature[key] = Class(type(module).__name__, base, docs, [], methods)
            self._by_signature[key].children = list({id(one): one for one in owners}.values())
            self.order.append(self._by_signature[key])
        self.of[module] = self._by_signature[key]
        self.of[module].modules.append(module)
        return id(self.of[module])

    def _classes_in(self, module: nn.Module) -> list[Class]:
        """The class of a module; those of its children, if it is a list or a mapping."""
        if is_container(module):
            return [one for child in module.children() for one in self._classes_in(self.whole.alikes[child])]
        return [self.of[module]] if module in self.of else []

    def _sorted_methods(self, module: nn.Module) -> list[tuple[str, Specialised]]:
        """The methods that are left, forward in front, the others as in the source."""
        left = {
            name: one for name, one in self._methods.get(module, {}).items() if one.returns is None or name == "forward"
        }
        return sorted(left.items(), key=lambda item: (item[0] != "forward", item[1].code.line))

    def children(self, module: nn.Module) -> dict[str, nn.Module]:
        """The children that are left: those that hold something, or are called."""
        called = set(self.whole.read.get(module, ())).union(
            *(m.attributes for m in self._methods.get(module, {}).values())
        )
        every = isinstance(module, nn.ModuleList | nn.ModuleDict)
        return {
            name: self.whole.alikes[child]
            for name, child in module._modules.items()
            if child is not None and (every or name in called or holds(child))
        }

    def attributes(self, module: nn.Module) -> list[str]:
        """The plain attributes that its methods read, in the order in which it has them."""
        used = set(self.whole.read.get(module, ())).union(
            *(m.attributes for m in self._methods.get(module, {}).values())
        )
        return [n for n, value in plain(module).items() if n in used and value is not None and not callable(value)]

    def _fill(self, one: Class) -> None:
        """Say what stands in the slots of a class, whose children have been filled before."""
        for module in one.modules:
            for slot, text in self._slots(module):
                one.slots.setdefault(slot, {})[module] = text
        taken: dict[tuple[str, ...], str] = {}
        for slot, texts in one.slots.items():
            values = tuple(texts.get(module, "") for module in one.modules)
            if len(set(values)) > 1:
                if values not in taken:
                    taken[values] = argument_name(slot, values, set(taken.values()))
                one.arguments[slot] = taken[values]

    def _slots(self, module: nn.Module) -> Iterator[tuple[str, str]]:
        for name in self.attributes(module):
            value = getattr(module, name)
            if isinstance(value, list | tuple) and len(value) < 5:
                yield from ((f"{name}.{index}", self.text(item)) for index, item in enumerate(value))
            else:
                yield name, self.text(value)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                sizes = self.shapes.get(parameter.untyped_storage()._cdata, tuple(parameter.shape))
                yield from ((f"{name}@{index}", self.text(size)) for index, size in enumerate(sizes))
        for name, child in self.children(module).items():
            yield from self._slots_of_child(name, child)

    def _slots_of_child(self, name: str, child: nn.Module) -> Iterator[tuple[str, str]]:
        if is_container(child):
            yield name, self.container(child)
        elif child in self.of:
            owner = self.of[child]
            for slot, argument in owner.arguments.items():
                yield f"{name}.{argument}", owner.slots[slot][child]
        else:
            for argument, value in arguments_of(child).items():
                yield f"{name}.{argument}", self.text(value)

    def text(self, value: Any) -> str:
        """A value as an expression, numbers of the spec by their names in the config."""
        parts = value if isinstance(value, list | tuple) else [value]
        text, derived = text_of(value), {n: how for part in parts for n, how in getattr(part, "derived", {}).items()}
        # A name that the config has already: what it stands for is written out.
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
        return eval(text, {"__builtins__": {}}, {CONFIG: SimpleNamespace(**names)})

    def container(self, module: nn.Module) -> str:
        """How a list or a mapping of modules is made."""
        children = [self.whole.alikes[child] for child in module.children()]
        if isinstance(module, nn.ModuleDict):
            items = [f"{name!r}: {self.make(child)}" for name, child in zip(module, children, strict=True)]
            return f"nn.ModuleDict({{{', '.join(items)}}})"
        runs: list[tuple[str, int]] = []
        for child in children:
            text = self.make(child)
            same = bool(runs) and runs[-1][0] == text
            runs = [*runs[:-1], (text, runs[-1][1] + 1)] if same else [*runs, (text, 1)]
        if len(runs) == 1:
            return f"nn.ModuleList({runs[0][0]} for _ in range({self._count(runs[0][1])}))"
        if len(runs) <= 4:
            parts = [text if count == 1 else f"*({text} for _ in range({count}))" for text, count in runs]
            return f"nn.ModuleList([{', '.join(parts)}])"
        return self._by_turns(children)

    def _by_turns(self, children: list[nn.Module]) -> str:
        """Layers in turns: one class with other numbers, or several classes."""
        owners = list(dict.fromkeys(self.of[child].name for child in children))
        if len(owners) > 1:
            made = dict.fromkeys(self.make(child) for child in children)
            return f"nn.ModuleList([{', '.join(self.make(child) for child in children)}])" if made else ""
        owner = self.of[children[0]]
        names = list(dict.fromkeys(owner.arguments.values()))
        slots = [next(slot for slot, name in owner.arguments.items() if name == one) for one in names]
        differ = [s for s in slots if len({owner.slots[s][child] for child in children}) > 1]
        loop = [owner.arguments[slot] for slot in differ]
        parts = [CONFIG] * owner.takes_config
        parts += [
            f"{owner.arguments[s]}={owner.arguments[s] if s in differ else owner.slots[s][children[0]]}" for s in slots
        ]
        rows = [", ".join(owner.slots[slot][child] for slot in differ) for child in children]
        values = ", ".join(rows if len(differ) == 1 else [f"({row})" for row in rows])
        return f"nn.ModuleList({owner.name}({', '.join(parts)}) for {', '.join(loop)} in ({values}))"

    def _count(self, count: int) -> str:
        """A number of layers."""
        names = [name for name, value in self.names.items() if value == count and name.endswith("n_layers")]
        return f"{CONFIG}.{names[0]}" if names else str(count)

    def make(self, module: nn.Module) -> str:
        """How a child is made, as an expression."""
        module = self.whole.alikes[module]
        if module in self.of:
            return self.of[module].call(module)
        if is_container(module):
            return self.container(module)
        return made_by_torch(module, {name: self.text(value) for name, value in arguments_of(module).items()})


class _Prefixed(ast.NodeTransformer):
    """Names of numbers as attributes of the config."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Attribute(ast.Name(CONFIG), node.id) if node.id in self.names else node


def holds(module: nn.Module) -> bool:
    """Whether there are parameters or buffers in it."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())
