"""The config of a file: the numbers of the spec, and those that follow from them."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tfkit.tools.eject.cleanup import Replaced, reads
from tfkit.tools.eject.symbols import text_of

CONFIG = "config"
"""Name of the config in `__init__`."""


class Config:
    """Writes numbers by their names in the config, and the class of the config.

    Attributes:
        numbers: the numbers of the spec by name.
        derived: names of numbers that follow from those, each with its expression.
    """

    def __init__(self, numbers: Mapping[str, int | float]) -> None:
        self.numbers = dict(numbers)
        self.derived: dict[str, str] = {}

    def text(self, value: Any) -> str:
        """Return a value as an expression, numbers of the spec by their names in the config."""
        parts = value if isinstance(value, list | tuple) else [value]
        text, derived = text_of(value), {n: how for part in parts for n, how in getattr(part, "derived", {}).items()}
        # If the config has the name already, its expression is written out.
        clash = {name: ast.parse(derived.pop(name), mode="eval").body for name in derived.keys() & self.numbers.keys()}
        tree = Replaced(clash).visit(ast.parse(text, mode="eval"))
        values = self._with(derived)
        if not (reads(tree) & values.keys()):
            return text
        if eval(ast.unparse(tree), {"torch": torch, "nn": nn}, values) != value:
            return repr(value)
        self.derived |= derived
        return _owned(tree, CONFIG, values)

    def value(self, text: str) -> Any:
        """Return the value of an expression over the config."""
        config = SimpleNamespace(**self._with(self.derived))
        return eval(text, {"__builtins__": {}}, {CONFIG: config, "torch": torch, "nn": nn})

    def _with(self, derived: Mapping[str, str]) -> dict[str, Any]:
        return self.numbers | {name: eval(how, dict(self.numbers)) for name, how in derived.items()}

    def count(self, count: int) -> str:
        """Return a number of layers."""
        names = [name for name, value in self.numbers.items() if value == count and name.endswith("n_layers")]
        return f"{CONFIG}.{names[0]}" if names else str(count)

    def source(self, body: str) -> str:
        """Return the class with all names that the rest of a file reads; empty if there are none."""
        read = [node for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Attribute)]
        used = {node.attr for node in read if isinstance(node.value, ast.Name) and node.value.id == CONFIG}
        used |= {name for how in self.derived.values() for name in reads(ast.parse(how))}
        lines = [
            f"    {name}: {type(value).__name__} = {value!r}" for name, value in self.numbers.items() if name in used
        ]
        for name, how in self.derived.items():
            if name in used:
                text = _owned(ast.parse(how, mode="eval"), "self", self.numbers)
                lines += ["", "    @property", f"    def {name}(self) -> int:", f"        return {text}"]
        return "\n".join(["@dataclass(frozen=True)", "class Config:", *lines]) if lines else ""


def _owned(tree: ast.Expression, owner: str, names: Mapping[str, Any]) -> str:
    """Return an expression, with these names as attributes of an owner."""
    return ast.unparse(Replaced({name: ast.Attribute(ast.Name(owner), name) for name in names}).visit(tree))
