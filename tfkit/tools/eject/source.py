"""The source of a function, and the objects to which its global names refer."""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
import textwrap
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import nn

from tfkit.errors import Diagnostic, SpecError

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


def ejection_error(owner: nn.Module | FunctionType, why: str) -> SpecError:
    """Return the error for code that cannot be written out."""
    source = owner if isinstance(owner, FunctionType) else type(owner)
    name = f"`{source.__name__}` ({Path(inspect.getsourcefile(source) or '').name})"
    return SpecError(
        Diagnostic(
            f"{name} cannot be ejected: {why}", help="use only the statements in a forward that CONTRIBUTING.md lists"
        )
    )
