"""The hooks of plugins that were called, and what each of them gave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tfkit.plugin.discover import COMMANDS, SPECS
from tfkit.plugin.hooks import HookCall, HookError
from tfkit.plugin.known_specs import SpecPath
from tfkit.plugin.manager import Plugins
from tfkit.plugin.plugin_commands import PluginCommand
from tfkit.tools.export.formats import formats_of

LATER = {
    "tfkit_checks": "called for each spec by `tfkit validate` and `tfkit build`",
    "tfkit_properties": "called by `tfkit check`",
}


@dataclass(frozen=True)
class Traced:
    """A call of a hook, or an entry point that was read.

    Attributes:
        hook: its name, or the group of entry points.
        plugin: the label of the plugin.
        gave: what it brought, each by its name.
        failed: the reason why it brought nothing.
        note: the reason why it was not called.
    """

    hook: str
    plugin: str
    gave: tuple[str, ...]
    failed: str | None = None
    note: str | None = None


def trace(plugins: Plugins, commands: Mapping[str, PluginCommand]) -> list[Traced]:
    """Call every hook that needs no spec, and list the results together with declarations that need no code."""
    formats_of(plugins)
    calls = [_called(call, plugins) for call in plugins.hooks.calls]
    called = {(call.hook, call.plugin) for call in calls}
    left = [call for call in plugins.hooks.all() if call[0] in LATER and call not in called]
    later = [Traced(hook, plugin, (), note=LATER[hook]) for hook, plugin in left]
    return [*calls, *later, *_declared(plugins, calls, commands)]


def _called(call: HookCall, plugins: Plugins) -> Traced:
    if isinstance(call.gave, HookError):
        return Traced(call.hook, call.plugin, (), failed=str(call.gave))
    return Traced(call.hook, call.plugin, tuple(_words(call, plugins)))


def _words(call: HookCall, plugins: Plugins) -> Iterator[str]:
    if call.hook == "tfkit_register":
        for slot in plugins.registry.slots():
            kinds = plugins.registry.kinds(slot).items()
            yield from (f"{slot} {kind}" for kind, item in kinds if item.plugin == call.plugin)
    for item in call.gave if isinstance(call.gave, list) else []:
        yield str(item.path) if isinstance(item, SpecPath) else item.name


def _declared(plugins: Plugins, calls: list[Traced], commands: Mapping[str, PluginCommand]) -> Iterator[Traced]:
    """Yield the specs and commands of entry points."""
    by_hook = {folder for command in calls if command.hook == "tfkit_specs" for folder in command.gave}
    specs: dict[str, list[str]] = {}
    for name, spec in plugins.specs.files.items():
        if str(spec.path.parent) not in by_hook:
            specs.setdefault(spec.plugin, []).append(name)
    yield from (Traced(SPECS, plugin, tuple(names)) for plugin, names in specs.items())
    yield from (Traced(COMMANDS, command.plugin, (command.name,)) for command in commands.values())
