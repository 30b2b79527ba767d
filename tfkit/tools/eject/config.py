"""Numbers with the expressions over the spec that produced them, such as `2 * d_model`, and the config of a file."""

from __future__ import annotations

import ast
import copy
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn
from torch.nn import functional as F

from tfkit.graph.expand import Graph
from tfkit.tools.eject.cleanup import Replaced, variable_names

CONFIG = "config"
"""Name of the config in `__init__`."""
_LITERAL = (int, float, complex, str, bytes, range, slice, torch.dtype, torch.layout, torch.memory_format)
"""Types whose `repr` is a valid expression."""
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "truediv": "/", "pow": "**", "mod": "%"}
"""Signs of the operations on named numbers, by the name of the function in `operator`."""


class Named:
    """A number with the expression of its value, in which names are fields of `Config`."""

    text: str
    terms: Mapping[str, int] | None = None
    """For a sum: the number of occurrences of each term."""

    def __neg__(self) -> Any:
        return named_number(-_plain_number(self), f"-{_operand_text(self)}")


class NamedInt(Named, int):
    """An integer of the spec."""


class NamedFloat(Named, float):
    """A float of the spec."""


def named_number(value: Any, text: str) -> Any:
    """Return a number with a name, and any other value unchanged."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    number = NamedInt(value) if isinstance(value, int) else NamedFloat(value)
    number.text = text
    return number


def text_of(value: Any) -> str:
    """Return an expression for a value. Raise NotImplementedError if there is none."""
    if isinstance(value, Named):
        return value.text
    if isinstance(value, list | tuple):
        inner = ", ".join(map(text_of, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if value is None or (isinstance(value, _LITERAL) and not isinstance(value, Enum)):
        return repr(value)
    if (name := name_of(value)) is not None:
        return name
    raise NotImplementedError(f"it contains {str(value)[:60]}, which cannot be written as an expression")


def name_of(value: Any) -> str | None:
    """Return the public name of a function or class of torch."""
    homes = (("torch", torch), ("nn", nn))  # a module of functions also imports classes
    for prefix, owner in homes if isinstance(value, type) else (("nn.functional", F), *homes):
        if (name := getattr(value, "__name__", "")) and getattr(owner, name, None) is value:
            return f"{prefix}.{name}"
    return None


def _combined_number(function: Callable[[Any, Any], Any], a: Any, b: Any, sign: str) -> Any:
    if not isinstance(a, int | float) or not isinstance(b, int | float):
        return NotImplemented
    value = function(_plain_number(a), _plain_number(b))
    if sign == "+" and isinstance(value, int):
        return _named_sum(value, a, b)
    if sign == "*" and 0 in (a, b):
        return value
    if isinstance(value, int) and sign in ("*", "//") and b == 1:
        return a
    if isinstance(value, int) and sign == "*" and a == 1:
        return b
    return named_number(value, f"{_operand_text(a)} {sign} {_operand_text(b)}")


def _named_sum(value: int, a: Any, b: Any) -> Any:
    """Return a sum with equal terms collected: `3 * n_heads * d_head`."""
    terms: Counter[str] = Counter()
    for part in (a, b):
        terms.update(getattr(part, "terms", None) or {text_of(part): 1})
    terms.pop("0", None)
    total = named_number(
        value, " + ".join(text if n == 1 else f"{n} * {_factor_text(text)}" for text, n in terms.items())
    )
    total.terms = terms
    return total


def _factor_text(text: str) -> str:
    """Return an expression as a factor, in parentheses unless it is a product."""
    return text if isinstance(getattr(ast.parse(text, mode="eval").body, "op", None), ast.Mult | None) else f"({text})"


def _operand_text(value: Any) -> str:
    text = text_of(value)
    return text if text.isidentifier() or text.lstrip("-").replace(".", "").isalnum() else f"({text})"


def _plain_number(value: Any) -> Any:
    return int(value) if isinstance(value, NamedInt) else float(value) if isinstance(value, NamedFloat) else value


def _define_operation(name: str, sign: str) -> None:
    function = getattr(operator, name)
    for kind in (NamedInt, NamedFloat):
        setattr(kind, f"__{name}__", lambda self, other: _combined_number(function, self, other, sign))
        setattr(kind, f"__r{name}__", lambda self, other: _combined_number(function, other, self, sign))


for _name, _sign in _SIGNS.items():
    _define_operation(_name, _sign)


def with_names(graph: Graph, reserved: Collection[str] = ()) -> tuple[Graph, ConfigClass]:
    """Return a copy of a graph with named numbers, and the config with the value of each name.

    Names in `reserved` are not used.
    """
    nodes = [replace(node, config=copy.deepcopy(node.config)) for node in graph.nodes]
    locations = [(owner, key, (node.name, *path)) for node in nodes for owner, key, path in _config_fields(node.config)]
    values: dict[str, int | float] = {}
    names: dict[tuple[str, str, float], str] = {}
    for owner, key, path in locations:
        value = owner.__dict__[key]
        if not isinstance(value, int | float) or value in (0, 1):
            continue
        identity = (key, "float" if isinstance(value, float) else "int", value)
        if identity not in names:
            names[identity] = _free_name(path, {*values, *reserved})
            values[names[identity]] = value
        owner.__dict__[key] = named_number(value, names[identity])
    derived: dict[str, str] = {}
    for owner, key, path in locations:
        how = getattr(owner, "derived", {}).get(key)
        if how is None or owner.__dict__[key] is not None or key in values:
            continue
        fields = {name: getattr(owner, name) for name in variable_names(ast.parse(how))}
        texts = {name: ast.parse(text_of(value), mode="eval").body for name, value in fields.items()}
        expression = ast.unparse(Replaced(texts).visit(ast.parse(how, mode="eval")))
        if expression not in derived.values() and all(isinstance(value, Named) for value in fields.values()):
            derived[_free_name(path, {*values, *derived, *reserved})] = expression
    widths = {int(value): named_number(value, name) for name, value in values.items() if name.endswith("d_model")}
    wired = [
        replace(node, signals={k: _with_named_widths(signal, widths) for k, signal in node.signals.items()})
        for node in nodes
    ]
    return replace(graph, nodes=tuple(wired)), ConfigClass(values, derived)


def _free_name(path: tuple[str, ...], taken: Set[str]) -> str:
    """Return a unique name: the key, preceded by as much of its path as necessary: `d_ff`, `encoder_d_ff`."""
    words = [word for word in path if not word.isdigit() and word not in ("layers", "variants")]
    candidates = [words[-1], *("_".join((*words[:n], words[-1])) for n in range(1, len(words)))]
    name = next((candidate for candidate in candidates if candidate not in taken), candidates[-1])
    number = 2
    while name in taken:
        name, number = f"{candidates[-1]}_{number}", number + 1
    return name


def _config_fields(config: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[BaseModel, str, tuple[str, ...]]]:
    """Yield every field of a config and of nested configs: its config, key and path."""
    for key in type(config).model_fields:
        value = config.__dict__[key]
        yield config, key, (*path, key)
        inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, tuple) else ()
        for name, nested in [((key,), value), *(((key, str(i)), nested) for i, nested in inner)]:
            if isinstance(nested, BaseModel):
                yield from _config_fields(nested, (*path, *name))


def _with_named_widths(signal: Any, widths: Mapping[int, Any]) -> Any:
    """Return signals with named widths."""
    if isinstance(signal, list):
        return [_with_named_widths(item, widths) for item in signal]
    return replace(signal, width=widths[signal.width]) if signal.width in widths else signal


class ConfigClass:
    """The config of a file: writes numbers by name, and the class of the config.

    Attributes:
        numbers: the numbers of the spec by name.
        derived: the names of derived numbers, each with its expression.
    """

    def __init__(self, numbers: Mapping[str, int | float], derived: Mapping[str, str]) -> None:
        self.numbers = numbers
        self.derived = derived
        self._values = {**numbers, **{name: eval(how, dict(numbers)) for name, how in derived.items()}}
        self._names = {how: name for name, how in derived.items()}

    def text(self, value: Any) -> str:
        """Return a value as an expression, with numbers of the spec as fields of the config."""
        text = text_of(value)
        tree = _Shortened(self._names).visit(ast.parse(text, mode="eval"))
        if not (variable_names(tree) & self._values.keys()):
            return text
        if eval(ast.unparse(tree), {"torch": torch, "nn": nn}, self._values) != value:
            return repr(value)
        return _qualified_expression(tree, CONFIG, self._values)

    def value(self, text: str) -> Any:
        """Return the value of an expression over the config."""
        config = SimpleNamespace(**self._values)
        return eval(text, {"__builtins__": {}}, {CONFIG: config, "torch": torch, "nn": nn})

    def count(self, count: int) -> str:
        """Return a number of layers."""
        names = [name for name, value in self.numbers.items() if value == count and name.endswith("n_layers")]
        return f"{CONFIG}.{names[0]}" if names else str(count)

    def source(self, body: str) -> str:
        """Return the class with the names that the rest of the file uses; empty if there are none."""
        used, lines = self.fields(body)
        lines = [f"    {name}: {type(value).__name__} = {value!r}" for name, value in used.items()] + lines
        return "\n".join(["@dataclass(frozen=True)", "class Config:", *lines]) if lines else ""

    def fields(self, body: str) -> tuple[dict[str, int | float], list[str]]:
        """Return the numbers that the rest of the file uses, and properties for derived numbers."""
        read = [node for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Attribute)]
        used = {node.attr for node in read if isinstance(node.value, ast.Name) and node.value.id == CONFIG}
        derived = {name: ast.parse(how, mode="eval") for name, how in self.derived.items() if name in used}
        used |= {name for how in derived.values() for name in variable_names(how)}
        lines: list[str] = []
        for name, how in derived.items():
            text = _qualified_expression(how, "self", self.numbers)
            lines += ["", "    @property", f"    def {name}(self) -> int:", f"        return {text}"]
        return {name: value for name, value in self.numbers.items() if name in used}, lines


class _Shortened(ast.NodeTransformer):
    """Replaces expressions by the names of their values."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        name = self.names.get(ast.unparse(node))
        return self.generic_visit(node) if name is None else ast.Name(name)


def _qualified_expression(tree: ast.Expression, owner: str, names: Mapping[str, Any]) -> str:
    """Return an expression, with these names as attributes of an owner."""
    return ast.unparse(Replaced({name: ast.Attribute(ast.Name(owner), name) for name in names}).visit(tree))
