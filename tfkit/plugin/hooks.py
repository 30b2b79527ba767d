"""Calls of hooks, plugin by plugin. A failure affects only its plugin, and every call is recorded."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import pluggy
import pydantic
from pydantic import PydanticUserError

from tfkit.errors import Diagnostic, Invalid, SpecError, listing, similar_name_help
from tfkit.plugin import hookspecs
from tfkit.plugin.discover import DISABLE, Candidate, normalized_name
from tfkit.plugin.hookspecs import CONTRACT, SEPARATE

T = TypeVar("T")
Around: TypeAlias = Callable[[str], AbstractContextManager[Any]]
MACHINERY = (__file__, pluggy.__file__, importlib.__file__, pydantic.__file__)
_REDIRECTION = threading.RLock()
"""Lock for replacing `sys.stdout`: two threads that restore it in the wrong order would leave it replaced."""
ORDERING = ("wrapper", "hookwrapper", "tryfirst", "trylast")
"""Options of `hookimpl` that concern the calls of several plugins."""
HOOKS = [name for name in vars(hookspecs) if name.startswith("tfkit_")]


class HookError(Exception):
    """Raised if a hook of a plugin fails. The message is the cause on one line, `where` the file and line."""

    def __init__(self, hook: str, plugin: Candidate, cause: str, where: str) -> None:
        super().__init__(f"`{hook}` {cause}")
        self.hook, self.plugin, self.where = hook, plugin, where


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
        self._owners: dict[int, Candidate] = {}
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)

    def add(self, part: object, candidate: Candidate, expected: str = "tfkit_register(register)") -> list[Diagnostic]:
        """Add an object with hooks, usually a module; return an error for each misspelt hook.

        Raises PluginError for an object without hooks, with the `expected` hook in the message, for an object that was
        added before, for an option of `hookimpl` without effect, and for a different contract version.
        """
        _check_contract(part)
        if id(part) in self._owners:
            raise PluginError(f"it names an object again that belongs to plugin {self._owners[id(part)].label}")
        self._owners[id(part)] = candidate
        self._manager.register(part, name=f"{candidate.origin} {candidate.name} {len(self._owners)}")
        implementations = self._implementations(part)
        if not implementations:
            what = "does not mark its hook" if any(hasattr(part, hook) for hook in HOOKS) else "defines no hook"
            raise PluginError(f"it {what}; write `@tfkit.hookimpl def {expected}`")
        options = [(c.name, option) for c, impl in implementations for option in ORDERING if getattr(impl, option)]
        for hook, option in options:
            if hook in SEPARATE:
                raise PluginError(
                    f"`{hook}` must not have `{option}`, because tfkit calls it for each plugin separately"
                )
        return [
            _misspelt_hook(candidate, caller.name, impl)
            for caller, impl in implementations
            if not caller.has_spec() and not impl.optionalhook
        ]

    def remove(self, candidate: Candidate) -> None:
        """Remove the hooks of a plugin."""
        for part in [part for part in self._manager.get_plugins() if self._owners[id(part)] is candidate]:
            self._manager.unregister(part)
        self._owners = {part: owner for part, owner in self._owners.items() if owner is not candidate}

    def all(self) -> list[tuple[str, str]]:
        """Return the hooks of all plugins, each with the label of its plugin."""
        parts = [(part, self._owners[id(part)].label) for _, part in self._manager.list_name_plugin()]
        return [(caller.name, label) for part, label in parts for caller, _ in self._implementations(part)]

    def call(self, hook: str, read: Callable[[Any], T], **arguments: Any) -> Answers[T]:
        """Call a hook of every plugin, in pluggy's order. `read` converts a returned value, or raises TypeError.

        A plugin that fails is omitted, and wrappers receive the values of the remaining plugins.
        """
        values, errors = self._run(hook, read, arguments, isolated=True)
        return Answers(tuple(values), tuple(map(_fault_diagnostic, errors)))

    def call_one(self, candidate: Candidate, hook: str, read: Callable[[Any], T], **arguments: Any) -> list[T]:
        """Return the values that the objects of a plugin return for a hook; raise HookError if the hook fails."""
        values, errors = self._run(hook, read, arguments, only=candidate)
        for error in errors:
            raise error
        return [value for _, value in values]

    def act(self, hook: str, around: Around = nullcontext, **arguments: Any) -> None:
        """Call a hook of every plugin as pluggy does: an error ends the call, and wrappers may handle it.

        `around` is entered with the label of a plugin while the plugin runs. Raises SpecError.
        """
        for error in self._run(hook, _no_value, arguments, around)[1][-1:]:
            raise _rejection_error(error) from error.__cause__

    def _implementations(self, part: object) -> list[tuple[pluggy.HookCaller, pluggy.HookImpl]]:
        callers = self._manager.get_hookcallers(part) or ()
        return [(caller, impl) for caller in callers for impl in caller.get_hookimpls() if impl.plugin is part]

    def _run(
        self,
        hook: str,
        read: Callable[[Any], T],
        arguments: Mapping[str, Any],
        around: Around = nullcontext,
        *,
        isolated: bool = False,
        only: Candidate | None = None,
    ) -> tuple[list[tuple[str, T]], list[HookError]]:
        """Call a hook of all plugins, or of `only` one; return the values with the labels of their plugins, and errors.

        All plugins run if their errors are `isolated`. Otherwise an error ends the call, and wrappers receive it.
        """
        values: list[tuple[str, T]] = []
        errors: list[HookError] = []
        wrappers: list[tuple[pluggy.HookImpl, Any]] = []

        @contextmanager
        def guarded(impl: pluggy.HookImpl) -> Iterator[Candidate]:
            plugin = self._owners[id(impl.plugin)]
            try:
                with stdout_to_stderr(), around(plugin.label):
                    yield plugin
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                failure = _failure(error, hook, plugin, impl)
                if isolated or not errors or failure.__cause__ is not errors[-1].__cause__:
                    errors.append(failure)
                    self.calls.append(HookCall(hook, plugin.label, failure))

        impls = reversed(getattr(self._manager.hook, hook).get_hookimpls())
        for impl in (impl for impl in impls if only in (None, self._owners[id(impl.plugin)])):
            with guarded(impl) as plugin:
                result = _begin_hook(impl, arguments)
                if impl.wrapper or impl.hookwrapper:
                    wrappers.append((impl, result))
                    continue
                value = None if result is None else self._read(read, result, hook, impl)
                values += [] if value is None else [(plugin.label, value)]
                self.calls.append(HookCall(hook, plugin.label, value))
            if errors and not isolated:
                break
        for impl, generator in reversed(wrappers):
            with guarded(impl) as plugin:
                error = errors[-1].__cause__ if errors and not isolated else None
                result = _end_wrapper(impl, generator, [value for _, value in values], error)
                if result is None and isolated:
                    raise TypeError("a wrapper must return a list of results; got None")
                labels = {id(value): label for label, value in values}
                values = [
                    (labels.get(id(value), plugin.label), self._read(read, value, hook, impl)) for value in result or ()
                ]
                errors = errors if isolated else []
        return values, errors

    def _read(self, read: Callable[[Any], T], value: Any, hook: str, impl: pluggy.HookImpl) -> T:
        try:
            return read(value)
        except TypeError as error:
            raise HookError(hook, self._owners[id(impl.plugin)], str(error), _hook_location(impl)) from error


def _failure(error: BaseException, hook: str, plugin: Candidate, impl: pluggy.HookImpl) -> HookError:
    """Return an error of a plugin as the error of its hook."""
    if isinstance(error, HookError):
        return error
    failure = HookError(hook, plugin, f"failed: {in_words(error)}", error_location(error) or _hook_location(impl))
    failure.__cause__ = error
    return failure


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


def error_location(error: BaseException) -> str:
    """Return the innermost traceback line outside of tfkit's plugin loader and libraries; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    machinery = [f"{Path(file).parent}{os.sep}" for file in MACHINERY]
    frames = traceback.extract_tb(error.__traceback__)
    plugin_frames = [frame for frame in frames if not frame.filename.startswith(("<", *machinery))]
    return f"{plugin_frames[-1].filename}:{plugin_frames[-1].lineno}" if plugin_frames else ""


def _begin_hook(impl: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
    """Call an implementation. Return its value, or the generator of a wrapper, which has reached its `yield`."""
    optional = {name: arguments[name] for name in impl.kwargnames if name in arguments}
    value: Any = impl.function(*(arguments[name] for name in impl.argnames), **optional)
    if impl.wrapper or impl.hookwrapper:
        for _ in value:
            return value
        raise RuntimeError("a wrapper must yield once; got no `yield`")
    return list(value) if isinstance(value, Iterator) else value


def _end_wrapper(impl: pluggy.HookImpl, generator: Any, values: list[Any], error: BaseException | None) -> Any:
    """Continue a wrapper with the values of the plugins that it wraps, or with their error; return its result."""
    outcome = pluggy.Result(values, error)
    try:
        if impl.wrapper and error is not None:
            generator.throw(error)
        else:
            generator.send(values if impl.wrapper else outcome)
    except StopIteration as stop:
        return stop.value if impl.wrapper else outcome.get_result()
    generator.close()
    raise RuntimeError("a wrapper must yield once; got a second `yield`")


def _no_value(returned: object) -> None:
    raise TypeError(f"must return None; got {type(returned).__name__}")


def _hook_location(impl: pluggy.HookImpl) -> str:
    code = inspect.unwrap(impl.function).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


def _fault_diagnostic(error: HookError, effect: str = "this hook is skipped; to switch the plugin off: ") -> Diagnostic:
    return Diagnostic(
        f"plugin {error.plugin.label}: {error}",
        notes=(error.where,) if error.where else (),
        help=f"{effect}{DISABLE}={normalized_name(error.plugin.name)}",
    )


def _rejection_error(error: HookError) -> SpecError:
    """Return the diagnostics of a plugin that raised `SpecError` or `Invalid`; otherwise describe its failure."""
    cause, note = error.__cause__, f"from `{error.hook}` of the plugin {error.plugin.label}"
    if isinstance(cause, Invalid):
        return SpecError(Diagnostic(cause.message, path=cause.field, notes=(*cause.notes, note), help=cause.help))
    if isinstance(cause, SpecError):
        return SpecError(*(replace(diagnostic, notes=(*diagnostic.notes, note)) for diagnostic in cause.diagnostics))
    return SpecError(_fault_diagnostic(error, "correct the plugin, or switch it off: "))


def _check_contract(part: object) -> None:
    contract = getattr(part, "TFKIT_CONTRACT", CONTRACT)
    if contract != CONTRACT:
        older = "plugin" if isinstance(contract, int) and contract < CONTRACT else "tfkit"
        raise PluginError(f"its TFKIT_CONTRACT must be {CONTRACT}; got {contract!r}: install a newer {older}")


def _misspelt_hook(candidate: Candidate, name: str, impl: pluggy.HookImpl) -> Diagnostic:
    message, notes = f"unknown hook `{name}` in plugin {candidate.label}", f"known hooks: {listing(HOOKS)}"
    return Diagnostic(message, notes=(_hook_location(impl), notes), help=similar_name_help("a hook", name, HOOKS))
