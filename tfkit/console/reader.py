"""The reading of specs by commands: their plugins, and the changes of `--set`."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tfkit.errors import Diagnostic

if TYPE_CHECKING:
    from tfkit.graph.expand import Graph
    from tfkit.plugin.manager import Available, BrokenPlugin, Plugins


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

    @property
    def options(self) -> list[str]:
        """The options of a command that give this reader."""
        values = {"set": self.sets, "plugin-dir": self.plugin_dir, "disable": self.disable}
        chosen = [f"--{name}={value}" for name, values in values.items() for value in values]
        return [*chosen, *(["--no-plugins"] if self.no_plugins else [])]

    def load(self, spec: str) -> Graph:
        """Load the graph of a spec, with the weights of its folder; its notes go to standard error."""
        from tfkit.graph.expand import expand
        from tfkit.spec.extending import is_folder, weights_beside
        from tfkit.spec.load import read_spec

        if os.path.exists(os.path.join(spec, "spec.yaml")) and not is_folder(spec, self.plugins.specs):
            click.echo(f"warning: `{spec}` is the spec that comes with tfkit; the folder is ./{spec}", err=True)
        read = read_spec(spec, self.plugins, sets=self.sets)
        warn(read.notes)
        return replace(expand(read), weights=weights_beside(spec, self.plugins.specs))

    def weights(self, spec: str, path: Path | None, *, allow_change: bool = False) -> Path | None:
        """Return the weights of `--weights`, else of the spec folder; None if the weights are random."""
        from tfkit.spec.extending import weights_beside
        from tfkit.spec.folder import model_folder

        weights = weights_beside(spec, self.plugins.specs) if path is None else model_folder(path)
        if weights is None and allow_change:
            raise click.UsageError("--allow-change has no effect without weights")
        return weights


def warn(diagnostics: Iterable[Diagnostic]) -> None:
    """Print warnings on standard error."""
    for diagnostic in diagnostics:
        click.echo(f"{diagnostic.render('warning')}\n", err=True)


def _say_broken(broken: Iterable[BrokenPlugin]) -> None:
    for plugin in broken:
        message, place = f"plugin `{plugin.name}` is left out: {plugin.cause}", (plugin.where,) if plugin.where else ()
        warn([Diagnostic(message, notes=place, help=f"--disable {plugin.name} hides this")])
