"""From modules to classes: modules that differ only in numbers share a class, whose arguments are these numbers."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor, nn

from tfkit.building.initialize import RESETS
from tfkit.graph.expand import Graph
from tfkit.tools.eject.cleanup import changes_tensors
from tfkit.tools.eject.config import CONFIG, ConfigClass
from tfkit.tools.eject.source import written_out
from tfkit.tools.eject.specialise import Function, Specialiser
from tfkit.tools.eject.text import INDENT, Class, Statement, function_text, steps_text
from tfkit.tools.eject.torch_modules import (
    CONTAINERS,
    OF_PARAMETERS,
    Sizes,
    arguments_of,
    check_reproducible,
    constructor_call,
    has_torch_class,
    plain_attributes,
)

_RESERVED_NAMES = frozenset({"Config", "F", "NamedTuple", "OrderedDict", "Tensor", "dataclass", "nn", "torch"})
"""Names that every file uses."""
_AXES = {"0": "width", "1": "d_out", "2": "d_in"}
"""Names of the axes of a parameter, including the axes of stacked matrices."""


class Classes:
    """The classes of a model.

    Attributes:
        order: the classes, each after the classes that it uses.
        of: the class of each module that has one.

    `prefixes` may precede the names of nodes in the paths of modules.
    """

    def __init__(
        self, graph: Graph, specialiser: Specialiser, sizes: Sizes, config: ConfigClass, prefixes: Sequence[str] = ()
    ) -> None:
        self.whole = specialiser
        self.sizes = sizes
        self.config = config
        self.order: list[Class] = []
        self.of: dict[nn.Module, Class] = {}
        self._by_signature: dict[Any, Class] = {}
        self._methods: dict[nn.Module, list[Function]] = {}
        for function in specialiser.functions.values():
            if function.module is not None:
                self._methods.setdefault(function.module, []).append(function)
        self._gather(specialiser.model)
        locations: dict[Class, list[str]] = {}
        for path, module in specialiser.model.named_modules(remove_duplicate=False):
            if module in self.of:
                prefix = next((prefix for prefix in prefixes if path.startswith(prefix)), "")
                locations.setdefault(self.of[module], []).append(path.removeprefix(prefix))
        taken = {name for function in specialiser.functions.values() for name in function.uses}
        _make_names_unique(self.order, locations, graph, taken | {kind.__name__ for kind in specialiser.records})
        for ejected in self.order:
            self._fill(ejected, [module for module, owner in self.of.items() if owner is ejected])

    def _gather(self, module: nn.Module) -> Any:
        """Assign a class to a module and to all modules in it. Return a key that is equal for equal classes."""
        children = self._children(module)
        if type(module) in CONTAINERS:
            inner = [self._gather(child) for child in children.values()]
            kinds = tuple(dict.fromkeys(inner))
            names = () if isinstance(module, nn.ModuleList) else tuple(children)
            return type(module).__name__, kinds if len(kinds) == 1 and not names else tuple(inner), names
        if isinstance(module, OF_PARAMETERS):
            return type(module).__name__, tuple(dict(module.named_parameters()))
        if has_torch_class(module):
            check_reproducible(module)
            return type(module).__name__, tuple(arguments_of(module))
        if module not in self.of:
            below = tuple((name, self._gather(child)) for name, child in children.items())
            methods = {function.name: function_text(function) for function in self._left(module)}
            tensors = tuple(
                (n, t.dtype, t.requires_grad, n in module._parameters) for n, t in _direct_tensors(module).items()
            )
            attributes = tuple((name, len(_short_list(getattr(module, name)))) for name in self._attributes(module))
            contents = (tensors, tuple(self._frozen(module)), attributes)
            key = (type(module).__name__, below, tuple(methods.items()), *contents)
            if key not in self._by_signature:
                self._by_signature[key] = self._new(module, methods)
                self.order.append(self._by_signature[key])
            self.of[module] = self._by_signature[key]
        return self.of[module]

    def _new(self, module: nn.Module, methods: Mapping[str, str]) -> Class:
        """Create the class of a module, without the statements of its `__init__` that depend on names of classes."""
        filling = [f"self.get_parameter({name!r}).requires_grad_(False)" for name in self._frozen(module)]
        for reset in filter(None, (self.whole.functions.get((module, name)) for name in RESETS)):
            lines = steps_text(reset.body).splitlines()
            filling += (
                ["with torch.no_grad():", *(INDENT + line for line in lines)] if changes_tensors(reset.body) else lines
            )
        return Class(
            name=type(module).__name__,
            base=next((f"nn.{kind.__name__}" for kind in CONTAINERS if isinstance(module, kind)), "nn.Module"),
            docs=vars(type(module)).get("__doc__") or "",
            methods=[text for name, text in methods.items() if name not in RESETS],
            filling=filling,
        )

    def _left(self, module: nn.Module) -> list[Function]:
        """Return the remaining methods: forward first, then the others in the order of the source."""
        left = [
            function
            for function in self._methods.get(module, ())
            if function.returns is None or function.name == "forward"
        ]
        return sorted(left, key=lambda function: (function.name != "forward", function.code.line))

    def _used(self, module: nn.Module) -> set[str]:
        """Return the attributes of a module that its methods or other modules use."""
        return self.whole.read.get(module, set()).union(
            *(function.attributes for function in self._methods.get(module, ()))
        )

    def _children(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return the remaining children: children that contain tensors or are called."""
        children = {name: child for name, child in module._modules.items() if child is not None}
        if isinstance(module, CONTAINERS):
            return children
        called = self._used(module)
        return {
            name: child
            for name, child in children.items()
            if name in called or any(True for _ in chain(child.parameters(), child.buffers()))
        }

    def _attributes(self, module: nn.Module) -> list[str]:
        """Return the plain attributes that the methods of a module use, in the order of the module."""
        used = self._used(module)
        return [
            n
            for n, value in plain_attributes(module).items()
            if n in used and value is not None and not callable(value)
        ]

    def _frozen(self, module: nn.Module) -> list[str]:
        """Return the frozen parameters of children that no inner class freezes."""
        inside = list(module.named_modules(remove_duplicate=False))
        inner = tuple(f"{path}." for path, child in inside if child is not module and child in self.of)
        return [
            name
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad and "." in name and not name.startswith(inner)
        ]

    def _fill(self, ejected: Class, modules: list[nn.Module]) -> None:
        """Write the statements of a class and their values from its modules."""
        for module in modules:
            ejected.statements = list(self._statements(module))
            ejected.values[module] = {
                slot: text for statement in ejected.statements for slot, text in statement.values.items()
            }
        taken: dict[tuple[str, ...], str] = {}
        for slot in ejected.values[modules[0]]:
            values = tuple(ejected.values[module][slot] for module in modules)
            if len(set(values)) > 1:
                if values not in taken:
                    taken[values] = _argument_name(slot, values, set(taken.values()))
                ejected.arguments[slot] = taken[values]

    def _statements(self, module: nn.Module) -> Iterator[Statement]:
        """Yield the statements of `__init__` that create the attributes, tensors and children of a module."""
        for name in self._attributes(module):
            value = getattr(module, name)
            with written_out(f"`{type(module).__name__}.{name}`"):
                self._text(value)
            if items := {f"{name}.{index}": self._text(item) for index, item in enumerate(_short_list(value))}:
                yield Statement(f"self.{name} = [{', '.join('{}' for _ in items)}]", items)
            else:
                yield Statement(f"self.{name} = {{}}", {name: self._text(value)})
        for name, tensor in _direct_tensors(module).items():
            sizes = {f"{name}@{index}": self._text(size) for index, size in enumerate(self.sizes.of(tensor))}
            empty = _allocation_text(", ".join("{}" for _ in sizes), tensor)
            if name in module._parameters:
                frozen = "" if tensor.requires_grad else ", requires_grad=False"
                yield Statement(f"self.{name} = nn.Parameter({empty}{frozen})", sizes)
            else:
                passing = ", persistent=False" if name in module._non_persistent_buffers_set else ""
                yield Statement(f"self.register_buffer({name!r}, {empty}{passing})", sizes)
        for name, child in self._children(module).items():
            expression, values = self._of_child(name, child)
            target = (
                f"self.add_module({name!r}, {expression})"
                if isinstance(module, CONTAINERS)
                else f"self.{name} = {expression}"
            )
            yield Statement(target, values)

    def _of_child(self, name: str, child: nn.Module) -> Statement:
        """Return the expression that creates a child."""
        if child in self.of:
            arguments = self.of[child].texts_of(child)
            expression = self.of[child].call(dict.fromkeys(arguments, "{}"))
        elif type(child) in CONTAINERS:
            return Statement("{}", {name: self._container(child)})
        elif isinstance(child, OF_PARAMETERS):
            return Statement("{}", {name: self._parameters(child)})
        else:
            arguments = self._arguments(child)
            expression = constructor_call(child, dict.fromkeys(arguments, "{}"))
        return Statement(expression, {f"{name}.{argument}": text for argument, text in arguments.items()})

    def _text(self, value: Any) -> str:
        """Return a value as an expression."""
        if isinstance(value, nn.Module):
            return constructor_call(value, self._arguments(value))
        return self.config.text(value)

    def _arguments(self, module: nn.Module) -> dict[str, str]:
        """Return the arguments that create a torch module, as text. A tuple of one width becomes the width."""
        texts = {name: self._text(value) for name, value in arguments_of(module).items()}
        return {name: re.sub(r"^\((.*),\)$", r"\1", text) for name, text in texts.items()}

    def _expression(self, module: nn.Module) -> str:
        """Return the expression that creates a module."""
        statement = self._of_child("", module)
        return statement.text.format(*statement.values.values())

    def _container(self, module: nn.Module) -> str:
        """Return the expression that creates a list, mapping or sequence of modules."""
        children = [child for child in module._modules.values() if child is not None]
        items = [(name, self._expression(child)) for name, child in zip(module._modules, children, strict=True)]
        kind = f"nn.{type(module).__name__}"
        if isinstance(module, nn.ModuleDict):
            return f"{kind}({{{', '.join(f'{name!r}: {text}' for name, text in items)}}})"
        if isinstance(module, nn.Sequential) and [name for name, _ in items] != [*map(str, range(len(items)))]:
            return f"{kind}(OrderedDict([{', '.join(f'({name!r}, {text})' for name, text in items)}]))"
        counts = [(text, len(list(same))) for text, same in groupby(text for _, text in items)]
        runs = [text if n == 1 else f"*({text} for _ in range({n}))" for text, n in counts]
        if isinstance(module, nn.Sequential):
            return f"{kind}({', '.join(runs)})"
        if len(runs) == 1:
            return f"{kind}({items[0][1]} for _ in range({self.config.count(len(items))}))"
        return f"{kind}([{', '.join(runs if len(runs) <= 4 else [text for _, text in items])}])"

    def _parameters(self, module: nn.Module) -> str:
        """Return the expression that creates a list or mapping of parameters."""
        expressions = {
            name: f"nn.Parameter({_allocation_text(', '.join(map(self._text, self.sizes.of(parameter))), parameter)})"
            for name, parameter in module.named_parameters()
        }
        if isinstance(module, nn.ParameterDict):
            return f"nn.ParameterDict({{{', '.join(f'{name!r}: {text}' for name, text in expressions.items())}}})"
        return f"nn.ParameterList([{', '.join(expressions.values())}])"


def _short_list(value: Any) -> Sequence[Any]:
    """Return the items of a short list, which are written separately; empty for any other value."""
    return value if isinstance(value, list | tuple) and len(value) < 5 else ()


def _direct_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that belong directly to a module."""
    return {n: t for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}


def _allocation_text(sizes: str, tensor: Tensor) -> str:
    """Return the call that allocates memory for a tensor."""
    dtype = "" if tensor.dtype == torch.float32 else f", dtype={tensor.dtype}"
    return f"torch.empty({sizes or '()'}{dtype})"


def _argument_name(slot: str, values: tuple[str, ...], taken: set[str]) -> str:
    """Choose a name for an argument: the common name of its numbers, else the name of the slot."""
    words = {value.removeprefix(f"{CONFIG}.") for value in values}
    location = [_AXES.get(part.partition("@")[2], part) for part in slot.split(".") if not part.isdigit()]
    short = {"in_features": "d_in", "out_features": "d_out", "embedding_dim": "width", "num_embeddings": "rows"}
    name = short.get(location[-1], location[-1])
    if all(word.isidentifier() for word in words):
        common = set.intersection(*({"_".join(w.split("_")[n:]) for n in range(w.count("_") + 1)} for w in words))
        name = max(common, key=len, default=name)
    candidates = [name, "_".join((*location[:-1], name))]
    return next((candidate for candidate in candidates if candidate not in taken), f"{candidates[-1]}_{len(taken)}")


def _make_names_unique(
    classes: Sequence[Class], paths_of: Mapping[Class, list[str]], graph: Graph, taken: Set[str]
) -> None:
    """Make the names of classes unique: by node, by layer variant, or by number.

    A name that a function or an import uses gets a trailing underscore.
    """
    _rename_by_path(classes, paths_of, graph)
    seen = {*taken, *_RESERVED_NAMES, *keyword.kwlist}
    for ejected in classes:
        while ejected.name in seen:
            ejected.name += "_"
        seen.add(ejected.name)


def _rename_by_path(classes: Sequence[Class], paths_of: Mapping[Class, list[str]], graph: Graph) -> None:
    groups: dict[str, list[Class]] = {}
    for ejected in classes:
        groups.setdefault(ejected.name, []).append(ejected)
    for name, group in groups.items():
        if len(group) == 1:
            continue
        for word in (lambda path: path.partition(".")[0], lambda path: _variant_name(path, graph)):
            words = [{word(path) for path in paths_of[ejected]} for ejected in group]
            if all(len(prefixes) == 1 for prefixes in words) and len(set.union(*words)) == len(group):
                for ejected, (prefix,) in zip(group, words, strict=True):
                    ejected.name = _camel_case(prefix).removesuffix(name) + name
                break
        else:
            for number, ejected in enumerate(group[1:], 2):
                ejected.name = f"{name}{number}"


def _variant_name(path: str, graph: Graph) -> str:
    """Return the name of the variant of the layers around a module."""
    node, *words = path.split(".")
    if all(node != other.name for other in graph.nodes):  # in the names of Llama
        node, words = next(other.name for other in graph.nodes if other.stack is not None), [node, *words]
    stack = graph.node(node).stack
    return stack.layers[int(words[1])].name if stack is not None and words[:1] == ["layers"] and words[1:] else ""


def _camel_case(words: str) -> str:
    return "".join(word[:1].upper() + word[1:] for word in words.split("_"))
