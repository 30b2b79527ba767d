"""Commands: their group, the reading of specs, the layout of help, and the printing of errors."""

from __future__ import annotations

import functools
import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tfkit.arguments import checked, hint_of
from tfkit.console.options import PLUGINS, SETS
from tfkit.errors import Diagnostic, SpecError, closest_name
from tfkit.plugin.commands import ORDER, SECTION, CommandEntry, built_in_commands, in_sections, plugin_commands

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from tfkit.building.edits import MeasuredModel
    from tfkit.graph.documents import DocumentType
    from tfkit.graph.expand import Graph
    from tfkit.plugin.manager import Available, BrokenPlugin, Plugins
    from tfkit.spec.document import Document
    from tfkit.spec.read_document import DocumentFile

    D = TypeVar("D", bound=Document)


Function = Callable[..., Any]


HELP_OPTIONS = ("-h", "--help")


class _Help:
    """Help with notes and examples below the options. Line breaks of examples are preserved."""

    def __init__(self, *args: Any, examples: str = "", notes: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = inspect.cleandoc(examples).splitlines()
        self.notes = inspect.cleandoc(notes)

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        # click keeps the help option of the first context, which may not be a child of a context of `tfkit`.
        return list(HELP_OPTIONS)

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        if self.notes:
            formatter.write_paragraph()
            formatter.write(f"{self.notes}\n")
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"  {line}\n")


class Command(_Help, click.Command):
    """A command. An option that takes one value refuses a second value, which would replace the first."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            try:
                _, _, parsed = self.make_parser(ctx).parse_args(list(args))
            except click.NoSuchOption as error:
                raise _with_hint(error, self, args) from None
            self._check_repeated(ctx, [param for param in parsed if isinstance(param, click.Option)])
        return super().parse_args(ctx, args)

    def _check_repeated(self, context: click.Context, options: list[click.Option]) -> None:
        """Raise UsageError if two options set the same value. A flag without a value may be repeated."""
        values: dict[str | None, list[click.Option]] = {}
        for option in options:
            if not option.multiple and not option.count:
                values.setdefault(option.name, []).append(option)
        for first, *more in values.values():
            if alternative := next((option for option in more if option is not first), None):
                context.fail(f"`{first.opts[-1]}` cannot be combined with `{alternative.opts[-1]}`")
            if more and not first.is_flag:
                context.fail(f"`{first.opts[-1]}` takes one value; got {len(more) + 1}")


class HintedError(click.UsageError):
    """An error of wrong usage whose help is not the help of the command."""

    def __init__(self, message: str, context: click.Context | None, help: str) -> None:
        super().__init__(message, context)
        self.help = help


def _with_hint(error: click.NoSuchOption, command: click.Command, args: Sequence[str]) -> click.UsageError:
    """Return the error for an unknown option with help, if it is a key of the document that the command takes."""
    option, name = error.option_name, str(command.name)
    help = hint_of(name, option)
    if help is None and any(param.name == "sets" for param in command.params):
        following = next((args[i + 1] for i, word in enumerate(args[:-1]) if word == option), "VALUE")
        value = next((word.partition("=")[2] for word in args if word.startswith(f"{option}=")), following)
        paths = _paths_of_key(name, option.removeprefix("--").replace("-", "_"))
        changes = [shlex.join(["--set", f"{path}={value}"]) for path in paths]
        help = f"set the value by its path: {' or '.join(f'`{change}`' for change in changes)}" if changes else None
    return error if help is None else HintedError(error.message, error.ctx, help)


def _paths_of_key(command: str, key: str) -> list[str]:
    """Return the paths, for `--set`, of a key in the type of document that a command takes, by default a spec."""
    from tfkit.component import Component
    from tfkit.graph.documents import document_types
    from tfkit.plugin.manager import load_plugins
    from tfkit.spec.annotations import shape_of
    from tfkit.spec.document import MODEL
    from tfkit.spec.model_spec import ModelSpec

    plugins = load_plugins(entry_points=False)
    types = [item.config for item in document_types(plugins)[0].values()]
    document: type[Document] = next((item for item in types if item.command == command), ModelSpec)
    if document is not ModelSpec and MODEL not in document.further_keys:  # `--set` changes a different document
        return []
    if key in document.model_fields:
        return [key]
    paths = []
    for name, field in document.model_fields.items():
        shape = shape_of(field.annotation)
        if shape is not None and shape.container == "one":
            configs = [shape.config]
            if issubclass(shape.config, Component):
                configs = [kind.config for kind in plugins.registry.kinds(shape.config.slot).values()]
            paths += [f"{name}.{key}"] if any(key in config.model_fields for config in configs) else []
    if key in plugins.registry.shared_names():
        paths.append(key if document is ModelSpec else f"{MODEL}.{key}")
    return paths


class CommandGroup(_Help, click.Group):
    """Commands in sections, imported when they are used. The error for an unknown command names a similar command.

    Commands of plugins are listed with their plugin. A command of tfkit takes precedence over a plugin's of that name.
    """

    @functools.cached_property
    def built_in(self) -> Mapping[str, CommandEntry]:
        """The commands of tfkit itself."""
        return built_in_commands()

    def list_commands(self, context: click.Context) -> list[str]:
        return self._sorted_names(self._of_plugins())

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        return self.built_in[name].load() if name in self.built_in else None

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        commands = list(self.built_in.values())
        try:
            commands += self._of_plugins().values()
        except SpecError as error:  # help must not fail
            click.echo(str(error), err=True)
        width = max(len(command.name) for command in commands)
        for title, entries in in_sections(commands).items():
            with formatter.section(title):
                formatter.write_dl([(entry.name.ljust(width), self._description(entry)) for entry in entries])

    def _description(self, entry: CommandEntry) -> str:
        if entry is self.built_in.get(entry.name):
            return entry.declaration.summary
        summary = "hidden by tfkit's own command" if entry.name in self.built_in else entry.declaration.summary
        return f"{summary} ({entry.plugin})".strip()

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Return the commands and options that begin with `incomplete`, without importing a command."""
        from click.shell_completion import CompletionItem

        of_plugins: Mapping[str, CommandEntry] = {}
        with suppress(SpecError):  # the command reports the error
            of_plugins = self._of_plugins()
        commands = {**of_plugins, **self.built_in}
        names = [name for name in self._sorted_names(of_plugins) if name.startswith(incomplete)]
        options = click.Command.shell_complete(self, context, incomplete)
        return [*(CompletionItem(name, help=commands[name].declaration.summary) for name in names), *options]

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in self.built_in or name.startswith("-"):
            return super().resolve_command(context, args)
        of_plugins = self._of_plugins(args[1:])
        if name in of_plugins:
            return name, of_plugins[name].load(), args[1:]
        if context.resilient_parsing:
            return None, None, args[1:]
        names = self._sorted_names(of_plugins)
        near = closest_name(name, names)
        if help := hint_of("tfkit", name):
            raise HintedError(f"there is no command '{name}'", context, help)
        hint = f"; a command with a similar name exists: '{near}'" if near else f"; there are {', '.join(names)}"
        return context.fail(f"there is no command '{name}'{hint}")

    def _of_plugins(self, args: Sequence[str] = ()) -> Mapping[str, CommandEntry]:
        """Return the commands of the plugins that the options in `args` choose."""
        free = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
        options = click.Command(None, params=plugin_options(), context_settings=free)
        values = options.make_context("", list(args), resilient_parsing=True).params
        return plugin_commands(values["plugin_dir"] or (), not values["no_plugins"])

    def _sorted_names(self, of_plugins: Mapping[str, CommandEntry]) -> list[str]:
        """Return the names of all commands in the order of help."""
        sections = in_sections({**of_plugins, **self.built_in}.values())
        return [entry.name for entries in sections.values() for entry in entries]


def plugin_options() -> list[click.Parameter]:
    """Return the options that choose plugins."""

    def options() -> None: ...

    for option in reversed(PLUGINS):
        option(options)
    return list(reversed(options.__dict__["__click_params__"]))


@checked
def command(
    name: str, *, examples: str, section: str = SECTION, order: int = ORDER, notes: str = "", sets: bool = True
) -> Callable[[Function], click.Command]:
    """Declare a command whose function takes a `Reader` first, built from the options for reading a spec.

    Its help is the docstring of its module. `tfkit --help` reads `section` and `order` from the source, without an
    import, so they must be literals: the title of a section, and a number that sorts the commands within it.
    """

    def decorate(function: Function) -> click.Command:
        @functools.wraps(function)
        def run(*args: Any, sets: tuple[str, ...] = (), **kwargs: Any) -> None:
            reader = Reader(sets, *(kwargs.pop(key) for key in ("plugin_dir", "no_plugins")))
            try:
                function(reader, *args, **kwargs)
            except SpecError as error:
                exit_with_errors(error, json=kwargs.get("json", False), options=reader.plugin_options)

        options = run.__dict__.pop("__click_params__", [])
        for option in reversed(SETS + PLUGINS if sets else PLUGINS):
            option(run)
        run.__dict__["__click_params__"] += options
        help = sys.modules[function.__module__].__doc__
        return click.command(name, cls=Command, help=help, examples=examples, notes=notes)(run)

    return decorate


_COMMAND = re.compile(r"(?<=`)tfkit [a-z]+ [^`]*")


def exit_with_errors(error: SpecError, *, json: bool, options: Sequence[str] = ()) -> None:
    """Print the errors of a spec and end with status 1. The commands in their help get the `options`."""
    more = "".join(f" {shlex.quote(option)}" for option in options)
    helps = [_COMMAND.sub(lambda match: match[0] + more, diagnostic.help or "") for diagnostic in error.diagnostics]
    error = SpecError(*(replace(old, help=help or None) for old, help in zip(error.diagnostics, helps, strict=True)))
    if json:
        from tfkit.console.output import print_json

        print_json({"errors": [diagnostic.to_dict() for diagnostic in error.diagnostics]})
    else:
        click.echo(str(error), err=True)
    raise click.exceptions.Exit(1)


# ---- reading of specs by commands: plugins, and the changes of `--set` ----


@dataclass(frozen=True)
class Reader:
    """Reads specs with the plugins and the changes that the options of a command choose."""

    sets: tuple[str, ...] = ()
    plugin_dir: tuple[Path, ...] = ()
    no_plugins: bool = False

    @functools.cached_property
    def plugins(self) -> Plugins:
        """The plugins. Broken plugins are reported on standard error."""
        _say_broken(self.loaded.broken)
        return self.loaded

    @functools.cached_property
    def loaded(self) -> Plugins:
        """The plugins, without a report about broken plugins."""
        from tfkit.plugin.manager import load_plugins

        return load_plugins(plugin_dirs=self.plugin_dir, entry_points=not self.no_plugins)

    @functools.cached_property
    def available(self) -> Available:
        """The available plugins and specs, without loading them. Broken plugins are reported on standard error."""
        _say_broken(self.present.broken)
        return self.present

    @functools.cached_property
    def present(self) -> Available:
        """The available plugins and specs, without a report about broken plugins."""
        from tfkit.plugin.manager import available_plugins

        return available_plugins(plugin_dirs=self.plugin_dir, entry_points=not self.no_plugins)

    @property
    def options(self) -> list[str]:
        """Command-line options that recreate this reader."""
        return [*(f"--set={change}" for change in self.sets), *self.plugin_options]

    @property
    def plugin_options(self) -> list[str]:
        """Command-line options that choose the same plugins."""
        folders = [f"--plugin-dir={folder}" for folder in self.plugin_dir]
        return [*folders, *(["--no-plugins"] if self.no_plugins else [])]

    @functools.cached_property
    def document_types(self) -> Mapping[str, DocumentType]:
        """The types of document, by name, that plugins register. Hooks that fail are reported on standard error."""
        from tfkit.graph.documents import document_types

        types, faults = document_types(self.plugins)
        print_warnings(faults)
        return types

    def document_type(self, spec: str) -> DocumentType | None:
        """Return the type of a document with a model, such as a run; None for a model."""
        from tfkit.spec.extending import is_folder
        from tfkit.spec.read_document import is_document

        specs = self.plugins.specs
        if spec in specs.files or is_folder(spec, specs):
            return None
        types = [item for item in self.document_types.values() if item.has_model]
        return next((item for item in types if is_document(spec, item.config, specs)), None)

    def read(self, name: str, document: type[D]) -> DocumentFile[D]:
        """Read a document of a type by its path or name, with its model. Raises SpecError."""
        from tfkit.spec.read_document import read_document

        read = read_document(name, document, self.plugins, sets=self.sets)
        print_warnings(read.model.notes)
        return read

    def type_named(self, sort: str, *words: str) -> DocumentType:
        """Return a type of document with a model by its name. Raise UsageError, with `words`, if there is none."""
        types = {name: item for name, item in self.document_types.items() if item.has_model}
        if sort not in types:
            names = ", ".join(f"'{name}'" for name in (*words, *types))
            raise click.UsageError(
                f"'{sort}' is not one of {names}" if names else f"there is no type of document '{sort}'"
            )
        return types[sort]

    def sort_of(self, spec: str) -> str:
        """Return the name of the type of a file: `model`, or of a document with a model, such as `run`."""
        item = self.document_type(spec)
        return "model" if item is None else item.name

    def load(self, spec: str) -> Graph:
        """Load the graph of a spec, with the weights of its folder, or of the model of a document, such as a run.

        Notes go to standard error. For a document, the changes of `--set` use its paths, such as `model.d_model`.
        """
        from tfkit.graph.documents import graph_of
        from tfkit.graph.expand import announce_graph, expand
        from tfkit.spec.extending import is_folder, weights_beside
        from tfkit.spec.load import read_spec

        if os.path.exists(os.path.join(spec, "spec.yaml")) and not is_folder(spec, self.plugins.specs):
            click.echo(f"warning: `{spec}` is the spec that comes with tfkit; the folder is ./{spec}", err=True)
        if (document := self.document_type(spec)) is not None:
            model = document.model(spec, self.plugins, sets=self.sets)
            print_warnings(model.notes)
            return graph_of(model, self.plugins)
        read = read_spec(spec, self.plugins, sets=self.sets)
        print_warnings(read.notes)
        weights = weights_beside(spec, self.plugins.specs)
        return announce_graph(replace(expand(read), weights=weights), self.plugins)

    def load_trained(self, spec: str) -> MeasuredModel:
        """Load a model as `load` does; of a run with adapters, or of the folder of such a run, with the adapters.

        The changes of `--set` use the paths of the run if it has adapters.
        """
        from tfkit.building.edits import MeasuredModel
        from tfkit.spec.extending import is_folder
        from tfkit.spec.folder import RUN

        file = os.path.join(spec, RUN) if is_folder(spec, self.plugins.specs) else spec
        document = self.document_type(file)
        model = None if document is None else document.trained_model(file, self.plugins, sets=self.sets)
        if model is None:
            return MeasuredModel(self.load(spec))
        print_warnings(model.graph.spec.notes)
        return model

    def weights(self, spec: str, path: Path | None, *, allow_change: bool = False) -> Path | None:
        """Return the weights of `--weights`, else of the spec folder; None if the weights are random."""
        from tfkit.console.hub import local_path
        from tfkit.spec.extending import weights_beside
        from tfkit.spec.folder import model_folder

        weights = weights_beside(spec, self.plugins.specs) if path is None else model_folder(local_path(path))
        if weights is None and allow_change:
            raise click.UsageError("--allow-change has no effect without weights")
        return weights

    def warn_about(self, weights: Path, graph: Graph) -> None:
        """Print what the types of document report about weights, such as changes of code since their training."""
        for item in self.document_types.values():
            print_warnings(item.weight_warnings(weights, graph))


def print_warnings(diagnostics: Iterable[Diagnostic]) -> None:
    """Print warnings on standard error."""
    for diagnostic in diagnostics:
        click.echo(f"{diagnostic.render('warning')}\n", err=True)


def _say_broken(broken: Iterable[BrokenPlugin]) -> None:
    from tfkit.plugin.discover import DISABLE, normalized_name

    for plugin in broken:
        message, location = (
            f"plugin `{plugin.name}` is skipped: {plugin.cause}",
            (plugin.where,) if plugin.where else (),
        )
        print_warnings(
            [Diagnostic(message, notes=location, help=f"{DISABLE}={normalized_name(plugin.name)} hides this")]
        )
