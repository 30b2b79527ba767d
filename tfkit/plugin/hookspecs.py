"""The hooks that a plugin may implement: one documented function for each, and the two pluggy markers for them.

A hook is a function of that name, marked with `@tfkit.hookimpl`, in a module that the plugin names in its entry point
(or in the file that it is). It may take fewer arguments than are listed here, and no others; later versions of tfkit
may add arguments, and take none away. Every hook is optional, but a plugin that runs code has one at least; a marked
function of another name is an error that names the nearest hook.

A hook that raises, or returns something else than it should, harms only its own plugin: what it gives is left out, and
one message names the plugin, the hook, and the file and line. Two plugins that bring the same thing (a kind, a spec, a
format or its suffix, a command) are an error that names both; nothing wins silently.

| hook | when it is called | entry point |
|---|---|---|
| `tfkit_register` | when the plugins are loaded | `[project.entry-points.tfkit]` |
| `tfkit_specs` | when the plugins are loaded | the same; better: `[project.entry-points."tfkit.specs"]`, without code |
| `tfkit_export_formats` | when a model is exported | `[project.entry-points.tfkit]` |
| `tfkit_checks` | by `tfkit validate`, `build` and `train`, for each spec | the same |
| `tfkit_properties` | by `tfkit check`, and the tests of `tfkit.testing` | the same |
| `tfkit_reference` | by `tfkit check`, and the tests of `tfkit.testing` | the same |
| `tfkit_command` | when the command runs | `[project.entry-points."tfkit.commands"]` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

from tfkit.component import Component
from tfkit.errors import Diagnostic

if TYPE_CHECKING:
    import click

    import tfkit

PROJECT = "tfkit"
CONTRACT = 1
"""The version of the contract with plugins: the hooks, and the base classes of components. It is raised when a plugin
that follows the contract must change; stability.md says when."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's function as a hook."""


class Register(Protocol):
    """The argument of `tfkit_register`; it knows the plugin that it was given to."""

    def __call__(self, config: type[Component], /) -> None:
        """Add the component; raises `TypeError` if the class is not a proper config."""


@hookspec
def tfkit_register(register: Register) -> None:
    """Register the components of the plugin.

    Called once for each call of `tfkit.load_plugins`. If it fails, the whole plugin is left out.

    Args:
        register: takes the config class of one component.

    Example:
        @tfkit.hookimpl
        def tfkit_register(register: tfkit.Register) -> None:
            register(DoubleGeluConfig)
    """


@hookspec
def tfkit_specs() -> Path | Iterable[Path]:  # type: ignore[empty-body]
    """Return the folder, or several, with the specs of the plugin: files `NAME.yaml`.

    Their names work wherever the names of tfkit's own specs do, also in `extends`. A spec with a `checkpoint` section
    brings a family: `tfkit import` finds it by its `model_type`.

    A distribution, or a project in a plugin folder, does not need this hook. It names a folder inside its package as an
    entry point, which is read without running any code, so that `tfkit list` finds the specs as well:

        [project.entry-points."tfkit.specs"]
        mine = "tfkit_mine.specs"                 # the folder tfkit_mine/specs of the wheel

    The hook is for a plugin that is a single file, or that decides at run time; `tfkit list`, which runs no plugin,
    does not have its specs. Called once for each call of `tfkit.load_plugins`. If it fails, or returns anything but
    paths of folders that hold specs, the whole plugin is left out.

    Example:
        @tfkit.hookimpl
        def tfkit_specs() -> Path:
            return Path(__file__).parent / "specs"
    """


@hookspec
def tfkit_export_formats() -> Iterable[type[tfkit.Format]]:  # type: ignore[empty-body]
    """Return the formats of `tfkit export` in the plugin: subclasses of `tfkit.Format`.

    Called when a model is exported, and for `tfkit export --formats`. So the modules of the formats, and what they
    depend on, are imported inside the function. If it fails, or returns anything else, the plugin's formats are left
    out with a warning. The built-in formats come in through this hook.

    Example:
        @tfkit.hookimpl
        def tfkit_export_formats() -> list[type[tfkit.Format]]:
            from tfkit_mine.numpy_format import Npz

            return [Npz]
    """


@hookspec
def tfkit_checks(graph: tfkit.Graph) -> Iterable[Diagnostic]:  # type: ignore[empty-body]
    """Return warnings about a model: values that are valid, but slow or probably unintended.

    Values that cannot work are errors, which the `check` of a config raises. Called by `tfkit validate`,
    `tfkit build` and `tfkit train` for every spec without errors, before any tensor exists. A hook that fails, or
    returns anything but `tfkit.Diagnostic`, is reported as a warning. The location of a diagnostic with a `path`, and
    the name of the plugin, are added.

    Args:
        graph: the spec, read and expanded. `graph.configs(MineConfig)` has all configs of a class by their paths.

    Example:
        @tfkit.hookimpl
        def tfkit_checks(graph: tfkit.Graph) -> Iterator[tfkit.Diagnostic]:
            for path, config in graph.configs(MineConfig):
                if config.d_ff % 64:
                    yield tfkit.Diagnostic("widths other than multiples of 64 are slow", path=f"{path}.d_ff")
    """


@hookspec
def tfkit_properties() -> Iterable[tfkit.Property]:  # type: ignore[empty-body]
    """Return properties that models have, to be measured by `tfkit check` and by the tests of `tfkit.testing`.

    They come after tfkit's own. One that says nothing about a model raises `tfkit.DoesNotApplyError`. Called when a
    model is checked, so the modules of the properties are imported inside the function. If it fails, or returns
    anything else, the plugin's properties are left out with a warning.

    Example:
        @tfkit.hookimpl
        def tfkit_properties() -> list[tfkit.Property]:
            from tfkit_mine.properties import order_of_experts

            return [tfkit.Property("expert-order", "is unchanged with experts reordered", order_of_experts)]
    """


@hookspec
def tfkit_reference() -> Mapping[str, Mapping[str, Callable[..., Any]]]:  # type: ignore[empty-body]
    """Return functions in NumPy that define what kinds of the plugin compute, by slot and kind.

    `help(tfkit.reference)` lists the arguments of each slot. The property `meaning` of `tfkit check` compares every
    model with them, and the properties `schedule`, `optimizer` and `loss` every run (`help(tfkit.reference.training)`).
    Called when a model is checked, so the module of the functions is imported inside the function. If it fails, or
    returns anything else, `meaning` fails with the reason.

    Example:
        @tfkit.hookimpl
        def tfkit_reference() -> dict[str, dict[str, Callable[..., Any]]]:
            from tfkit_mine import reference

            return {"ffn": {"mine": reference.mine}}
    """


@hookspec
def tfkit_command() -> click.Command:  # type: ignore[empty-body]
    """Return a command: it runs as `tfkit NAME`.

    The module with this hook, one for each command, is named in an entry point of a separate group, and the entry point
    has the name of the command:

        [project.entry-points."tfkit.commands"]
        mine = "tfkit_mine.command"

    `tfkit --help` lists it with the first line of the module's docstring, and runs no plugin for that: the line is read
    from the source. The module is imported when the command runs. If it fails, or returns anything else, the
    command ends with one error; all others work. `tfkit.command` makes a command that reads specs as tfkit's own do.

    Example:
        '''Count the layers of a spec.'''

        @tfkit.command("count", examples="tfkit count gpt2")
        @click.argument("spec")
        def count(reader, spec: str) -> None:
            click.echo(reader.load(spec).node("decoder").config.n_layers)

        @tfkit.hookimpl
        def tfkit_command() -> click.Command:
            return count
    """
