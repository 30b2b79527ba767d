"""Options that commands share: for reading a spec, its weights, and for the form of the result."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from tfkit.arguments import DTYPES
from tfkit.console.completion import complete_change
from tfkit.errors import Diagnostic

if TYPE_CHECKING:
    import torch

    from tfkit.errors import Diagnostic
    from tfkit.graph.expand import Graph
    from tfkit.plugin.manager import Available, BrokenPlugin, Plugins

Decorator: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True)
class Reader:
    """The way to read specs: the plugins, and the changes."""

    sets: tuple[str, ...] = ()
    plugin_dir: tuple[Path, ...] = ()
    no_plugins: bool = False
    disable: tuple[str, ...] = ()

    @functools.cached_property
    def plugins(self) -> Plugins:
        """The plugins; broken ones are named on standard error."""
        _say_broken(self.found.broken)
        return self.found

    @functools.cached_property
    def found(self) -> Plugins:
        """The plugins, without a message about broken ones."""
        from tfkit.plugin.manager import load_plugins

        return load_plugins(plugin_dirs=self.plugin_dir, entry_points=not self.no_plugins, disabled=self.disable)

    @functools.cached_property
    def available(self) -> Available:
        """The plugins and their specs, none of which is loaded; broken ones are named on standard error."""
        _say_broken(self.present.broken)
        return self.present

    @functools.cached_property
    def present(self) -> Available:
        """The plugins and their specs, without a message about broken ones."""
        from tfkit.plugin.manager import available

        return available(plugin_dirs=self.plugin_dir, entry_points=not self.no_plugins, disabled=self.disable)

    def load(self, spec: str) -> Graph:
        """The graph of a spec; its notes go to standard error."""
        from tfkit.graph.expand import expand
        from tfkit.spec.load import is_folder, read_spec

        if os.path.exists(os.path.join(spec, "spec.yaml")) and not is_folder(spec, self.plugins.specs):
            click.echo(f"warning: `{spec}` is the spec that comes with tfkit; the folder is ./{spec}", err=True)
        read = read_spec(spec, self.plugins, sets=self.sets)
        warn(read.notes)
        return expand(read)

    def weights(self, spec: str, given: Path | None, *, allow_change: bool = False) -> Path | None:
        """The weights given to a command, or those in the folder that the spec is; None for random ones."""
        from tfkit.spec.load import weights_beside

        found = given if given is not None else weights_beside(spec, self.plugins.specs)
        if found is None and allow_change:
            raise click.UsageError("--allow-change has no effect without weights")
        return found


def warn(diagnostics: Iterable[Diagnostic]) -> None:
    """Print warnings on standard error."""
    for one in diagnostics:
        click.echo(f"{one.render('warning')}\n", err=True)


def _say_broken(broken: Iterable[BrokenPlugin]) -> None:
    for one in broken:
        message, place = f"plugin `{one.name}` is left out: {one.cause}", (one.where,) if one.where else ()
        warn([Diagnostic(message, notes=place, help=f"--disable {one.name} hides this")])


def device_of(name: str) -> torch.device:
    """The device of that name; wrong usage if it is not available."""
    from tfkit import placement

    try:
        return placement.device_of(name)
    except ValueError as wrong:
        raise click.BadParameter(str(wrong), param_hint="--device") from None


def weights_option(help: str) -> Decorator:
    """The option `--weights`; `help` says what it does here."""
    return click.option("--weights", metavar="PATH", type=click.Path(path_type=Path), help=help)


def dtype_option(help: str, *, default: str | None = None) -> Decorator:
    """The option `--dtype`."""
    kinds = click.Choice(DTYPES)
    return click.option("--dtype", type=kinds, default=default, show_default=True, metavar="TYPE", help=help)


def seed_option(help: str) -> Decorator:
    """The option `--seed`."""
    return click.option("--seed", default=0, show_default=True, type=click.IntRange(0), metavar="N", help=help)


batch_option = click.option(
    "--batch", default=1, show_default=True, type=click.IntRange(1), metavar="N", help="Sequences."
)
by_option = click.option(
    "--by",
    default="component",
    show_default=True,
    type=click.Choice(["component", "node", "layer"]),
    metavar="PART",
    help="Rows: component, node or layer.",
)
allow_change_option = click.option(
    "--allow-change", is_flag=True, help="Accept weights saved with other values of the spec."
)
json_option = click.option("--json", is_flag=True, help="Print the result as JSON.")
_FOLDER = click.Path(exists=True, path_type=Path)
SETS = [
    click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="PATH=VALUE",
        shell_complete=complete_change,
        help="Change a value of the spec; repeatable.",
    ),
]
PLUGINS = [
    click.option(
        "--plugin-dir", multiple=True, type=_FOLDER, metavar="DIR", help="Load the plugins in a folder; repeatable."
    ),
    click.option("--no-plugins", is_flag=True, help="Leave out plugins installed or in TFKIT_PLUGIN_DIR."),
    click.option("--disable", multiple=True, metavar="NAME", help="Leave out a plugin by its name; repeatable."),
]
