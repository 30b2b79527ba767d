"""What is left of each function of a model, once everything that its configuration decides is decided.

An abstract run of the forward: every expression is given a `Value`, what is known of it, and rewritten; an `if` whose
test is known leaves one branch; an argument that is the same constant in every call is no argument any more. The run is
repeated until nothing new is learned, since a function may be called from several places.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from tfkit.errors import Diagnostic, SpecError
from tfkit.tools.eject.alike import Alikes, is_torch
from tfkit.tools.eject.code import Code, code_of, method_of
from tfkit.tools.eject.tidy import reads, tidied
from tfkit.tools.eject.values import ANY, NONE, SOME, Known, Record, Value, join

Key = tuple[Any, ...]
"""A function; or a module, the first of those that are alike, and the name of a method."""
ROUNDS = 12


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


class Specialiser:
    """Specialises all functions that the forward of a model reaches."""

    def __init__(self, model: nn.Module) -> None:
        self.alikes = Alikes(model)
        self.model = model
        self.functions: dict[Key, Specialised] = {}
        self.records: dict[type, list[Value]] = {}
        """Of each `NamedTuple` what is known of its fields."""
        self.read: dict[nn.Module, set[str]] = {}
        """Attributes of a module that others read."""
        self._running: set[Key] = set()
        self._done: dict[Key, list[Value]] = {}

    def run(self) -> None:
        """Until nothing changes."""
        key = (self.model, "forward")
        inputs = code_of(method_of(self.model, "forward"), method=True).parameters
        start = [SOME if one.default is one.empty else ANY for one in inputs.values()]
        for _ in range(ROUNDS):
            before = self._state()
            self._done.clear()
            self.call([key], dict(zip(inputs, start, strict=True)))
            if self._state() == before:
                break
        else:
            raise SpecError(Diagnostic("the forward of this model is too involved to be ejected"))
        self._resets()
        self.functions = {key: self.functions[key] for key in self._done}

    def _resets(self) -> None:
        """How modules fill the parameters that they hold themselves."""
        for module in self.alikes:
            if not is_torch(module) and isinstance(getattr(type(module), "reset_parameters", None), FunctionType):
                self.call([(module, "reset_parameters")], {})

    def _state(self) -> Any:
        functions = {
            key: (dict(one.arguments), one.result, one.returns, set(one.needed)) for key, one in self.functions.items()
        }
        return functions, {kind: list(values) for kind, values in self.records.items()}

    def keys(self, modules: Iterable[nn.Module], name: str) -> list[Key]:
        """The functions behind a method of each of these modules."""
        return list(dict.fromkeys((self.alikes[module], name) for module in modules))

    def call(self, keys: Sequence[Key], given: Mapping[str, Value]) -> Value:
        """Learn of a call of one of these functions, and say what it returns."""
        entries = [self._entry(key) for key in keys]
        for name in entries[0].code.parameters:
            values = [one.arguments[name] for one in entries if name in one.arguments]
            values += [given[name]] if name in given else [_default(entries[0].code, name)]
            value = values[0]
            for other in values[1:]:
                value = join(value, other)
            for one in entries:
                one.arguments[name] = value
        result: Value | None = None
        for key in keys:
            found = self._evaluate(key)
            result = found if result is None or found is None else join(result, found)
        needed = {name for one in entries for name in one.needed}
        for one in entries:
            one.needed |= needed
        return NONE if result is None else result

    def _entry(self, key: Key) -> Specialised:
        if key not in self.functions:
            function = key[0] if len(key) == 1 else method_of(key[0], key[1])
            self.functions[key] = Specialised(code_of(function, method=len(key) == 2))
        return self.functions[key]

    def _evaluate(self, key: Key) -> Value | None:
        from tfkit.tools.eject.statements import Function

        entry = self.functions[key]
        arguments = list(entry.arguments.values())
        if key in self._running or self._done.get(key) == arguments:
            return entry.result if entry.result is not None else SOME
        self._running.add(key)
        entry.arguments = {name: entry.arguments[name] for name in entry.code.parameters}
        function = Function(self, entry, key[0] if len(key) == 2 else None)
        try:
            entry.result = function.run()
        except SpecError:
            raise
        except Exception as cause:
            raise refuse(key[0], f"{entry.code.tree.name}: {cause}") from cause
        entry.body = tidied(function.body, written=entry.code.written)
        old = {new: name for name, new in function.renamed.items()}
        names = {old.get(name, name) for step in entry.body for name in reads(step)}
        entry.names = function.renamed
        entry.uses = {name: value for name, value in function.uses.items() if name in names}
        entry.attributes = _attributes(entry.body, function.self_name)
        entry.needed |= names if key != (self.model, "forward") else set(entry.code.parameters)
        entry.returns = _returned(entry)
        self._running.discard(key)
        self._done[key] = list(entry.arguments.values())
        return entry.result

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


def _attributes(steps: list[ast.stmt], owner: str | None) -> set[str]:
    """What is read of `self`."""
    found = [node for step in steps for node in ast.walk(step) if isinstance(node, ast.Attribute)]
    return {node.attr for node in found if isinstance(node.value, ast.Name) and node.value.id == owner}


def _default(code: Code, name: str) -> Value:
    default = code.parameters[name].default
    return SOME if isinstance(default, torch.Tensor) else Known(default, literal=True)


def _returned(entry: Specialised) -> str | None:
    """The parameter that a function returns, if that is all it does."""
    if len(entry.body) == 1 and isinstance(step := entry.body[0], ast.Return) and isinstance(step.value, ast.Name):
        name = {new: old for old, new in entry.names.items()}.get(step.value.id, step.value.id)
        return name if name in entry.code.parameters else None
    return None


def refuse(module: nn.Module | FunctionType | None, why: str) -> SpecError:
    """The error of code that cannot be written out."""
    owner = module if isinstance(module, FunctionType) else type(module)
    name = f"`{owner.__name__}` ({Path(inspect.getsourcefile(owner) or '').name})"
    return SpecError(Diagnostic(f"{name} cannot be ejected: {why}", help="CONTRIBUTING.md says what a forward may use"))
