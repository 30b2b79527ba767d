"""Numbers that remember how they follow from the spec: `d_ff`, or `d_model // n_heads`."""

from __future__ import annotations

import copy
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from pydantic import BaseModel

from tfkit.graph.expand import Graph
from tfkit.tools.eject.torch_modules import name_of

_LITERAL = (int, float, complex, str, bytes, range, slice, torch.dtype, torch.layout, torch.memory_format)
"""Types whose `repr` is an expression."""
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "truediv": "/", "pow": "**", "mod": "%"}
"""Signs of the operations that keep names, by the name of the function in `operator`."""


class Named:
    """A number with the expression that it is the value of; names in it are fields of `Config`."""

    text: str
    terms: Mapping[str, int] | None = None
    """For a sum: the number of times that each term is in it."""
    derived: Mapping[str, str]
    """Names in the text that follow from others, each with its expression."""

    def __neg__(self) -> Any:
        return named(-_plain(self), f"-{_operand(self)}", self.derived)


class NamedInt(Named, int):
    """An integer of the spec."""


class NamedFloat(Named, float):
    """A float of the spec."""


def named(value: Any, text: str, derived: Mapping[str, str] | None = None) -> Any:
    """Return a number with its name, and with the derived names in its text. Return any other value unchanged."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    number = NamedInt(value) if isinstance(value, int) else NamedFloat(value)
    number.text = text
    number.derived = derived or {}
    return number


def text_of(value: Any) -> str:
    """Return an expression that has this value. Raise NotImplementedError if there is none."""
    if isinstance(value, Named):
        return value.text
    if isinstance(value, list | tuple):
        inner = ", ".join(map(text_of, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}([{', '.join(sorted(map(text_of, value)))}])"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{text_of(key)}: {text_of(item)}' for key, item in value.items())}}}"
    return _atom_text(value)


def _atom_text(value: Any) -> str:
    """Return an expression for a value that contains no other values."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if value is None or value is ... or isinstance(value, _LITERAL):
        return repr(value)
    if isinstance(value, type) and value.__module__ == "builtins":
        return value.__name__
    if (name := name_of(value)) is not None:
        return name
    raise NotImplementedError(f"it contains {str(value)[:60]}, which cannot be written as an expression")


def _sum(value: int, a: Any, b: Any) -> Any:
    """Return a sum with equal terms collected: `3 * n_heads * d_head`."""
    terms: Counter[str] = Counter()
    for part in (a, b):
        terms.update(getattr(part, "terms", None) or {text_of(part): 1})
    terms.pop("0", None)
    text = " + ".join(text if n == 1 else f"{n} * {text}" for text, n in terms.items())
    total = named(value, text, _derived(a, b))
    total.terms = terms
    return total


def _derived(*parts: Any) -> dict[str, str]:
    return {name: text for part in parts for name, text in getattr(part, "derived", {}).items()}


def _operand(value: Any) -> str:
    text = text_of(value)
    return text if text.isidentifier() or text.lstrip("-").replace(".", "").isalnum() else f"({text})"


def _define(name: str, sign: str) -> None:
    function = getattr(operator, name)

    def forward(self: Any, other: Any) -> Any:
        return _combined(function, self, other, sign)

    def backward(self: Any, other: Any) -> Any:
        return _combined(function, other, self, sign)

    for kind in (NamedInt, NamedFloat):
        setattr(kind, f"__{name}__", forward)
        setattr(kind, f"__r{name}__", backward)


def _combined(function: Callable[[Any, Any], Any], a: Any, b: Any, sign: str) -> Any:
    if not isinstance(a, int | float) or not isinstance(b, int | float):
        return NotImplemented
    value = function(_plain(a), _plain(b))
    if sign == "+" and isinstance(value, int):
        return _sum(value, a, b)
    if sign == "//" and text_of(a).endswith("d_model") and text_of(b).endswith("n_heads") and isinstance(a, int):
        name = text_of(b).removesuffix("n_heads") + "d_head"
        return named(value, name, {name: f"{text_of(a)} // {text_of(b)}"})
    if (a == 0 or b == 0) and sign == "*":
        return value
    neutral = (sign == "+" and 0 in (a, b)) or (sign in "* //" and b == 1) or (sign == "*" and a == 1)
    if neutral and isinstance(value, int):
        return a if isinstance(a, Named) and value == a else b
    return named(value, f"{_operand(a)} {sign} {_operand(b)}", _derived(a, b))


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, NamedInt) else float(value) if isinstance(value, NamedFloat) else value


for _name, _sign in _SIGNS.items():
    _define(_name, _sign)


def with_names(graph: Graph) -> tuple[Graph, dict[str, int | float]]:
    """Copy a graph so that its numbers have names, and return it with the value of each name."""
    nodes = [replace(node, config=copy.deepcopy(node.config)) for node in graph.nodes]
    places = [(owner, key, (node.name, *path)) for node in nodes for owner, key, path in _numbers(node.config)]
    values: dict[str, int | float] = {}
    names: dict[tuple[str, str, float], str] = {}
    for owner, key, path in places:
        value = owner.__dict__[key]
        identity = (key, "float" if isinstance(value, float) else "int", value)
        if identity not in names:
            names[identity] = _free_name(path, values)
            values[names[identity]] = value
        owner.__dict__[key] = named(value, names[identity])
    widths = {int(value): named(value, name) for name, value in values.items() if name.endswith("d_model")}
    wired = [
        replace(node, signals={k: _renamed(signal, widths) for k, signal in node.signals.items()}) for node in nodes
    ]
    return replace(graph, nodes=tuple(wired)), values


def _free_name(path: tuple[str, ...], taken: Mapping[str, Any]) -> str:
    """Return the key, after as much of the path as makes it unique: `d_ff`, `encoder_d_ff`."""
    words = [word for word in path if not word.isdigit() and word not in ("layers", "variants")]
    candidates = [words[-1], *("_".join((*words[:n], words[-1])) for n in range(1, len(words)))]
    name = next((candidate for candidate in candidates if candidate not in taken), candidates[-1])
    number = 2
    while name in taken:
        name, number = f"{candidates[-1]}_{number}", number + 1
    return name


def _numbers(config: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[BaseModel, str, tuple[str, ...]]]:
    """Yield every number in a config and in nested configs: the config that has it, its key, and its path."""
    for key in type(config).model_fields:
        value = config.__dict__[key]
        if isinstance(value, int | float) and not isinstance(value, bool) and value not in (0, 1):
            yield config, key, (*path, key)
        inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, tuple) else ()
        for name, nested in [(key, value), *((f"{key}.{i}", nested) for i, nested in inner)]:
            if isinstance(nested, BaseModel):
                yield from _numbers(nested, (*path, *name.split(".")))


def _renamed(signal: Any, widths: Mapping[int, Any]) -> Any:
    """Return signals with named widths."""
    if isinstance(signal, list):
        return [_renamed(item, widths) for item in signal]
    return replace(signal, width=widths[signal.width]) if signal.width in widths else signal
