"""The source of a function, and the objects to which its global names refer.

Ejected files have no class for `tfkit.nn.Rearrange`: calls are replaced by its operations.
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
    """A function: its syntax tree, its parameters without `self`, and its global names with their objects."""

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
    """Return True for functions of Python and of torch, which stay unchanged."""
    if not isinstance(function, FunctionType):
        return True
    package = (function.__module__ or "").partition(".")[0]
    return package == "torch" or package in sys.stdlib_module_names


@contextmanager
def written_out(name: str) -> Iterator[None]:
    """Convert the NotImplementedError for a value without an expression to a SpecError that contains `name`."""
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
    """Copy the sizes of rearrangements to the modules that contain them, as attributes."""
    for module in model.modules():
        for name, child in module.named_children():
            for axis in child.known if isinstance(child, Rearrange) else ():
                setattr(module, _lent(module, name, child, axis), getattr(child, axis))


def _lent(module: nn.Module, name: str, child: nn.Module, axis: str) -> str:
    """Return the letter of the axis as name of the attribute, unless the module uses that name otherwise."""
    value = getattr(child, axis)
    return axis if text_of(getattr(module, axis, value)) == text_of(value) else f"{name}_{axis}"


def with_patterns(tree: ast.FunctionDef, module: nn.Module) -> ast.FunctionDef:
    """Replace the calls of rearrangements in a method by their operations."""
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
        """Return the operations of a rearrangement for a call; None for any other expression."""
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
    """Replace the names of the parts in statements by the names of the targets."""
    first = steps[0]
    if not (isinstance(first, ast.Assign) and isinstance(parts := first.targets[0], ast.Tuple)):
        return steps
    names = {part.id: target for part, target in zip(parts.elts, targets, strict=True) if isinstance(part, ast.Name)}
    return [Replaced(names).visit(step) for step in steps]
