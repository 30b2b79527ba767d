"""The reference of the commands, generated from their options."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import click

from tfkit.cli import cli
from tfkit.plugin.commands import CommandEntry, built_in_commands, in_sections
from tools.docs.page import Page, code, docstring, hidden_index, joined, link, prose, search_entries, stacked, table


def path_of(name: str) -> str:
    """Return the path of a command's page."""
    return f"commands/{name}"


def pages() -> Iterator[Page]:
    """Yield the page of all commands, and the page of each command."""
    yield Page("commands/index", _index)
    for commands in in_sections(built_in_commands().values()).values():
        for command in commands:
            yield Page(path_of(command.name), partial(_command, command))


def _index() -> str:
    parts = ["# Commands", docstring(cli.notes)]
    sections = in_sections(built_in_commands().values())
    for title, commands in sections.items():
        rows = [(link(f"tfkit {entry.name}", path_of(entry.name)), prose(entry.load().help)) for entry in commands]
        parts += [f"## {title}", table(["command", "purpose"], rows)]
    parts.append(hidden_index(path_of(entry.name) for commands in sections.values() for entry in commands))
    return joined(parts)


def _command(entry: CommandEntry) -> str:
    command: Any = entry.load()
    context = click.Context(command, info_name=f"tfkit {entry.name}")
    records = [(parameter, parameter.get_help_record(context)) for parameter in command.params]
    options = [
        (f"`{record[0]}`", prose(record[1]))
        for parameter, record in records
        if record is not None and isinstance(parameter, click.Option)
    ]
    return joined(
        [
            f"# tfkit {entry.name}",
            prose(command.help),
            code(" ".join(command.get_usage(context).removeprefix("Usage: ").split())),
            docstring(command.notes) if command.notes else "",
            "## Options" if options else "",
            search_entries(option.opts[-1] for option in command.params if isinstance(option, click.Option)),
            stacked(table(["option", "effect"], options)),
            "## Examples" if command.examples else "",
            code("\n".join(command.examples), "sh") if command.examples else "",
        ]
    )
