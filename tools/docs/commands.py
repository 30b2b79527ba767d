"""The reference of the commands, generated from their options."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import click

from tfkit.cli import SECTIONS, cli
from tools.docs.page import Page, code, docstring, hidden_index, joined, link, prose, search_entries, stacked, table


def path_of(name: str) -> str:
    """Return the path of a command's page."""
    return f"commands/{name}"


def pages() -> Iterator[Page]:
    """Yield the page of all commands, and the page of each command."""
    yield Page("commands/index", _index)
    for name in (name for names in SECTIONS.values() for name in names):
        yield Page(path_of(name), partial(_command, name))


def _loaded(name: str) -> Any:
    return cli.get_command(click.Context(cli), name)


def _index() -> str:
    parts = ["# Commands", docstring(cli.notes)]
    for title, names in SECTIONS.items():
        rows = [(link(f"tfkit {name}", path_of(name)), prose(_loaded(name).help)) for name in names]
        parts += [f"## {title}", table(["command", "purpose"], rows)]
    parts.append(hidden_index(path_of(name) for names in SECTIONS.values() for name in names))
    return joined(parts)


def _command(name: str) -> str:
    command = _loaded(name)
    context = click.Context(command, info_name=f"tfkit {name}")
    records = [(parameter, parameter.get_help_record(context)) for parameter in command.params]
    options = [
        (f"`{record[0]}`", prose(record[1]))
        for parameter, record in records
        if record is not None and isinstance(parameter, click.Option)
    ]
    return joined(
        [
            f"# tfkit {name}",
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
