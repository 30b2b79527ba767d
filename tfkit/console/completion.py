"""Completion in a shell, `eval "$(_TFKIT_COMPLETE=bash_source tfkit)"`.

Nothing but completions is printed. If a plugin cannot be read, there are no completions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from tfkit.console.commands import Reader
    from tfkit.plugin.known_specs import NamedSpecs

VARIABLE = "_TFKIT_COMPLETE"
"""The environment variable in which a shell asks for completions."""


def run_completion(cli: click.Command, instruction: str) -> int:
    """Print the script of a shell (`bash_source`) or its completions, and return the exit status."""
    from click.shell_completion import shell_complete

    if shell_complete(cli, {}, "tfkit", VARIABLE, instruction) == 0:
        return 0
    click.echo(f"error: {VARIABLE} must be bash_source, zsh_source or fish_source; got `{instruction}`", err=True)
    return 2


def complete_spec(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
    """Return the specs, named documents with a model, YAML files and folders that begin with `incomplete`."""
    specs = _specs_of(context)
    documents = [name for named in specs.documents.values() for name in named.with_model(incomplete)]
    return _completion_items([*specs.files, *documents], incomplete)


def complete_document(sort: str) -> Callable[[click.Context, click.Parameter, str], list[Any]]:
    """Return the completion of an argument that is a document of a type: its names, YAML files and folders."""

    def completed(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
        return _completion_items(_specs_of(context).files_of(sort), incomplete)

    return completed


def complete_type(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the types of the named documents that contain a model."""
    types = [sort for sort, named in _specs_of(context).documents.items() if named.with_model("")]
    return [sort for sort in types if sort.startswith(incomplete)]


def _specs_of(context: click.Context) -> NamedSpecs:
    """Return the specs and documents that a name refers to, without running plugins; none if there is an error."""
    from tfkit.plugin.known_specs import NamedSpecs

    try:
        return reader_of(context).present.specs
    except Exception:  # the command reports the error
        return NamedSpecs({}, {}, {})


def _completion_items(names: Iterable[str], incomplete: str) -> list[Any]:
    """Return the names, files and folders that begin with `incomplete`; without any, let the shell complete files."""
    from click.shell_completion import CompletionItem

    matches = [*(name for name in names if name.startswith(incomplete)), *_matching_files(incomplete)]
    return matches or [CompletionItem(incomplete, type="file")]


def _matching_files(incomplete: str) -> list[str]:
    """Return the YAML files and folders that begin with `incomplete`; of a single matching folder, the contents."""
    folder, part = os.path.split(incomplete)
    try:
        entries = [entry for entry in os.scandir(folder or ".") if entry.name.startswith(part)]
    except OSError:
        return []
    entries = [entry for entry in entries if part or not entry.name.startswith(".")]
    folders = sorted(os.path.join(folder, entry.name, "") for entry in entries if os.path.isdir(entry.path))
    files = sorted(os.path.join(folder, entry.name) for entry in entries if entry.name.endswith((".yaml", ".yml")))
    inside = _matching_files(folders[0]) if len(folders) == 1 and not files else []
    return inside or [*files, *folders]


def complete_slot(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the slots of components or, after a slot, its kinds."""
    try:
        registry = reader_of(context).loaded.registry
    except Exception:  # the command reports the error
        return []
    slot = context.params.get("slot")
    return [word for word in (registry.kinds(slot) if slot else registry.slots()) if word.startswith(incomplete)]


def reader_of(context: click.Context) -> Reader:
    """Return a reader with the plugin options of the command line."""
    from tfkit.console.commands import Reader

    options = context.params
    return Reader((), options.get("plugin_dir") or (), bool(options.get("no_plugins")))
