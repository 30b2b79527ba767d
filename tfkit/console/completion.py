"""Completion in a shell: commands, options, names of specs, and the paths and values of `--set`.

    eval "$(_TFKIT_COMPLETE=bash_source tfkit)"

A completion that is only a beginning, such as a folder or a path of `--set`, is given with what can follow: shells then
add no blank. Nothing is printed but completions, so what cannot be read completes to nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from tfkit.console.reader import Reader

VARIABLE = "_TFKIT_COMPLETE"
"""The environment variable in which a shell asks for completions."""


def answer(cli: click.Command, instruction: str) -> int:
    """Print what a shell asks for, its script (`bash_source`) or completions; returns the exit status."""
    from click.shell_completion import BashComplete, add_completion_class, shell_complete

    class Bash(BashComplete):
        """Bash takes `=` for a word of its own, and completes what follows it."""

        before = ""

        def get_completion_args(self) -> tuple[list[str], str]:
            args, incomplete = super().get_completion_args()
            words = _joined([*args, incomplete])
            if words[-1] != incomplete:
                self.before = words[-1].rpartition("=")[0] + "="
            return words[:-1], words[-1]

        def format_completion(self, item: CompletionItem[str]) -> str:
            for before in (self.before, self.before.partition("=")[2]):
                item.value = item.value.removeprefix(before) if before else item.value
            return super().format_completion(item)

    add_completion_class(Bash)
    if shell_complete(cli, {}, "tfkit", VARIABLE, instruction) == 0:
        return 0
    click.echo(f"error: {VARIABLE} takes bash_source, zsh_source or fish_source, not `{instruction}`", err=True)
    return 2


def _joined(words: list[str]) -> list[str]:
    """Words in which `=` joins its neighbours again."""
    joined: list[str] = []
    open_ended = False
    for word in words:
        if joined and (word == "=" or open_ended):
            joined[-1] += word
        else:
            joined.append(word)
        open_ended = word == "="
    return joined


def complete_spec(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
    """The specs with a bare name, YAML files and folders; any file if none of these begins so."""
    from click.shell_completion import CompletionItem

    try:
        known = reader_of(context).present.specs.files
    except Exception:  # the command says what is wrong
        known = {}
    names = [name for name in known if name.startswith(incomplete)]
    return [*names, *_files(incomplete)] or [CompletionItem(incomplete, type="file")]


def _files(incomplete: str) -> list[str]:
    """The YAML files and the folders that begin so; what is in a folder if it is the only one."""
    folder, part = os.path.split(incomplete)
    try:
        entries = [entry for entry in os.scandir(folder or ".") if entry.name.startswith(part)]
    except OSError:
        return []
    entries = [entry for entry in entries if part or not entry.name.startswith(".")]
    folders = sorted(os.path.join(folder, one.name, "") for one in entries if os.path.isdir(one.path))
    files = sorted(os.path.join(folder, one.name) for one in entries if one.name.endswith((".yaml", ".yml")))
    inside = _files(folders[0]) if len(folders) == 1 and not files else []
    return inside or [*files, *folders]


def complete_change(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The paths of the spec on the command line; after `=` the words that a value can be."""
    given = context.params
    named = [given.get(name) for name in ("spec", "specs", "before", "a")]
    spec = next((word[0] if isinstance(word, tuple) else word for word in [*named, *context.args] if word), None)
    if spec is None:
        return []
    from tfkit.console.changes import changes
    from tfkit.graph.expand import expand
    from tfkit.spec.load import read_spec

    for sets in (given.get("sets") or (), ()):  # a change may need the one that is being written
        try:
            plugins = reader_of(context).found
            graph = expand(read_spec(spec, plugins, sets=sets))
        except Exception:  # the command says what is wrong
            continue
        return changes(graph, plugins, incomplete)
    return []


def complete_slot(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The slots of components; after a slot, its kinds."""
    try:
        registry = reader_of(context).found.registry
    except Exception:  # the command says what is wrong
        return []
    slot = context.params.get("slot")
    return [word for word in (registry.kinds(slot) if slot else registry.slots()) if word.startswith(incomplete)]


def reader_of(context: click.Context) -> Reader:
    """The plugins that the options on the command line ask for."""
    from tfkit.console.reader import Reader

    given = context.params
    return Reader((), given.get("plugin_dir") or (), bool(given.get("no_plugins")), given.get("disable") or ())
