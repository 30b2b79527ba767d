"""The commands of plugins, found without running a plugin: `tfkit --help` shows their names and first lines.

A command is an entry point in the group `tfkit.commands`: its name, and the module that has the hook `tfkit_command`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING

from tfkit.errors import Diagnostic, SpecError
from tfkit.plugin.discover import COMMANDS, DISABLE, Candidate, canonical, wanted

if TYPE_CHECKING:
    import click


@dataclass(frozen=True)
class PluginCommand:
    """A command of a plugin: the word after `tfkit`, and the label of its plugin, or of both plugins that define it.

    `summary` is the first line of the module's docstring, empty if it cannot be read. `load` imports the module, and
    raises SpecError if the import fails.
    """

    name: str
    plugin: str
    summary: str
    load: Callable[[], click.Command]


def plugin_commands(
    plugin_dirs: Iterable[Path] = (),
    entry_points: bool = True,
    built_in: Collection[str] = (),
) -> Mapping[str, PluginCommand]:
    """Return the commands of the plugins that `tfkit.load_plugins` would load, sorted by name. No plugin code runs.

    If a name is also in `built_in`, or if two plugins define it, the command only raises an error.
    """
    points: dict[str, list[tuple[Candidate, EntryPoint]]] = {}
    for candidate in wanted(plugin_dirs, entry_points)[0]:
        for point in candidate.named(COMMANDS):
            points.setdefault(point.name, []).append((candidate, point))
    return {name: _command(name, owners, name in built_in) for name, owners in sorted(points.items())}


def _command(name: str, owners: Collection[tuple[Candidate, EntryPoint]], is_built_in: bool) -> PluginCommand:
    labels = [*(["tfkit"] if is_built_in else []), *(candidate.label for candidate, _ in owners)]
    if len(labels) > 1:
        return PluginCommand(name, ", ".join(labels), "", partial(_refuse, name, labels))
    ((candidate, point),) = owners
    return PluginCommand(name, candidate.label, _summary(candidate, point), partial(_load, candidate, point))


def _summary(candidate: Candidate, point: EntryPoint) -> str:
    """Return the first line of the module's docstring, from its source."""
    from tfkit.plugin.import_code import source_of

    try:
        tree = ast.parse(source_of(point.module, candidate.folders).read_bytes())
    except (ImportError, OSError, SyntaxError, ValueError):  # `load` raises the error
        return ""
    return (ast.get_docstring(tree) or "").partition("\n")[0]


def _load(candidate: Candidate, point: EntryPoint) -> click.Command:
    from tfkit.plugin.hooks import HookError, Hooks, PluginError, in_words, stdout_to_stderr, where
    from tfkit.plugin.import_code import load_points

    hooks = Hooks()
    try:
        with stdout_to_stderr():
            parts = load_points([point], candidate.folders)
        for part in parts:
            if misspelt := hooks.add(part, candidate, "tfkit_command()"):
                raise SpecError(*misspelt)
        returned = hooks.call_one(candidate, "tfkit_command", _is_command)
    except (SpecError, KeyboardInterrupt):
        raise
    except BaseException as error:
        cause = str(error) if isinstance(error, HookError | PluginError) else in_words(error)
        place = error.where if isinstance(error, HookError) else where(error)
        raise SpecError(_broken(candidate, point, cause, place)) from error
    if not returned:
        cause = f"`{point.module}` has no hook `tfkit_command`, or it returned None"
        raise SpecError(_broken(candidate, point, cause, ""))
    return returned[0]


def _is_command(returned: object) -> click.Command:
    import click

    if not isinstance(returned, click.Command):
        raise TypeError(f"must return a click.Command; got {type(returned).__name__}")
    return returned


def _broken(candidate: Candidate, point: EntryPoint, cause: str, place: str) -> Diagnostic:
    return Diagnostic(
        f"the command `{point.name}` of plugin {candidate.label} cannot be loaded: {cause}",
        notes=(place,) if place else (),
        help=f"to switch the plugin off: {DISABLE}={canonical(candidate.name)}",
    )


def _refuse(name: str, labels: Collection[str]) -> click.Command:
    help = f"switch one plugin off by its name: {DISABLE}=<name>"
    raise SpecError(Diagnostic(f"there are two commands named `{name}`", notes=tuple(labels), help=help))
