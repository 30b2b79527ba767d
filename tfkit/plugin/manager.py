"""Loads plugins into a registry, and sets aside those that fail.

A plugin that fails affects only itself: it is left out, with the cause, and everything else works. Faults that would
give a spec another meaning than its author thinks are errors for everybody: two components of one kind, or a hook that
is never called because its name is misspelt.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import pluggy

from tfkit.arguments import AnyPath, checked
from tfkit.component import Component
from tfkit.errors import Diagnostic, SpecError, closest, listing
from tfkit.plugin import hookspecs
from tfkit.plugin.discover import Candidate, canonical, find_plugins
from tfkit.plugin.registry import Registered, Registry, check_config

BUILT_IN = "built in"
COMPONENTS = "tfkit.components"
DISABLE = "TFKIT_DISABLE"


@dataclass(frozen=True)
class Plugin:
    """A plugin that was loaded. `origin` is `built in`, `entry point`, a path, or `PATH, by TFKIT_PLUGIN_DIR`."""

    name: str
    version: str
    origin: str
    components: tuple[Registered, ...]


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin that was left out because it failed."""

    name: str
    origin: str
    cause: str
    """One line: `ModuleNotFoundError: No module named 'foo'`."""
    where: str
    """The file and line that failed, or empty if there is none."""
    help: str
    """Advice for its author or its user."""


@dataclass(frozen=True)
class Plugins:
    """The result of `load_plugins`. `disabled` are the names of those that were switched off."""

    registry: Registry
    loaded: tuple[Plugin, ...]
    broken: tuple[BrokenPlugin, ...] = ()
    disabled: tuple[str, ...] = ()


AnyPlugins: TypeAlias = Annotated[Plugins, "what `tfkit.load_plugins` returned"]


class _NoHookError(Exception):
    """A module named as a plugin implements no hook; its text says all there is to say."""


@checked
def load_plugins(
    *, plugin_dirs: Collection[AnyPath] | AnyPath = (), entry_points: bool = True, disabled: Collection[str] = ()
) -> Plugins:
    """Load the built-in components, those of installed distributions, and those in folders.

    Loading a plugin runs its code. Only plugins that you installed or named are loaded; a spec never loads one.

    Args:
        plugin_dirs: a folder or several, as `--plugin-dir` takes them.
        entry_points: also load plugins that this call does not name: the installed distributions, and the folders in
            the environment variable `TFKIT_PLUGIN_DIR` (absolute paths, separated as in `PATH`).
        disabled: names of plugins to leave out, beside those in the environment variable `TFKIT_DISABLE` (separated
            by commas).

    Raises:
        SpecError: kinds that are registered twice, misspelt hooks, folders without a plugin, and names in `disabled`
            that no plugin has.
    """
    found, names = _wanted(plugin_dirs, entry_points, disabled)
    loader = _Loader()
    loader.load(_built_in())
    for candidate in found:
        loader.load_or_quarantine(candidate)
    if loader.problems:
        raise SpecError(*loader.problems)
    return Plugins(loader.registry, tuple(loader.loaded), tuple(loader.broken), names)


def available(
    *, plugin_dirs: Collection[AnyPath] | AnyPath = (), entry_points: bool = True, disabled: Collection[str] = ()
) -> frozenset[str]:
    """The canonical names of the plugins that `load_plugins` would load; no plugin code runs."""
    return frozenset(canonical(one.name) for one in _wanted(plugin_dirs, entry_points, disabled)[0])


def _wanted(
    plugin_dirs: Collection[AnyPath] | AnyPath, ambient: bool, disabled: Collection[str]
) -> tuple[list[Candidate], tuple[str, ...]]:
    """The plugins to load, and the names of those that are switched off."""
    folders = [plugin_dirs] if isinstance(plugin_dirs, str | os.PathLike) else plugin_dirs
    found = find_plugins(map(Path, folders), ambient)
    off = _switched_off([one.name for one in found], disabled)
    names = tuple(one.name for one in found if canonical(one.name) in off)
    return [one for one in found if canonical(one.name) not in off], names


class _Loader:
    """One call of `load_plugins`: a pluggy manager, and everything loaded with it so far."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.loaded: list[Plugin] = []
        self.broken: list[BrokenPlugin] = []
        self.problems: list[Diagnostic] = []
        self._pm = pluggy.PluginManager(hookspecs.PROJECT)
        self._pm.add_hookspecs(hookspecs)

    def load_or_quarantine(self, candidate: Candidate) -> None:
        try:
            self.load(candidate)
        except (Exception, SystemExit) as error:
            self.broken.append(_broken(candidate, error))

    def load(self, candidate: Candidate) -> None:
        """Run a plugin's hooks, then add what they registered: all of it, or nothing when one fails."""
        parts = candidate.load()
        for number, part in enumerate(parts):
            self._pm.register(part, name=f"{candidate.origin} {candidate.name} {number}")
        misspelt = [wrong for part in parts for wrong in self._misspelt(candidate, part)]
        if misspelt:
            self.problems += misspelt
            return
        configs: list[type[Component]] = []
        for part in parts:
            self._call(part, lambda config, /: configs.append(check_config(config)))
        self._add(candidate, configs)

    def _call(self, plugin: object, register: hookspecs.Register) -> None:
        """Call only this plugin's hook, so that a failure is its own."""
        if not self._pm.get_hookcallers(plugin):
            unmarked = hasattr(plugin, "tfkit_register")
            what = "does not mark its hook" if unmarked else "defines no hook"
            raise _NoHookError(f"it {what}; write `@tfkit.hookimpl def tfkit_register(register)`")
        others = self._pm.get_plugins() - {plugin}
        self._pm.subset_hook_caller("tfkit_register", others)(register=register)

    def _misspelt(self, candidate: Candidate, plugin: object) -> list[Diagnostic]:
        """An error for each function that is marked as a hook of tfkit's but has an unknown name."""
        return [
            _misspelt_hook(candidate, caller.name, impl)
            for caller in self._pm.get_hookcallers(plugin) or ()
            for impl in caller.get_hookimpls()
            if impl.plugin is plugin and not caller.has_spec() and not impl.optionalhook
        ]

    def _add(self, candidate: Candidate, configs: Sequence[type[Component]]) -> None:
        for config in configs:
            try:
                self.registry.add(config, candidate.label)
            except SpecError as error:
                self.problems += error.diagnostics
        components = tuple(Registered(config, candidate.label) for config in configs)
        self.loaded.append(Plugin(candidate.name, candidate.version, candidate.origin, components))


def _built_in() -> Candidate:
    """The components of tfkit itself. Nothing works without them, so their failures are not caught."""
    try:
        version = importlib.metadata.version("tfkit")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return Candidate("tfkit", version, BUILT_IN, lambda: [importlib.import_module(COMPONENTS)], BUILT_IN)


def _switched_off(names: Sequence[str], disabled: Collection[str]) -> set[str]:
    """The canonical names of the plugins to leave out; those in `TFKIT_DISABLE` need not exist."""
    known = {canonical(name) for name in names}
    unknown = [name for name in disabled if canonical(name) not in known]
    if unknown:
        raise SpecError(*(_unknown_plugin(name, names) for name in unknown))
    return {canonical(name) for name in [*disabled, *os.environ.get(DISABLE, "").split(",")]} & known


def _unknown_plugin(name: str, names: Sequence[str]) -> Diagnostic:
    near = closest(name, names)
    known = f"plugins: {listing(names)}" if names else "no plugin was found"
    return Diagnostic(
        f"cannot switch off plugin `{name}`: there is no plugin of that name",
        notes=(known,),
        help=f"a plugin with a similar name exists: `{near}`" if near else None,
    )


def _misspelt_hook(candidate: Candidate, name: str, impl: pluggy.HookImpl) -> Diagnostic:
    hooks = [hook for hook in vars(hookspecs) if hook.startswith("tfkit_")]
    near = closest(name, hooks)
    code = getattr(impl.function, "__code__", None)
    place = (f"{code.co_filename}:{code.co_firstlineno}",) if code else ()
    return Diagnostic(
        f"unknown hook `{name}` in plugin {candidate.label}",
        notes=(*place, f"known hooks: {listing(hooks)}"),
        help=f"a hook with a similar name exists: `{near}`" if near else None,
    )


def _broken(candidate: Candidate, error: BaseException) -> BrokenPlugin:
    cause = " ".join(str(error).split())
    if not isinstance(error, _NoHookError):
        cause = f"{type(error).__name__}: {cause}".removesuffix(": ")
    advice = [*getattr(error, "__notes__", ()), f"to switch it off: {DISABLE}={canonical(candidate.name)}"]
    return BrokenPlugin(candidate.name, candidate.origin, cause, _where(error), "; ".join(advice))


def _where(error: BaseException) -> str:
    """The innermost line outside tfkit's plugin machinery, Python's and pluggy's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    machinery = [f"{Path(file).parent}{os.sep}" for file in (__file__, pluggy.__file__, importlib.__file__)]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(("<", *machinery))]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""
