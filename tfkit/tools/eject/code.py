"""The source of a function, and what the names in it stand for."""

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
    """Where it begins in its file."""

    def named(self, name: str) -> Any:
        """What a name stands for outside of the function; raises KeyError where it is not known."""
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
    """The function behind a method."""
    function = getattr(type(module), name)
    assert isinstance(function, FunctionType)
    return function


@cache
def is_library(function: Callable[..., Any]) -> bool:
    """Whether a function is left as it is: one of Python's or of torch's."""
    if not isinstance(function, FunctionType):
        return True
    package = (function.__module__ or "").partition(".")[0]
    return package == "torch" or package in sys.stdlib_module_names
