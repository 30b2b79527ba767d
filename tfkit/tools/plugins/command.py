"""Show the plugins: loaded, broken and why, switched off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import click

from tfkit.console.commands import command
from tfkit.console.options import json_option
from tfkit.console.output import print_json, show, table
from tfkit.console.reader import Reader
from tfkit.errors import listing

if TYPE_CHECKING:
    from tfkit.plugin.manager import Plugins
    from tfkit.plugin.plugin_commands import PluginCommand


@command(
    "plugins",
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
    from tfkit.plugin.plugin_commands import plugin_commands

    loaded_plugins = reader.found
    commands = plugin_commands(reader.plugin_dir, not reader.no_plugins)
    if trace:
        _show_trace(loaded_plugins, commands, json=json)
        return
    counts = {
        plugin.name: {
            "components": len(plugin.components),
            "specs": sum(spec.plugin == plugin.label for spec in loaded_plugins.specs.files.values()),
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
        (plugin.name, plugin.version, plugin.origin, _brings(counts[plugin.name])) for plugin in loaded_plugins.loaded
    ]
    show(table(["plugin", "version", "from", "brings"], rows), *_left_out(loaded_plugins))


def _brings(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {what if n > 1 else what.removesuffix('s')}" for what, n in counts.items() if n)


def _show_trace(loaded_plugins: Plugins, commands: Mapping[str, PluginCommand], *, json: bool) -> None:
    from tfkit.tools.plugins.trace import trace

    traced = trace(loaded_plugins, commands)
    if json:
        print_json(traced)
        return
    rows = [(row.hook, row.plugin, row.failed or row.note or listing(row.gave, 4) or "nothing") for row in traced]
    show(table(["hook", "plugin", "gave"], rows), *_left_out(loaded_plugins))


def _left_out(loaded_plugins: Plugins) -> Iterator[str]:
    for broken in loaded_plugins.broken:
        yield f"\nbroken: {broken.name}, from {broken.origin}\n  {broken.cause}"
        yield from (f"  {text}" for text in (broken.where, broken.help) if text)
    if loaded_plugins.disabled:
        yield f"\nswitched off: {', '.join(loaded_plugins.disabled)}"
