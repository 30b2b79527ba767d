"""The source of a function, and the objects that its names stand for.

The files have no class for a `tfkit.nn.Rearrange`: its operations are written where it is called.
"""

from __future__ import annotations

import ast
import builtins
import copy
import inspect
import sys
import textwrap
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import nn

from tfkit.errors import Diagnostic, SpecError
from tfkit.nn import Rearrange
from tfkit.tools.eject.cleanup import Replaced, returned
from tfkit.tools.eject.config import text_of

Key = tuple[nn.Module | None, Any]
"""A module and the name of a method; or None and a function."""


@dataclass(frozen=True)
class Code:
    """A function: its tree, its parameters without `self`, and the objects that names outside of it stand for."""

    tree: ast.FunctionDef
    parameters: Mapping[str, inspect.Parameter]
    names: Mapping[str, Any]
    line: int
    """Number of its first line in its file."""


@cache
def code_of(function: FunctionType, *, method: bool) -> Code:
    """Read a function."""
    tree = tree_of(function)
    assert isinstance(tree, ast.FunctionDef)
    parameters = list(inspect.signature(function).parameters.items())
    names = dict(parameters[1:] if method else parameters)
    around = ChainMap(function.__globals__, vars(builtins))
    return Code(tree, names, around, function.__code__.co_firstlineno)


def tree_of(source: FunctionType | type) -> ast.stmt:
    """Return the definition of a function or of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(source))).body
    return tree


def method_of(module: nn.Module, name: str) -> FunctionType:
    """Return the function of a method."""
    function = getattr(type(module), name)
    assert isinstance(function, FunctionType)
    return function


@cache
def is_library(function: Callable[..., Any]) -> bool:
    """Return True for functions that stay unchanged: functions of Python and of torch."""
    if not isinstance(function, FunctionType):
        return True
    package = (function.__module__ or "").partition(".")[0]
    return package == "torch" or package in sys.stdlib_module_names


@contextmanager
def written_out(name: str) -> Iterator[None]:
    """Turn the NotImplementedError of a value that has no expression into an error about its name."""
    try:
        yield
    except NotImplementedError as cause:
        help_text = "use numbers, strings, and functions and classes of torch"
        raise SpecError(Diagnostic(f"{name} cannot be ejected: {cause}", help=help_text)) from cause


def refuse(owner: nn.Module | FunctionType, why: str) -> SpecError:
    """Return the error for code that cannot be written out."""
    source = owner if isinstance(owner, FunctionType) else type(owner)
    name = f"`{source.__name__}` ({Path(inspect.getsourcefile(source) or '').name})"
    return SpecError(
        Diagnostic(
            f"{name} cannot be ejected: {why}", help="use only the statements in a forward that CONTRIBUTING.md lists"
        )
    )


def lend_sizes(model: nn.Module) -> None:
    """Give each module the sizes that its children's patterns read, as attributes of the module."""
    for module in model.modules():
        for name, child in module.named_children():
            for axis in child.known if isinstance(child, Rearrange) else ():
                setattr(module, _lent(module, name, child, axis), getattr(child, axis))


def _lent(module: nn.Module, name: str, child: nn.Module, axis: str) -> str:
    """Return the letter of the axis, unless the module means something else by it."""
    value = getattr(child, axis)
    return axis if text_of(getattr(module, axis, value)) == text_of(value) else f"{name}_{axis}"


def with_patterns(tree: ast.FunctionDef, module: nn.Module) -> ast.FunctionDef:
    """Return a method of a module, with calls of rearrangements replaced by their operations."""
    if not any(isinstance(child, Rearrange) for child in module.children()):
        return tree
    tree = copy.deepcopy(tree)
    return _DrawnIn(module, tree.args.args[0].arg).visit(tree)


class _DrawnIn(ast.NodeTransformer):
    def __init__(self, module: nn.Module, self_name: str) -> None:
        self.module = module
        self.self_name = self_name

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        steps = self._steps(node)
        return node if steps is None or len(steps) > 1 else returned(steps[-1])

    def visit_Assign(self, node: ast.Assign) -> list[ast.stmt]:
        return self._statements(node)

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        return self._statements(node)

    def _statements(self, node: ast.Assign | ast.Return) -> list[ast.stmt]:
        self.generic_visit(node)
        steps = node.value and self._steps(node.value)
        if not steps:
            return [node]
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Tuple):
            steps = _named(steps, target.elts)
        *before, last = steps
        node.value = returned(last)
        return [*before, node]

    def _steps(self, node: ast.expr) -> list[ast.stmt] | None:
        """Return the steps of a call of a rearrangement; None for any other expression."""
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            return None
        owner, name = node.func.value, node.func.attr
        child = self.module._modules.get(name)
        if not (isinstance(owner, ast.Name) and owner.id == self.self_name and isinstance(child, Rearrange)):
            return None
        (forward,) = ast.parse(child.code).body
        assert isinstance(forward, ast.FunctionDef)
        for part in ast.walk(forward):
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                part.value.id, part.attr = self.self_name, _lent(self.module, name, child, part.attr)
        return [Replaced({"x": node.args[0]}).visit(step) for step in forward.body]


def _named(steps: list[ast.stmt], targets: Sequence[ast.expr]) -> list[ast.stmt]:
    """Return the steps, with the names of the targets instead of the names of the parts."""
    first = steps[0]
    if not (isinstance(first, ast.Assign) and isinstance(parts := first.targets[0], ast.Tuple)):
        return steps
    names = {part.id: target for part, target in zip(parts.elts, targets, strict=True) if isinstance(part, ast.Name)}
    return [Replaced(names).visit(step) for step in steps]
