"""Loading of plugins into a registry. Plugins that fail are omitted and reported.

A plugin that fails affects only itself: it is omitted, with the cause, and everything else works. Three faults could
silently change the model that a spec describes, and are errors for all users: two plugins of the same name, two
components of the same kind, and a hook that is never called because its name is misspelt.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from tfkit.arguments import AnyPath, checked
from tfkit.component import Component
from tfkit.errors import Diagnostic, PluginWarning, SpecError
from tfkit.plugin.discover import (
    BUILT_IN,
    DISABLE,
    GROUP,
    Candidate,
    enabled_plugins,
    normalized_name,
    tfkit_itself,
    tfkit_version,
)
from tfkit.plugin.hooks import HookError, Hooks, PluginError, error_location, in_words, stdout_to_stderr
from tfkit.plugin.known_specs import NamedSpecs, SpecPath, declared_folders, named_specs, spec_folders
from tfkit.plugin.registry import Registered, Registry, check_config


@dataclass(frozen=True)
class Plugin:
    """A plugin that was loaded. `origin` is `built in`, `entry point`, a path, or `PATH, by TFKIT_PLUGIN_DIR`."""

    name: str
    version: str
    origin: str
    label: str
    """The name in messages, as in `Candidate.label`."""
    components: tuple[Registered, ...]


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin that was omitted because it failed."""

    name: str
    origin: str
    cause: str
    """The error, on one line: `ModuleNotFoundError: No module named 'foo'`."""
    where: str
    """The file and line that failed; empty if unknown."""
    help: str
    """Advice for the author or the user of the plugin."""


@dataclass(frozen=True)
class Plugins:
    """The result of `load_plugins`. `disabled` contains the names of plugins that were switched off."""

    registry: Registry
    loaded: tuple[Plugin, ...]
    broken: tuple[BrokenPlugin, ...] = ()
    disabled: tuple[str, ...] = ()
    specs: NamedSpecs = field(default_factory=named_specs)
    hooks: Hooks = field(default_factory=Hooks)


AnyPlugins: TypeAlias = Annotated[Plugins, "what `tfkit.load_plugins` returned"]


@dataclass(frozen=True)
class Available:
    """The plugins that `load_plugins` would load, found without running their code, and the specs of plugins and tfkit.

    Versions are by canonical name, empty for a plugin without a version. `broken` are plugins with an invalid
    declaration.
    """

    versions: Mapping[str, str]
    specs: NamedSpecs
    broken: tuple[BrokenPlugin, ...]


@checked
def load_plugins(
    *,
    plugin_dirs: Collection[AnyPath] | AnyPath = (),
    entry_points: bool = True,
    objects: Mapping[str, Any] | None = None,
) -> Plugins:
    """Load the built-in components, the installed plugins, and the plugins in folders.

    Loading a plugin runs its code. Only plugins that you installed or named are loaded; a spec never loads one. The
    environment variable `TFKIT_DISABLE` contains the names of plugins to omit, separated by commas.

    Args:
        plugin_dirs: a folder or several folders, as for `--plugin-dir`.
        entry_points: also load plugins that this call does not name: the installed distributions, and the folders in
            the environment variable `TFKIT_PLUGIN_DIR` (absolute paths, separated as in `PATH`).
        objects: objects with hooks by the name of their plugin, as in pluggy's `register`: modules, classes, instances.

    Raises:
        SpecError: a kind is registered twice, two plugins or two specs have the same name, a hook is misspelt, or a
            folder contains no plugin, or one of the `objects` fails.
    """
    candidates, names = enabled_plugins(_plugin_dir_paths(plugin_dirs), entry_points, (objects or {}).items())
    loader = _Loader()
    loader.load(_built_in())
    for candidate in candidates:
        loader.load_or_quarantine(candidate)
    specs = loader.specs()
    loader.problems += [
        Diagnostic(f"plugin `{plugin.name}`: {plugin.cause}", notes=(plugin.where,) * bool(plugin.where))
        for plugin in loader.broken
        if plugin.name in (objects or {})
    ]
    if loader.problems:
        raise SpecError(*loader.problems)
    return Plugins(loader.registry, tuple(loader.loaded), tuple(loader.broken), names, specs, loader.hooks)


def available_plugins(*, plugin_dirs: Collection[AnyPath] | AnyPath = (), entry_points: bool = True) -> Available:
    """Return the plugins that `load_plugins` would load, without running code; raise SpecError for equal names."""
    candidates, _ = enabled_plugins(_plugin_dir_paths(plugin_dirs), entry_points)
    folders, broken = [], []
    for candidate in candidates:
        try:
            folders += declared_folders(candidate)
        except ImportError as error:
            broken.append(_broken_plugin(candidate, error))
    versions = {normalized_name(candidate.name): candidate.version for candidate in candidates}
    return Available(versions, named_specs(folders), tuple(broken))


def _plugin_dir_paths(plugin_dirs: Collection[AnyPath] | AnyPath) -> Iterable[Path]:
    return map(Path, [plugin_dirs] if isinstance(plugin_dirs, str | os.PathLike) else plugin_dirs)


class _Loader:
    """The state of one call of `load_plugins`: the hooks, and everything that they have loaded so far."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.hooks = Hooks()
        self.loaded: list[Plugin] = []
        self.broken: list[BrokenPlugin] = []
        self.problems: list[Diagnostic] = []
        self._folders: list[SpecPath] = []

    def load_or_quarantine(self, candidate: Candidate) -> None:
        try:
            self._folders += declared_folders(
                candidate
            )  # specs are data: available even if the code of the plugin fails
            with stdout_to_stderr(), unchanged_torch(candidate.label):
                self.load(candidate)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.hooks.remove(candidate)
            self.broken.append(_broken_plugin(candidate, error))

    def load(self, candidate: Candidate) -> None:
        """Run a plugin's hooks, and register their results; if a hook fails, register none of them."""
        misspelt = [error for part in candidate.load() for error in self.hooks.add(part, candidate)]
        if misspelt:
            self.problems += misspelt
            return
        configs: list[type[Component]] = []

        def register(config: type[Component], /) -> None:
            configs.append(check_config(config))

        self.hooks.call_one(candidate, "tfkit_register", _reject_returned_value, register=register)
        read = partial(spec_folders, candidate.label)
        folders = [path for paths in self.hooks.call_one(candidate, "tfkit_specs", read) for path in paths]
        self._add(candidate, configs)
        self._folders += folders

    def specs(self) -> NamedSpecs:
        """Return the specs in all folders, and record two specs of the same name as problems."""
        try:
            return named_specs(self._folders)
        except SpecError as error:
            self.problems += error.diagnostics
            return named_specs()

    def _add(self, candidate: Candidate, configs: Sequence[type[Component]]) -> None:
        for config in configs:
            try:
                self.registry.add(config, candidate.label)
            except SpecError as error:
                self.problems += error.diagnostics
        components = tuple(Registered(config, candidate.label) for config in configs)
        self.loaded.append(Plugin(candidate.name, candidate.version, candidate.origin, candidate.label, components))


def _reject_returned_value(returned: object) -> None:
    """Raise TypeError for a `tfkit_register` that returned a value."""
    type_name = returned.__name__ if isinstance(returned, type) else type(returned).__name__
    raise TypeError(f"must return nothing; got {type_name}: call `register` with each config")


def _built_in() -> Candidate:
    """Return the modules with tfkit's own hooks. Nothing works without them, so their failures are not caught."""
    points = sorted(tfkit_itself().named(GROUP), key=lambda point: point.name)
    return Candidate("tfkit", tfkit_version(), BUILT_IN, lambda: [point.load() for point in points], BUILT_IN)


def _broken_plugin(candidate: Candidate, error: BaseException) -> BrokenPlugin:
    cause = str(error) if isinstance(error, PluginError | HookError) else in_words(error)
    location = error.where if isinstance(error, HookError) else error_location(error)
    noted = error.__cause__ if isinstance(error, HookError) else error
    advice = [*getattr(noted, "__notes__", ()), f"to switch it off: {DISABLE}={normalized_name(candidate.name)}"]
    return BrokenPlugin(candidate.name, candidate.origin, cause, location, "; ".join(advice))


# ---- global settings of torch, which change every model of the process ----

_SETTINGS: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "default dtype": (lambda t: t.get_default_dtype(), lambda t, dtype: t.set_default_dtype(dtype)),
    "default device": (
        lambda t: str(t.get_default_device()),
        lambda t, name: t.set_default_device(_device_argument(name)),
    ),
    "gradient mode": (lambda t: t.is_grad_enabled(), lambda t, mode: t.set_grad_enabled(mode)),
    "number of threads": (lambda t: t.get_num_threads(), lambda t, number: t.set_num_threads(number)),
    "deterministic algorithms": (
        lambda t: t.are_deterministic_algorithms_enabled(),
        lambda t, mode: t.use_deterministic_algorithms(mode),
    ),
    "float32 matmul precision": (
        lambda t: t.get_float32_matmul_precision(),
        lambda t, precision: t.set_float32_matmul_precision(precision),
    ),
}
"""The function that reads a setting and the function that sets it, each called with the module `torch`."""


@contextmanager
def unchanged_torch(plugin: str) -> Iterator[None]:
    """Restore the settings after code of a plugin has run, and warn about settings that it changed."""
    torch = sys.modules["torch"]  # imported by the built-in components, which load before every plugin
    before = {name: read(torch) for name, (read, _) in _SETTINGS.items()}
    try:
        yield
    finally:
        changes = []
        for name, value in before.items():
            read, write = _SETTINGS[name]
            if (now := read(torch)) != value:
                write(torch, value)
                changes.append(f"torch's {name} from {value} to {now}")
        if changes:
            message = f"plugin {plugin} changes {', '.join(changes)}; tfkit restored the setting"
            warnings.warn(message, PluginWarning, stacklevel=2)


def _device_argument(name: str) -> str | None:
    return None if name == "cpu" else name
