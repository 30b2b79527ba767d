"""Modules to classes: modules that differ only in numbers share a class, and these numbers are its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from tfkit.graph.expand import Graph
from tfkit.tools.eject.call_graph import Specialised, Whole
from tfkit.tools.eject.ejected_class import Class, Statement
from tfkit.tools.eject.functions import function_text
from tfkit.tools.eject.making import Making
from tfkit.tools.eject.naming import argument_name, name_apart
from tfkit.tools.eject.same_modules import is_torch, plain
from tfkit.tools.eject.torch_modules import (
    CONTAINERS,
    OF_PARAMETERS,
    STANDS_FOR,
    arguments_of,
    base_of,
    check_as_made,
    is_container,
    made_by_torch,
)


class Classes(Making):
    """The classes of a model, from the leaves to the root."""

    def __init__(
        self, graph: Graph, whole: Whole, shapes: Mapping[int, tuple[Any, ...]], names: Mapping[str, Any]
    ) -> None:
        super().__init__(whole, shapes, names)
        self.order: list[Class] = []
        self._by_signature: dict[Any, Class] = {}
        self._methods: dict[nn.Module, dict[str, Specialised]] = {}
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
        """Find the class of a module and of all modules in it; the returned keys are equal for equal classes."""
        children = list(self.children(module).items())
        if is_container(module):
            inner = [self._gather(child) for _, child in children]
            kinds = tuple(dict.fromkeys(inner))
            names = () if isinstance(module, nn.ModuleList) else tuple(name for name, _ in children)
            return type(module).__name__, kinds if len(kinds) == 1 and not names else tuple(inner), names
        if isinstance(module, OF_PARAMETERS):
            return type(module).__name__, tuple(dict(module.named_parameters()))
        if is_torch(module) or type(module) in STANDS_FOR:
            check_as_made(module)
            return type(module).__name__, tuple(arguments_of(module))
        below = tuple((name, self._gather(child)) for name, child in children)
        if module in self.of:
            return id(self.of[module])
        methods = {
            name: function_text(name, one, self.whole, method=True) for name, one in self._sorted_methods(module)
        }
        tensors = tuple((n, t.dtype, n in module._parameters) for n, t in self.tensors(module).items())
        made = (tensors, tuple(self.frozen(module)), tuple(self.attributes(module)))
        key = (type(module).__name__, below, tuple(methods.items()), *made)
        if key not in self._by_signature:
            owners = [one for _, child in children for one in self._classes_in(child)]
            docs = vars(type(module)).get("__doc__") or ""
            self._by_signature[key] = Class(type(module).__name__, base_of(module), docs, [], methods)
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
        """The methods that are left: forward first, the others in the order of the source."""
        left = {
            name: one for name, one in self._methods.get(module, {}).items() if one.returns is None or name == "forward"
        }
        return sorted(left.items(), key=lambda item: (item[0] != "forward", item[1].code.line))

    def _used(self, module: nn.Module) -> set[str]:
        """The attributes that its own methods and other modules read."""
        methods = self._methods.get(module, {}).values()
        return set(self.whole.read.get(module, ())).union(*(method.attributes for method in methods))

    def children(self, module: nn.Module) -> dict[str, nn.Module]:
        """The children that are left: those that hold tensors, or are called."""
        called = self._used(module)
        every = isinstance(module, tuple(CONTAINERS.values()))
        return {
            name: self.whole.alikes[child]
            for name, child in module._modules.items()
            if child is not None and (every or name in called or holds(child))
        }

    def attributes(self, module: nn.Module) -> list[str]:
        """The plain attributes that the methods of a module read, in the module's order."""
        used = self._used(module)
        return [n for n, value in plain(module).items() if n in used and value is not None and not callable(value)]

    def tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """The parameters and buffers that a module holds itself."""
        return {n: t for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}

    def frozen(self, module: nn.Module) -> list[str]:
        """The frozen parameters that no class inside this one freezes itself."""
        inner = [
            path for path, one in module.named_modules() if one is not module and self.whole.alikes[one] in self.of
        ]
        return [
            name
            for name, parameter in module.named_parameters()
            if not parameter.requires_grad and not any(name.startswith(f"{path}.") for path in inner)
        ]

    def _fill(self, one: Class) -> None:
        """Fill the slots of a class; its children have been filled before."""
        for module in one.modules:
            for statement in self.statements(module):
                for slot, text in statement.values.items():
                    one.slots.setdefault(slot, {})[module] = text
        taken: dict[tuple[str, ...], str] = {}
        for slot, texts in one.slots.items():
            values = tuple(texts.get(module, "") for module in one.modules)
            if len(set(values)) > 1:
                if values not in taken:
                    taken[values] = argument_name(slot, values, set(taken.values()))
                one.arguments[slot] = taken[values]

    def statements(self, module: nn.Module) -> Iterator[Statement]:
        """The statements of its `__init__` that make the attributes, the tensors and the children of a module."""
        for name in self.attributes(module):
            value = getattr(module, name)
            if isinstance(value, list | tuple) and len(value) < 5:
                items = {f"{name}.{index}": self.text(item) for index, item in enumerate(value)}
                yield Statement(items, f"self.{name} = [{_blanks(items)}]".format)
            else:
                yield Statement({name: self.text(value)}, f"self.{name} = {{}}".format)
        for name, tensor in self.tensors(module).items():
            sizes = {f"{name}@{index}": self.text(size) for index, size in enumerate(self.sizes(tensor))}
            empty = self.empty(_blanks(sizes), tensor)
            if name in module._parameters:
                frozen = "" if tensor.requires_grad else ", requires_grad=False"
                yield Statement(sizes, f"self.{name} = nn.Parameter({empty}{frozen})".format)
            else:
                passing = ", persistent=False" if name in module._non_persistent_buffers_set else ""
                yield Statement(sizes, f"self.register_buffer({name!r}, {empty}{passing})".format)
        for name, child in self.children(module).items():
            target = f"self.add_module({name!r}, {{}})" if base_of(module) in CONTAINERS else f"self.{name} = {{}}"
            yield self._of_child(name, child, target)

    def _of_child(self, name: str, child: nn.Module, target: str) -> Statement:
        """The statement that makes a child in place of the blank of `target`."""
        if is_container(child) or isinstance(child, OF_PARAMETERS):
            return Statement({name: self.make(child)}, target.format)
        if child in self.of:
            owner = self.of[child]
            given = {argument: owner.slots[slot][child] for slot, argument in owner.arguments.items()}
            values = {f"{name}.{argument}": text for argument, text in given.items()}
            return Statement(values, target.format(owner.made(dict.fromkeys(given, "{}"))).format)
        arguments = {argument: self.text(value) for argument, value in arguments_of(child).items()}
        values = {f"{name}.{argument}": text for argument, text in arguments.items()}
        return Statement(
            values, lambda *texts: target.format(made_by_torch(child, dict(zip(arguments, texts, strict=True))))
        )


def _blanks(values: Mapping[str, str]) -> str:
    return ", ".join("{}" for _ in values)


def holds(module: nn.Module) -> bool:
    """True if a module has parameters or buffers."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())
