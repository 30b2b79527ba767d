"""Reduces each function of a model to the code that is left once all that its configuration decides is decided.

An abstract run of the forward: every expression gets a `Value`, all that is known about it, and is rewritten; an `if`
whose test is known leaves one branch; an argument that is the same constant in every call is removed. The run is
repeated until nothing new is learned, since a function may be called from several places.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

from tfkit.errors import Diagnostic, SpecError
from tfkit.tools.eject.call_graph import Key, Specialised, Whole, refuse
from tfkit.tools.eject.cleanup import reads, tidied
from tfkit.tools.eject.code import Code, code_of, method_of
from tfkit.tools.eject.same_modules import is_torch
from tfkit.tools.eject.statements import Function
from tfkit.tools.eject.values import ANY, NONE, SOME, Known, Value, join_all

ROUNDS = 12


class Specialiser(Whole):
    """Specialises all functions that the forward of a model reaches."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._running: set[Key] = set()
        self._done: dict[Key, list[Value]] = {}

    def run(self) -> None:
        """Repeat the abstract run until nothing changes."""
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
        """Specialise the methods by which modules fill the parameters that they hold themselves."""
        for module in self.alikes:
            if not is_torch(module) and isinstance(getattr(type(module), "reset_parameters", None), FunctionType):
                self.call([(module, "reset_parameters")], {})

    def _state(self) -> Any:
        functions = {
            key: (dict(one.arguments), one.result, one.returns, set(one.needed)) for key, one in self.functions.items()
        }
        return functions, {kind: list(values) for kind, values in self.records.items()}

    def call(self, keys: Sequence[Key], given: Mapping[str, Value]) -> Value:
        entries = [self.entry(key) for key in keys]
        for name in entries[0].code.parameters:
            values = [one.arguments[name] for one in entries if name in one.arguments]
            values += [given[name]] if name in given else [_default(entries[0].code, name)]
            for one in entries:
                one.arguments[name] = join_all(values)
        results = [NONE if (found := self._evaluate(key)) is None else found for key in keys]
        needed = {name for one in entries for name in one.needed}
        for one in entries:
            one.needed |= needed
        return join_all(results)

    def _evaluate(self, key: Key) -> Value | None:
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
        entry.body = tidied(function.body)
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


def _attributes(steps: list[ast.stmt], owner: str | None) -> set[str]:
    """The attributes of `self` that are read."""
    found = [node for step in steps for node in ast.walk(step) if isinstance(node, ast.Attribute)]
    return {node.attr for node in found if isinstance(node.value, ast.Name) and node.value.id == owner}


def _default(code: Code, name: str) -> Value:
    default = code.parameters[name].default
    return SOME if isinstance(default, torch.Tensor) else Known(default, literal=True)


def _returned(entry: Specialised) -> str | None:
    """The parameter that a function returns, if it does nothing else."""
    if len(entry.body) == 1 and isinstance(step := entry.body[0], ast.Return) and isinstance(step.value, ast.Name):
        name = {new: old for old, new in entry.names.items()}.get(step.value.id, step.value.id)
        return name if name in entry.code.parameters else None
    return None
