"""The commands of tfkit and of plugins, found without importing them: their names, their summaries, their sections.

A command is an entry point in the group `tfkit.commands`, such as `depth = "tfkit_mine.depth:depth"`: the word after
`tfkit`, a module, and the `click.Command` in it. The summary is the first line of the module's docstring. The section
and the order within `tfkit --help` are arguments of the decorator `tfkit.command`, read from the source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint
from importlib.util import decode_source
from pathlib import Path
from typing import TYPE_CHECKING

from tfkit.errors import Diagnostic, SpecError
from tfkit.plugin.discover import BUILT_IN, COMMANDS, DISABLE, Candidate, enabled_plugins, normalized_name, tfkit_itself
from tfkit.plugin.import_code import load_points, source_of

if TYPE_CHECKING:
    import click

SECTION, ORDER = "Plugins", 1000
"""The section and the order of a command that declares none."""


@dataclass(frozen=True)
class Declaration:
    """The line of a command in `tfkit --help`, and its location there."""

    summary: str = ""
    section: str = SECTION
    order: int = ORDER


@dataclass(frozen=True)
class CommandEntry:
    """A command before it is imported: the word after `tfkit`, and the plugins that define it, usually one."""

    name: str
    owners: tuple[tuple[Candidate, EntryPoint], ...]

    @property
    def plugin(self) -> str:
        """The label of the plugin, or of all plugins that define the command."""
        return ", ".join(candidate.label for candidate, _ in self.owners)

    @cached_property
    def declaration(self) -> Declaration:
        """The declaration in the source; the default one if it cannot be read, or if there are two commands."""
        (candidate, point), *rivals = self.owners
        if rivals:
            return Declaration()
        try:
            source = decode_source(source_of(point.module, candidate.folders).read_bytes())
            return read_declaration(source, point.attr)
        except (ImportError, OSError, SyntaxError, ValueError):  # `load` raises the error
            return Declaration()

    def load(self) -> click.Command:
        """Import the command. Raise SpecError if a plugin's command cannot be imported, or if there are two."""
        (candidate, point), *rivals = self.owners
        if rivals:
            help = f"switch one plugin off by its name: {DISABLE}=<name>"
            labels = tuple(candidate.label for candidate, _ in self.owners)
            raise SpecError(Diagnostic(f"there are two commands named `{self.name}`", notes=labels, help=help))
        command: click.Command = point.load() if candidate.origin == BUILT_IN else _load_command(candidate, point)
        return command


def built_in_commands() -> Mapping[str, CommandEntry]:
    """Return the commands of tfkit itself."""
    return _command_entries([tfkit_itself()])


def plugin_commands(plugin_dirs: Iterable[Path] = (), entry_points: bool = True) -> Mapping[str, CommandEntry]:
    """Return the commands of the plugins that `tfkit.load_plugins` would load. No plugin code runs.

    If two plugins define a name, the command only raises an error.
    """
    return _command_entries(enabled_plugins(plugin_dirs, entry_points)[0])


def _command_entries(candidates: Iterable[Candidate]) -> dict[str, CommandEntry]:
    owners: dict[str, list[tuple[Candidate, EntryPoint]]] = {}
    for candidate in candidates:
        for point in candidate.named(COMMANDS):
            owners.setdefault(point.name, []).append((candidate, point))
    return {name: CommandEntry(name, tuple(points)) for name, points in owners.items()}


def in_sections(commands: Iterable[CommandEntry]) -> dict[str, list[CommandEntry]]:
    """Group commands by section. Commands are sorted by `order`, then by name; sections, by their first command."""
    sections: dict[str, list[CommandEntry]] = {}
    for command in sorted(commands, key=lambda command: (command.declaration.order, command.name)):
        sections.setdefault(command.declaration.section, []).append(command)
    return sections


# ---- the source of a command, which is read and not run ----


def read_declaration(source: str, function: str) -> Declaration:
    """Read the docstring of a module, and the arguments `section` and `order` of the decorator of its command."""
    tree = _parse_head(source, function)
    summary = (ast.get_docstring(tree) or "").partition("\n")[0]
    options = dict(_options_of(tree, function))
    section, order = options.get("section"), options.get("order")
    return Declaration(
        summary,
        section if isinstance(section, str) else SECTION,
        order if isinstance(order, int) else ORDER,
    )


def _parse_head(source: str, function: str) -> ast.Module:
    """Parse the docstring and the decorator `command`: the rest declares nothing, and takes most of the time."""
    head, header, _ = source.partition(f"\ndef {function}(")
    opening, *decorators = head.split("\n@")
    decorators = [f"\n@{text}" for text in decorators if text.partition("(")[0].endswith("command")]
    if header:
        with suppress(SyntaxError):  # the line may be in a docstring
            return ast.parse(f"{opening}{''.join(decorators)}{header}): ...")
    return ast.parse(source)


def _options_of(tree: ast.Module, function: str) -> Iterator[tuple[str | None, object]]:
    """Yield the literal arguments of the decorator `command` of a function."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and _last_name(call.func) == "command":
                    for option in call.keywords:
                        if isinstance(option.value, ast.Constant):
                            yield option.arg, option.value.value


def _last_name(expression: ast.expr) -> str:
    """Return `command` for both `command` and `tfkit.command`."""
    name: str = getattr(expression, "attr", getattr(expression, "id", ""))
    return name


# ---- the import of a plugin's command ----


def _load_command(candidate: Candidate, point: EntryPoint) -> click.Command:
    import click

    from tfkit.plugin.hooks import error_location, in_words, stdout_to_stderr

    try:
        with stdout_to_stderr():
            (command,) = load_points([point], candidate.folders)
    except (SpecError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise SpecError(_broken_command(candidate, point, in_words(error), error_location(error))) from error
    if not isinstance(command, click.Command):
        cause = f"`{point.value}` must be a click.Command; got {type(command).__name__}"
        raise SpecError(_broken_command(candidate, point, cause, ""))
    return command


def _broken_command(candidate: Candidate, point: EntryPoint, cause: str, location: str) -> Diagnostic:
    return Diagnostic(
        f"the command `{point.name}` of plugin {candidate.label} cannot be loaded: {cause}",
        notes=(location,) if location else (),
        help=f"to switch the plugin off: {DISABLE}={normalized_name(candidate.name)}",
    )
