"""The functions that the forward of a model reaches, with the facts known about each."""

from __future__ import annotations

import ast
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import nn

from tfkit.errors import Diagnostic, SpecError
from tfkit.tools.eject.code import Code, code_of, method_of
from tfkit.tools.eject.rearranged import with_patterns
from tfkit.tools.eject.same_modules import Alikes
from tfkit.tools.eject.values import Known, Record, Value, join

Key = tuple[Any, ...]
"""A function; or the first of several modules that are alike, and the name of a method."""


@dataclass
class Specialised:
    """A function after specialisation.

    Attributes:
        arguments: the value of each parameter, as far as it is known over all calls.
        result: the value that it returns, as far as it is known.
        returns: the parameter that it returns unchanged, if it does nothing else: such calls are left out.
        needed: parameters that are read, here or by a function that is called in the same place.
        names: parameters that have another name here than in the source.
        uses: the names that it reads from outside, with the objects that they stand for.
        attributes: attributes of the module that it reads, parameters and children among them.
    """

    code: Code
    arguments: dict[str, Value] = field(default_factory=dict)
    result: Value | None = None
    body: list[ast.stmt] = field(default_factory=list)
    returns: str | None = None
    uses: dict[str, Any] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)
    needed: set[str] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)

    @property
    def parameters(self) -> list[str]:
        """The parameters that are left: constants are written where they are used, unread arguments are not passed."""
        return [name for name, value in self.arguments.items() if not is_constant(value) and name in self.needed]


def is_constant(value: Value) -> bool:
    """True if a value is written where it is used."""
    return isinstance(value, Known) and value.literal


class Whole(ABC):
    """All that is known about a model, function by function."""

    def __init__(self, model: nn.Module) -> None:
        self.alikes = Alikes(model)
        self.model = model
        self.functions: dict[Key, Specialised] = {}
        self.records: dict[type, list[Value]] = {}
        """Fields of each `NamedTuple`, as far as they are known."""
        self.read: dict[nn.Module, set[str]] = {}
        """Attributes of each module that other modules read."""

    def keys(self, modules: Iterable[nn.Module], name: str) -> list[Key]:
        """The functions that a method of these modules stands for."""
        return list(dict.fromkeys((self.alikes[module], name) for module in modules))

    @abstractmethod
    def call(self, keys: Sequence[Key], given: Mapping[str, Value]) -> Value:
        """Record a call of one of these functions, and return its result as far as it is known."""

    def entry(self, key: Key) -> Specialised:
        """The entry of a function."""
        if key not in self.functions:
            function = key[0] if len(key) == 1 else method_of(key[0], key[1])
            code = code_of(function, method=len(key) == 2)
            if len(key) == 2:
                code = replace(code, tree=with_patterns(code.tree, key[0]))
            self.functions[key] = Specialised(code)
        return self.functions[key]

    def record(self, kind: type, items: list[Value]) -> Record:
        """Record that a `NamedTuple` is made."""
        known = self.records.get(kind)
        self.records[kind] = items if known is None else [join(a, b) for a, b in zip(known, items, strict=True)]
        return Record(kind, tuple(items))

    def alone(self, kind: type) -> str | None:
        """The only field of a `NamedTuple` that is left, which replaces the tuple; None unless one is left."""
        left = self.fields(kind) if kind in self.records else []
        return left[0] if len(left) == 1 else None

    def fields(self, kind: type) -> list[str]:
        """The fields of a `NamedTuple` that are not the same constant in all of them."""
        names: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
        return [name for name, value in zip(names, self.records[kind], strict=True) if not is_constant(value)]


def refuse(module: nn.Module | FunctionType | None, why: str) -> SpecError:
    """The error for code that cannot be written out."""
    owner = module if isinstance(module, FunctionType) else type(module)
    name = f"`{owner.__name__}` ({Path(inspect.getsourcefile(owner) or '').name})"
    return SpecError(Diagnostic(f"{name} cannot be ejected: {why}", help="CONTRIBUTING.md says what a forward may use"))
