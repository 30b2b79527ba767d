"""The hooks that a plugin may implement: a documented function for each, and the two pluggy markers for them.

To implement a hook, define a function of its name and mark it with `@tfkit.hookimpl`. The function belongs in a module
that the plugin names in an entry point, or in the file of a plugin that is a single file. It may omit arguments that
are listed here, but cannot add any. Later versions of tfkit may add arguments, but remove none. Every hook is optional,
but a plugin that runs code implements at least one. A marked function of any other name is an error, which names the
hook with the most similar name.

A hook that raises, or returns a value of the wrong type, affects only its plugin: tfkit omits the result, and a message
names the plugin, the hook, the file and the line. A failure of `tfkit_spec_loaded` or `tfkit_model_built` is an error.
If two plugins define the same name (of a kind, a spec, a format, a suffix, a layout or a command), an error names both
plugins; neither silently replaces the other. Hooks are called in pluggy's order: last loaded, first called, except for
`tryfirst`, `trylast` and wrappers.

| hook | when it is called | entry point |
|---|---|---|
| `tfkit_register` | when the plugins are loaded | `[project.entry-points.tfkit]` |
| `tfkit_specs` | when the plugins are loaded | the same; better: `[project.entry-points."tfkit.specs"]`, without code |
| `tfkit_documents` | when a command reads a file | the same; names: `[project.entry-points."tfkit.documents"]` |
| `tfkit_export_formats` | when a model is exported | `[project.entry-points.tfkit]` |
| `tfkit_save_layouts` | when a model is saved | the same |
| `tfkit_spec_loaded`, `tfkit_model_built` | for each loaded spec, for each built model | the same |
| `tfkit_checks` | by `tfkit validate`, `build` and `train`, for each spec | the same |
| `tfkit_properties` | by `tfkit check`, and the tests of `tfkit.testing` | the same |
| `tfkit_reference` | by `tfkit check`, and the tests of `tfkit.testing` | the same |

Commands need no hook: an entry point in the group `tfkit.commands` names each (`plugin/commands.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

from tfkit.component import Component
from tfkit.errors import Diagnostic

if TYPE_CHECKING:
    from torch import fx

    import tfkit

PROJECT = "tfkit"
CONTRACT = 1
"""Version of the contract with plugins: the hooks, and the base classes of components. It increases when plugins that
follow the contract must change; see stability.md."""

SEPARATE = ("tfkit_register", "tfkit_specs")
"""Hooks that tfkit calls for one plugin at a time, so an order or a wrapper would have no effect."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Decorator that marks a function of a plugin as a hook."""


class Register(Protocol):
    """The argument of `tfkit_register`: a function that registers components under the name of the plugin."""

    def __call__(self, config: type[Component], /) -> None:
        """Register a component. Raise `TypeError` if the class is not a valid config."""


@hookspec
def tfkit_register(register: Register) -> None:
    """Register the components of the plugin.

    Called once for each call of `tfkit.load_plugins`. If it fails, the entire plugin is omitted.

    Args:
        register: a function to call with the config class of each component.

    Example:
        @tfkit.hookimpl
        def tfkit_register(register: tfkit.Register) -> None:
            register(DoubleGeluConfig)
    """


@hookspec
def tfkit_specs() -> Path | Iterable[Path]:  # type: ignore[empty-body]
    """Return the folder, or several folders, with the specs of the plugin: files `NAME.yaml`.

    Their names work wherever the names of tfkit's specs do, including `extends`. A spec with a `checkpoint` section
    defines a family, which `tfkit import` finds by its `model_type`.

    A distribution, or a project in a plugin folder, does not need this hook. It names a folder inside its package as an
    entry point. tfkit reads entry points without running code, so `tfkit list` also finds these specs:

        [project.entry-points."tfkit.specs"]
        mine = "tfkit_mine.specs"                 # the folder tfkit_mine/specs of the wheel

    The hook is for a plugin that is a single file, or that chooses its folders at run time. `tfkit list` runs no plugin
    and therefore does not list such specs. Called once for each call of `tfkit.load_plugins`. If it fails, or returns
    anything but paths of folders that contain specs, the entire plugin is omitted.

    Example:
        @tfkit.hookimpl
        def tfkit_specs() -> Path:
            return Path(__file__).parent / "specs"
    """


@hookspec
def tfkit_documents() -> Iterable[tfkit.DocumentType]:  # type: ignore[empty-body]
    """Return types of document: YAML files with fields of their type, and under the key `model` a spec.

    Commands that take a spec also take such a file and use its model. `tfkit validate` checks the file, and
    `tfkit schema TYPE` prints the schema of the type. The fields are in a subclass of `tfkit.Document`. A subclass of
    `tfkit.DocumentType` overrides how the model is read, what is checked, and the text that `tfkit new TYPE SPEC`
    writes. If the documents of a type contain no model, commands only report which command takes them.

    Documents that come with the plugin have names if the plugin declares their folder. tfkit reads the entry point
    without running code, for `tfkit list` and for completion. The entry point has the name of the type, and the word
    after the colon is the command that takes the documents. A plugin may declare documents of a type that a different
    plugin registers, such as runs:

        [project.entry-points."tfkit.documents"]
        survey = "tfkit_mine.surveys:ask"         # the folder tfkit_mine/surveys of the wheel; `tfkit ask NAME`

    Called when a command reads a file that is not known to be a spec. If it fails, or returns anything else, the types
    of the plugin are omitted with a warning. The built-in runs and sweeps also use this hook.

    Example:
        class Survey(tfkit.Document):
            sort, command, typical = "survey", "ask", ("model", "questions")
            further_keys = ("model",)

            questions: tuple[str, ...]

        @tfkit.hookimpl
        def tfkit_documents() -> list[tfkit.DocumentType]:
            return [tfkit.DocumentType(Survey)]
    """


@hookspec
def tfkit_export_formats() -> Iterable[type[tfkit.Format]]:  # type: ignore[empty-body]
    """Return the formats of `tfkit export` in the plugin: subclasses of `tfkit.Format`.

    Called when a model is exported, and for `tfkit export --formats`. Import the modules of the formats inside the
    function, so that only these commands import them and their dependencies. If it fails, or returns anything else, the
    plugin's formats are omitted with a warning. The built-in formats also use this hook.

    Example:
        @tfkit.hookimpl
        def tfkit_export_formats() -> list[type[tfkit.Format]]:
            from tfkit_mine.numpy_format import Npz

            return [Npz]
    """


@hookspec
def tfkit_save_layouts() -> Iterable[type[tfkit.Layout]]:  # type: ignore[empty-body]
    """Return the layouts of `tfkit save` in the plugin: subclasses of `tfkit.Layout`.

    Called when a model is saved. Import the modules of the layouts inside the function, so that only `tfkit save`,
    `tfkit build` and `tfkit.save` import them and their dependencies. If it fails, or returns anything else, the
    plugin's layouts are omitted with a warning. The built-in layouts also use this hook.

    Example:
        @tfkit.hookimpl
        def tfkit_save_layouts() -> list[type[tfkit.Layout]]:
            from tfkit_mine.array_layout import Arrays

            return [Arrays]
    """


@hookspec
def tfkit_spec_loaded(graph: tfkit.Graph) -> None:
    """Observe a spec without errors, or reject it: raise `tfkit.Invalid(path, message)` or `tfkit.SpecError`.

    Called once for each spec that `tfkit.load`, `tfkit.loads` or a command reads, and for the model of a run. A plugin
    cannot change a spec, because its text describes the model. A returned value is an error.

    Example:
        @tfkit.hookimpl
        def tfkit_spec_loaded(graph: tfkit.Graph) -> None:
            for path, norm in graph.configs(tfkit.NormConfig):
                if norm.kind_name() != "rmsnorm":
                    raise tfkit.Invalid(path, "our models must have RMSNorm")
    """


@hookspec
def tfkit_model_built(model: fx.GraphModule, graph: tfkit.Graph) -> None:
    """Change a model in place, and return nothing: register forward hooks, freeze parameters, replace modules.

    Called once for each model that `tfkit.build` returns, or that the commands `build`, `generate`, `train` and `eval`
    run; not for models with which tools count, check, compare or export. Forward hooks must return None. In a run, a
    plugin must not replace modules or freeze parameters: results depend on the file of a run alone.

    Example:
        @tfkit.hookimpl
        def tfkit_model_built(model: fx.GraphModule) -> None:
            for path in model.meta["components"]:
                model.get_submodule(path).register_forward_hook(partial(record, path))
    """


@hookspec
def tfkit_checks(graph: tfkit.Graph) -> Iterable[Diagnostic]:  # type: ignore[empty-body]
    """Return warnings about a model: values that are valid, but slow or probably unintended.

    Values that cannot work are errors, which the `check` of a config raises. Called by `tfkit validate`,
    `tfkit build` and `tfkit train` for every spec without errors, before any tensor exists. A hook that fails, or
    returns anything but `tfkit.Diagnostic`, is reported as a warning. The location of a diagnostic with a `path`, and
    the name of the plugin, are added.

    Args:
        graph: the spec, read and expanded. `graph.configs(MineConfig)` yields all configs of a class with their paths.

    Example:
        @tfkit.hookimpl
        def tfkit_checks(graph: tfkit.Graph) -> Iterator[tfkit.Diagnostic]:
            for path, config in graph.configs(MineConfig):
                if config.d_ff % 64:
                    yield tfkit.Diagnostic("widths other than multiples of 64 are slow", path=f"{path}.d_ff")
    """


@hookspec
def tfkit_properties() -> Iterable[tfkit.Property | tfkit.SubjectType]:  # type: ignore[empty-body]
    """Return properties that models have, to be measured by `tfkit check` and by the tests of `tfkit.testing`.

    They follow tfkit's properties. A property that does not apply to a model raises `tfkit.DoesNotApplyError`. Called
    when a model is checked: import the modules of the properties inside the function. If it fails, or returns anything
    else, the plugin's properties are omitted with a warning.

    A property whose `of` is `run` measures a run. A plugin can also return a `tfkit.SubjectType`, which reads another
    type of subject. The properties of runs use this hook.

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
    Called when a model is checked: import the module of these functions inside the hook. If it fails, or returns
    anything else, `meaning` fails with the reason.

    Example:
        @tfkit.hookimpl
        def tfkit_reference() -> dict[str, dict[str, Callable[..., Any]]]:
            from tfkit_mine import reference

            return {"ffn": {"mine": reference.mine}}
    """
