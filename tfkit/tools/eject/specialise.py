"""Reduces each function of a model to the code that is left once all that its configuration decides is decided.

An abstract run of the forward: every expression gets a `Value`, all that is known about it, and is rewritten; an `if`
whose test is known leaves one branch; an argument that is the same constant in every call is removed. The run is
repeated until nothing new is learned, since a function may be called from several places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

from tfkit.building.initialize import RESETS
from tfkit.errors import Diagnostic, SpecError
from tfkit.tools.eject.code import Code, Key, refuse
from tfkit.tools.eject.statements import Function
from tfkit.tools.eject.torch_modules import has_torch_class
from tfkit.tools.eject.values import ANY, SOME, Known, Record, Value, is_constant, join, join_all

ROUNDS = 12


class Specialiser:
    """Specialises all functions that the forward of a model reaches.

    Attributes:
        functions: the functions, those that others call before these; after `run` only those that are reached.
        records: the fields of each `NamedTuple`, as far as they are known.
        read: attributes of each module that other modules read.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.functions: dict[Key, Function] = {}
        self.records: dict[type, list[Value]] = {}
        self.read: dict[nn.Module, set[str]] = {}
        self._running: set[Key] = set()
        self._done: dict[Key, list[Value]] = {}

    def run(self) -> None:
        """Repeat the abstract run until nothing changes."""
        root: Key = (self.model, "forward")
        inputs = self.function(root).code.parameters
        self.function(root).needed |= set(inputs)
        arguments = {name: SOME if parameter.default is parameter.empty else ANY for name, parameter in inputs.items()}
        for _ in range(ROUNDS):
            before = self._state()
            self._done.clear()
            self.call([root], arguments)
            if self._state() == before:
                break
        else:
            raise SpecError(Diagnostic("the forward of this model is too involved to be ejected"))
        self._resets()
        self.functions = {key: self.functions[key] for key in self._done}

    def _resets(self) -> None:
        """Specialise the methods that modules use to fill the parameters that they hold directly."""
        for module in self.model.modules():
            names = [name for name in RESETS if isinstance(getattr(type(module), name, None), FunctionType)]
            if names and not has_torch_class(module):
                self.call([(module, names[0])], {})

    def _state(self) -> Any:
        functions = {
            key: (dict(function.arguments), function.result, function.returns, set(function.needed))
            for key, function in self.functions.items()
        }
        return functions, dict(self.records)

    def function(self, key: Key) -> Function:
        """Return the function of a key."""
        if key not in self.functions:
            self.functions[key] = Function(self, key)
        return self.functions[key]

    def call(self, keys: Sequence[Key], arguments: Mapping[str, Value]) -> Value:
        """Record a call of one of these functions, and return its result as far as it is known."""
        functions = [self.function(key) for key in keys]
        code = functions[0].code
        for name in code.parameters:
            values = [function.arguments[name] for function in functions if name in function.arguments]
            values.append(arguments[name] if name in arguments else _default(code, name))
            for function in functions:
                function.arguments[name] = join_all(values)
        for key in keys:
            self._update(key)
        needed = {name for function in functions for name in function.needed}
        for function in functions:
            function.needed |= needed
        return join_all(function.result for function in functions)

    def _update(self, key: Key) -> None:
        """Run a function again if more has become known about its arguments."""
        function = self.functions[key]
        if key in self._running or self._done.get(key) == list(function.arguments.values()):
            return
        self._running.add(key)
        try:
            function.run()
        except SpecError:
            raise
        except Exception as cause:
            module, called = key
            raise refuse(called if module is None else module, f"{function.name}: {cause}") from cause
        self._running.discard(key)
        self._done[key] = list(function.arguments.values())

    def record(self, kind: type, items: list[Value]) -> Record:
        """Record that a `NamedTuple` is made."""
        previous = self.records.get(kind)
        self.records[kind] = items if previous is None else [join(a, b) for a, b in zip(previous, items, strict=True)]
        return Record(kind, tuple(items))

    def alone(self, kind: type) -> str | None:
        """Return the only field of a `NamedTuple` that is left, which replaces the tuple; None for any other number."""
        left = self.fields(kind) if kind in self.records else []
        return left[0] if len(left) == 1 else None

    def fields(self, kind: type) -> list[str]:
        """Return the fields of a `NamedTuple` that are not the same constant in all instances."""
        names: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
        return [name for name, value in zip(names, self.records[kind], strict=True) if not is_constant(value)]


def _default(code: Code, name: str) -> Value:
    default = code.parameters[name].default
    return SOME if isinstance(default, torch.Tensor) else Known(default, literal=True)
