"""Calls of hooks, plugin by plugin. A failure affects only its plugin, and every call is recorded."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import pluggy
import pydantic
from pydantic import PydanticUserError

from tfkit.errors import Diagnostic, listing, similar
from tfkit.plugin import hookspecs
from tfkit.plugin.discover import DISABLE, Candidate, canonical
from tfkit.plugin.hookspecs import CONTRACT

T = TypeVar("T")
MACHINERY = (__file__, pluggy.__file__, importlib.__file__, pydantic.__file__)
_REDIRECTION = threading.RLock()
"""Lock for replacing `sys.stdout`: two threads that restore it in the wrong order would leave it replaced."""
HOOKS = [name for name in vars(hookspecs) if name.startswith("tfkit_")]


class HookError(Exception):
    """Raised if a hook fails. The message is the cause on one line, `where` the file and line."""

    def __init__(self, hook: str, cause: str, where: str) -> None:
        super().__init__(f"`{hook}` {cause}")
        self.where = where


class PluginError(Exception):
    """Raised if an object cannot be a plugin: it implements no hook, or has a different contract version."""


@dataclass(frozen=True)
class HookCall:
    """A call of a plugin's hook. `gave` is the returned value, or the error that the hook raised."""

    hook: str
    plugin: str
    gave: object


@dataclass(frozen=True)
class Answers(Generic[T]):
    """The results of a hook, each with the label of its plugin, and a warning for each failed call."""

    values: tuple[tuple[str, T], ...]
    faults: tuple[Diagnostic, ...]


class Hooks:
    """The hooks of the plugins of one call of `load_plugins`."""

    def __init__(self) -> None:
        self.calls: list[HookCall] = []
        self._parts: list[tuple[object, Candidate]] = []
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)

    def add(self, part: object, candidate: Candidate, expected: str = "tfkit_register(register)") -> list[Diagnostic]:
        """Add an object with hooks, usually a module; return an error for each misspelt hook.

        Raises PluginError for an object without hooks, with the `expected` hook in the message, and for an object with
        a different contract version.
        """
        _check_contract(part)
        self._manager.register(part, name=f"{candidate.origin} {candidate.name} {len(self._parts)}")
        callers = self._manager.get_hookcallers(part) or ()
        if not callers:
            what = "does not mark its hook" if any(hasattr(part, hook) for hook in HOOKS) else "defines no hook"
            raise PluginError(f"it {what}; write `@tfkit.hookimpl def {expected}`")
        self._parts.append((part, candidate))
        return [
            _misspelt(candidate, caller.name, impl)
            for caller in callers
            for impl in caller.get_hookimpls()
            if impl.plugin is part and not caller.has_spec() and not impl.optionalhook
        ]

    def remove(self, candidate: Candidate) -> None:
        """Remove the hooks of a plugin."""
        for part, _ in [pair for pair in self._parts if pair[1] is candidate]:
            self._manager.unregister(part)
        self._parts = [pair for pair in self._parts if pair[1] is not candidate]

    def all(self) -> list[tuple[str, str]]:
        """Return the hooks of all plugins, each with the label of its plugin."""
        parts = [(part, owner.label) for part, owner in self._parts]
        return [(caller.name, label) for part, label in parts for caller in self._manager.get_hookcallers(part) or ()]

    def call(self, hook: str, read: Callable[[Any], T], **arguments: Any) -> Answers[T]:
        """Call a hook of every plugin. `read` converts a returned value, or raises TypeError."""
        values, faults = [], []
        for candidate in dict.fromkeys(owner for _, owner in self._parts):
            try:
                values += [(candidate.label, value) for value in self.call_one(candidate, hook, read, **arguments)]
            except HookError as error:
                faults.append(_fault(candidate, error))
        return Answers(tuple(values), tuple(faults))

    def call_one(self, candidate: Candidate, hook: str, read: Callable[[Any], T], **arguments: Any) -> list[T]:
        """Return the values that the objects of a plugin return for a hook; raise HookError if the hook fails."""
        values = []
        for part in [part for part, owner in self._parts if owner is candidate]:
            for impl in self._implementations(part, hook):
                try:
                    with stdout_to_stderr():
                        value = self._value(impl, hook, read, arguments)
                except HookError as error:
                    self.calls.append(HookCall(hook, candidate.label, error))
                    raise
                self.calls.append(HookCall(hook, candidate.label, value))
                values += [] if value is None else [value]
        return values

    def _implementations(self, part: object, hook: str) -> list[pluggy.HookImpl]:
        callers = [caller for caller in self._manager.get_hookcallers(part) or () if caller.name == hook]
        return [impl for caller in callers for impl in caller.get_hookimpls() if impl.plugin is part]

    def _value(self, impl: pluggy.HookImpl, hook: str, read: Callable[[Any], T], arguments: dict[str, Any]) -> T | None:
        excluded = self._manager.get_plugins() - {impl.plugin}
        try:
            (value,) = self._manager.subset_hook_caller(hook, excluded)(**arguments) or (None,)
            value = list(value) if isinstance(value, Iterator) else value
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise HookError(hook, f"failed: {in_words(error)}", where(error)) from error
        if value is None:
            return None
        try:
            return read(value)
        except TypeError as error:
            raise HookError(hook, str(error), _place(impl)) from error


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect the output of plugins to standard error, so it does not mix with results."""
    with _REDIRECTION, redirect_stdout(sys.stderr):
        yield


def in_words(error: BaseException) -> str:
    """Format an error on one line: `KeyError: 'x'`. Of pydantic's advice, only the first sentence is kept."""
    text = " ".join(str(error).split())
    if isinstance(error, PydanticUserError):
        text = text.partition(". ")[0]
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def where(error: BaseException) -> str:
    """Return the innermost traceback line outside of tfkit's plugin loader and libraries; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    machinery = [f"{Path(file).parent}{os.sep}" for file in MACHINERY]
    frames = traceback.extract_tb(error.__traceback__)
    plugin_frames = [frame for frame in frames if not frame.filename.startswith(("<", *machinery))]
    return f"{plugin_frames[-1].filename}:{plugin_frames[-1].lineno}" if plugin_frames else ""


def _place(impl: pluggy.HookImpl) -> str:
    code = inspect.unwrap(impl.function).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


def _fault(candidate: Candidate, error: HookError) -> Diagnostic:
    return Diagnostic(
        f"plugin {candidate.label}: {error}",
        notes=(error.where,) if error.where else (),
        help=f"this hook is skipped; to switch the plugin off: {DISABLE}={canonical(candidate.name)}",
    )


def _check_contract(part: object) -> None:
    contract = getattr(part, "TFKIT_CONTRACT", CONTRACT)
    if contract != CONTRACT:
        older = "plugin" if isinstance(contract, int) and contract < CONTRACT else "tfkit"
        raise PluginError(f"its TFKIT_CONTRACT must be {CONTRACT}; got {contract!r}: install a newer {older}")


def _misspelt(candidate: Candidate, name: str, impl: pluggy.HookImpl) -> Diagnostic:
    message, notes = f"unknown hook `{name}` in plugin {candidate.label}", f"known hooks: {listing(HOOKS)}"
    return Diagnostic(message, notes=(_place(impl), notes), help=similar("a hook", name, HOOKS))
