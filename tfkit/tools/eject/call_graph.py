"""The functions that the forward of a model reaches, and what is known of each."""

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
"""A function; or a module, the first of those that are alike, and the name of a method."""


@dataclass
class Specialised:
    """A function after specialisation.

    Attributes:
        code: what it came from.
        arguments: what is known of each parameter over all calls.
        result: what is known of what it returns.
        body: its statements.
        returns: the parameter that it returns as it is, if that is all it does: such calls are left out.
        needed: parameters that are read, here or by a function that stands in the same place.
        names: parameters that have another name here than in the source.
        uses: the names that it reads from outside, and what they stand for.
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
        """Those that are left: constants stand where they are used, and nobody is given what nothing reads."""
        return [name for name, value in self.arguments.items() if not is_constant(value) and name in self.needed]


def is_constant(value: Value) -> bool:
    """Whether it is written where it is used."""
    return isinstance(value, Known) and value.literal


class Whole(ABC):
    """What is known of a model, function by function."""

    def __init__(self, model: nn.Module) -> None:
        self.alikes = Alikes(model)
        self.model = model
        self.functions: dict[Key, Specialised] = {}
        self.records: dict[type, list[Value]] = {}
        """Of each `NamedTuple` what is known of its fields."""
        self.read: dict[nn.Module, set[str]] = {}
        """Attributes of a module that others read."""

    def keys(self, modules: Iterable[nn.Module], name: str) -> list[Key]:
        """The functions behind a method of each of these modules."""
        return list(dict.fromkeys((self.alikes[module], name) for module in modules))

    @abstractmethod
    def call(self, keys: Sequence[Key], given: Mapping[str, Value]) -> Value:
        """Learn of a call of one of these functions, and say what it returns."""

    def entry(self, key: Key) -> Specialised:
        """What is known of a function."""
        if key not in self.functions:
            function = key[0] if len(key) == 1 else method_of(key[0], key[1])
            code = code_of(function, method=len(key) == 2)
            if len(key) == 2:
                code = replace(code, tree=with_patterns(code.tree, key[0]))
            self.functions[key] = Specialised(code)
        return self.functions[key]

    def record(self, kind: type, items: list[Value]) -> Record:
        """Learn of a `NamedTuple` that is made."""
        known = self.records.get(kind)
        self.records[kind] = items if known is None else [join(a, b) for a, b in zip(known, items, strict=True)]
        return Record(kind, tuple(items))

    def alone(self, kind: type) -> str | None:
        """The field of a `NamedTuple` that stands for the whole, if no other is left."""
        left = self.fields(kind) if kind in self.records else []
        return left[0] if len(left) == 1 else None

    def fields(self, kind: type) -> list[str]:
        """The fields of a `NamedTuple` that are not the same constant in all of them."""
        names: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
        return [name for name, value in zip(names, self.records[kind], strict=True) if not is_constant(value)]


def refuse(module: nn.Module | FunctionType | None, why: str) -> SpecError:
    """The error of code that cannot be written out."""
    owner = module if isinstance(module, FunctionType) else type(module)
    name = f"`{owner.__name__}` ({Path(inspect.getsourcefile(owner) or '').name})"
    return SpecError(Diagnostic(f"{name} cannot be ejected: {why}", help="CONTRIBUTING.md says what a forward may use"))
