"""The common base of the commands: options for reading a spec, the form of help texts, and errors."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfkit.errors import SpecError, closest

if TYPE_CHECKING:
    from tfkit.graph.expand import Graph
    from tfkit.plugin.manager import Available, BrokenPlugin, Plugins

Function = Callable[..., Any]


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
        _warn(self.found.broken)
        return self.found

    @functools.cached_property
    def found(self) -> Plugins:
        """The plugins, without a message about broken ones."""
        from tfkit.plugin.manager import load_plugins

        return load_plugins(plugin_dirs=self.plugin_dir, entry_points=not self.no_plugins, disabled=self.disable)

    @functools.cached_property
    def available(self) -> Available:
        """The plugins and their specs; none is loaded."""
        from tfkit.plugin.manager import available

        found = available(plugin_dirs=self.plugin_dir, entry_points=not self.no_plugins, disabled=self.disable)
        _warn(found.broken)
        return found

    def load(self, spec: str) -> Graph:
        """The graph of a spec; its notes go to standard error."""
        from tfkit.graph.expand import expand
        from tfkit.spec.load import is_folder, read_spec

        if os.path.exists(os.path.join(spec, "spec.yaml")) and not is_folder(spec, self.plugins.specs):
            click.echo(f"warning: `{spec}` is the spec that comes with tfkit; the folder is ./{spec}", err=True)
        read = read_spec(spec, self.plugins, sets=self.sets)
        for note in read.notes:
            click.echo(f"{note.render('warning')}\n", err=True)
        return expand(read)

    def weights(self, spec: str, given: Path | None, *, allow_change: bool = False) -> Path | None:
        """The weights given to a command, or those in the folder that the spec is; None for random ones."""
        from tfkit.spec.load import weights_beside

        found = given if given is not None else weights_beside(spec, self.plugins.specs)
        if found is None and allow_change:
            raise click.UsageError("--allow-change has no effect without weights")
        return found


def _warn(broken: Iterable[BrokenPlugin]) -> None:
    for one in broken:
        text = f"warning: plugin `{one.name}` is left out: {one.cause} (--disable {one.name} hides this)"
        click.echo(text, err=True)


class _Help:
    """Help with notes and examples below the options; the examples keep their lines."""

    def __init__(self, *args: Any, examples: str = "", notes: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = inspect.cleandoc(examples).splitlines()
        self.notes = inspect.cleandoc(notes)

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        if self.notes:
            formatter.write_paragraph()
            formatter.write(f"{self.notes}\n")
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"  {line}\n")


class Command(_Help, click.Command):
    """A command."""


class Group(_Help, click.Group):
    """The commands in sections; an unknown word is answered with the most similar one."""

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[click.Command]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections
        for command in [command for family in sections.values() for command in family]:
            self.add_command(command)

    def list_commands(self, context: click.Context) -> list[str]:
        return [str(command.name) for family in self.sections.values() for command in family]

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.list_commands(context)))
        for title, family in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([(str(one.name).ljust(width), one.get_short_help_str(80)) for one in family])

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(context, name) is None and not name.startswith("-"):
            near = closest(name, self.list_commands(context))
            known = ", ".join(self.list_commands(context))
            hint = f"; a command with a similar name exists: '{near}'" if near else f"; there are {known}"
            context.fail(f"there is no command '{name}'{hint}")
        return super().resolve_command(context, args)


def command(name: str, *, examples: str, notes: str = "", sets: bool = True) -> Callable[[Function], click.Command]:
    """A command whose function gets a `Reader` first, made from the options for reading a spec."""

    def decorate(function: Function) -> click.Command:
        @functools.wraps(function)
        def run(*args: Any, sets: tuple[str, ...] = (), **kwargs: Any) -> None:
            reader = Reader(sets, *(kwargs.pop(key) for key in ("plugin_dir", "no_plugins", "disable")))
            try:
                function(reader, *args, **kwargs)
            except SpecError as wrong:
                fail(wrong, json=kwargs.get("json", False))

        own = run.__dict__.pop("__click_params__", [])
        for option in reversed(_SETS + _PLUGINS if sets else _PLUGINS):
            option(run)
        run.__dict__["__click_params__"] += own
        return click.command(name, cls=Command, examples=examples, notes=notes)(run)

    return decorate


def fail(wrong: SpecError, *, json: bool) -> None:
    """Print the errors of a spec and end with status 1."""
    if json:
        from tfkit.cli.output import print_json

        print_json({"errors": [diagnostic.to_dict() for diagnostic in wrong.diagnostics]})
    else:
        click.echo(str(wrong), err=True)
    raise click.exceptions.Exit(1)


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
_SETS = [
    click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Change a value of the spec; repeatable."),
]
_PLUGINS = [
    click.option(
        "--plugin-dir", multiple=True, type=_FOLDER, metavar="DIR", help="Load the plugins in a folder; repeatable."
    ),
    click.option("--no-plugins", is_flag=True, help="Leave out plugins installed or in TFKIT_PLUGIN_DIR."),
    click.option("--disable", multiple=True, metavar="NAME", help="Leave out a plugin by its name; repeatable."),
]
