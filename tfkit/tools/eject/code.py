"""The source of a function, and the objects that its names stand for."""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Code:
    """A function: its tree, its parameters without `self`, and the names around it."""

    tree: ast.FunctionDef
    parameters: Mapping[str, inspect.Parameter]
    names: Mapping[str, Any]
    line: int
    """Number of its first line in its file."""

    def named(self, name: str) -> Any:
        """The object that a name stands for outside of the function; raises KeyError if it is unknown."""
        return self.names[name] if name in self.names else vars(builtins)[name]


@cache
def code_of(function: FunctionType, *, method: bool) -> Code:
    """Read a function."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    parameters = list(inspect.signature(function).parameters.items())
    names = dict(parameters[1:] if method else parameters)
    return Code(tree, names, function.__globals__, function.__code__.co_firstlineno)


def method_of(module: nn.Module, name: str) -> FunctionType:
    """The function of a method."""
    function = getattr(type(module), name)
    assert isinstance(function, FunctionType)
    return function


@cache
def is_library(function: Callable[..., Any]) -> bool:
    """True for functions that stay as they are: those of Python and of torch."""
    if not isinstance(function, FunctionType):
        return True
    package = (function.__module__ or "").partition(".")[0]
    return package == "torch" or package in sys.stdlib_module_names
