"""Show the plugins: loaded, broken and why, switched off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from tfkit.console.commands import Reader, command
from tfkit.console.options import json_option
from tfkit.console.output import print_json, print_tables, table
from tfkit.errors import listing
from tfkit.plugin.discover import COMMANDS, DOCUMENTS, SPECS

if TYPE_CHECKING:
    from tfkit.plugin.commands import CommandEntry
    from tfkit.plugin.hooks import HookCall
    from tfkit.plugin.manager import Plugins


@command(
    "plugins",
    section="The language",
    order=630,
    sets=False,
    notes="""
    Loading a plugin runs its code. Plugins are loaded if they are installed, or in
    the folders of TFKIT_PLUGIN_DIR (absolute paths, separated as in PATH) or of
    --plugin-dir. A spec lists the plugins that it needs in `requires`; it never
    loads one.
    """,
    examples="""
    tfkit plugins
    tfkit plugins --plugin-dir plugins/
    tfkit plugins --trace
    export TFKIT_PLUGIN_DIR=$PWD/plugins
    TFKIT_DISABLE=tfkit-additive tfkit plugins
    """,
)
@click.option("--trace", is_flag=True, help="Show the hooks that were called, and what each gave.")
@json_option
def plugins(reader: Reader, trace: bool, json: bool) -> None:
    from tfkit.plugin.commands import plugin_commands

    loaded_plugins = reader.loaded
    commands = plugin_commands(reader.plugin_dir, not reader.no_plugins)
    documents = [file for named in loaded_plugins.specs.documents.values() for file in named.files.values()]
    if trace:
        _show_trace(loaded_plugins, commands, json=json)
        return
    counts = {
        plugin.name: {
            "components": len(plugin.components),
            "specs": sum(spec.plugin == plugin.label for spec in loaded_plugins.specs.files.values()),
            "documents": sum(file.plugin == plugin.label for file in documents),
            "commands": sum(command.plugin == plugin.label for command in commands.values()),
        }
        for plugin in loaded_plugins.loaded
    }
    if json:
        loaded = [
            {"name": plugin.name, "version": plugin.version, "origin": plugin.origin, **counts[plugin.name]}
            for plugin in loaded_plugins.loaded
        ]
        print_json({"loaded": loaded, "broken": loaded_plugins.broken, "disabled": loaded_plugins.disabled})
        return
    rows = [
        (plugin.name, plugin.version, plugin.origin, _contents_text(counts[plugin.name]))
        for plugin in loaded_plugins.loaded
    ]
    print_tables(table(["plugin", "version", "from", "brings"], rows), *_left_out(loaded_plugins))


def _contents_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {what if n > 1 else what.removesuffix('s')}" for what, n in counts.items() if n)


def _show_trace(loaded_plugins: Plugins, commands: Mapping[str, CommandEntry], *, json: bool) -> None:
    traced = trace_hooks(loaded_plugins, commands)
    if json:
        print_json(traced)
        return
    rows = [(row.hook, row.plugin, row.failed or row.note or listing(row.gave, 4) or "nothing") for row in traced]
    print_tables(table(["hook", "plugin", "gave"], rows), *_left_out(loaded_plugins))


def _left_out(loaded_plugins: Plugins) -> Iterator[str]:
    for broken in loaded_plugins.broken:
        yield f"\nbroken: {broken.name}, from {broken.origin}\n  {broken.cause}"
        yield from (f"  {text}" for text in (broken.where, broken.help) if text)
    if loaded_plugins.disabled:
        yield f"\nswitched off: {', '.join(loaded_plugins.disabled)}"


# ---- the hooks of plugins that were called, and what each of them gave ----


LATER = {
    "tfkit_spec_loaded": "called for each spec that is loaded",
    "tfkit_model_built": "called for each model that is built",
    "tfkit_checks": "called for each spec by `tfkit validate` and `tfkit build`",
    "tfkit_properties": "called by `tfkit check`",
    "tfkit_reference": "called by `tfkit check`",
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


def trace_hooks(plugins: Plugins, commands: Mapping[str, CommandEntry]) -> list[Traced]:
    """Call every hook that needs no spec, and list the results together with declarations that need no code."""
    from tfkit.graph.documents import document_types
    from tfkit.tools.export.formats import formats_of
    from tfkit.tools.save.layouts import layouts_of

    formats_of(plugins)
    document_types(plugins)
    layouts_of(plugins)
    calls = [_traced_call(call, plugins) for call in plugins.hooks.calls]
    called = {(call.hook, call.plugin) for call in calls}
    left = [call for call in plugins.hooks.all() if call[0] in LATER and call not in called]
    later = [Traced(hook, plugin, (), note=LATER[hook]) for hook, plugin in left]
    return [*calls, *later, *_declared_entries(plugins, calls, commands)]


def _traced_call(call: HookCall, plugins: Plugins) -> Traced:
    from tfkit.plugin.hooks import HookError

    if isinstance(call.gave, HookError):
        return Traced(call.hook, call.plugin, (), failed=str(call.gave))
    return Traced(call.hook, call.plugin, tuple(_result_names(call, plugins)))


def _result_names(call: HookCall, plugins: Plugins) -> Iterator[str]:
    from tfkit.plugin.known_specs import SpecPath

    if call.hook == "tfkit_register":
        for slot in plugins.registry.slots():
            kinds = plugins.registry.kinds(slot).items()
            yield from (f"{slot} {kind}" for kind, item in kinds if item.plugin == call.plugin)
    for item in call.gave if isinstance(call.gave, list) else []:
        yield str(item.path) if isinstance(item, SpecPath) else item.name


def _declared_entries(plugins: Plugins, calls: list[Traced], commands: Mapping[str, CommandEntry]) -> Iterator[Traced]:
    """Yield the specs, documents and commands of entry points."""
    by_hook = {folder for command in calls if command.hook == "tfkit_specs" for folder in command.gave}
    specs: dict[str, list[str]] = {}
    for name, spec in plugins.specs.files.items():
        if str(spec.path.parent) not in by_hook:
            specs.setdefault(spec.plugin, []).append(name)
    yield from (Traced(SPECS, plugin, tuple(names)) for plugin, names in specs.items())
    for named in plugins.specs.documents.values():
        labels = dict.fromkeys(file.plugin for file in named.files.values())
        for plugin in labels:
            names = [name for name, file in named.files.items() if file.plugin == plugin]
            yield Traced(DOCUMENTS, plugin, tuple(names))
    yield from (Traced(COMMANDS, command.plugin, (command.name,)) for command in commands.values())
