"""The check of a component, and of a model: every broken promise in one error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from tfkit.arguments import checked
from tfkit.component import Component
from tfkit.graph.expand import AnySpec, Graph, load
from tfkit.plugin.manager import Plugins, load_plugins
from tfkit.plugin.registry import place_of
from tfkit.spec.messages import kind_of
from tfkit.tools.check.check import outcomes
from tfkit.tools.check.components import models_of
from tfkit.tools.check.known import properties_of
from tfkit.tools.check.measure import Level
from tfkit.tools.check.small import LAYOUTS, Layout, with_component
from tfkit.tools.check.subject import Subject


@checked
def check_component(
    component: Annotated[str | type[Component], "a kind or a config class"],
    *,
    slot: str | None = None,
    fields: Mapping[str, Any] | None = None,
    options: Mapping[str, Sequence[Any]] | None = None,
    within: Sequence[Layout] = LAYOUTS,
    plugins: Plugins | None = None,
    level: Level = "quick",
    only: Sequence[str] = (),
    reference: Callable[..., Any] | None = None,
) -> None:
    """Prove that a component keeps every promise that tfkit makes of a model, in small models around it.

    Args:
        component: its kind, or its config class, which need not be installed.
        slot: the slot that it fills; only with a kind. One of attention, mixer, ffn, norm, activation, position,
            rope_scaling and init; a block is checked by `check_model` with a spec of your own.
        fields: the other keys of a spec, besides `kind`. Required whole numbers, and fields with a name that the
            built-in components use (`activation`, `factor`), have small defaults; d_model is 16.
        options: several values for each of some further keys, `{"gate": [None, "silu"], "softcap": [None, 5.0]}`: every
            two of them meet in a model, unless the component refuses that.
        within: the models to build: `encoder`, `decoder`, and `memory`, which is a decoder with cross-attention.
        plugins: the plugins to look up a kind in; all installed ones unless given.
        level: `full` measures what takes seconds too: `torch.compile`, exports.
        only: names of properties; all of that level unless given.
        reference: a function in NumPy that says what the component computes, as `tfkit.reference` describes it.

    Raises:
        AssertionError: promises are broken; the message lists all of them, each with the models that show it.
        SpecError: the component refuses its fields or the place.
        TypeError: the class is not a proper config.
        ValueError: there is no such kind or slot, or no small model for it.
    """
    plugins = plugins or load_plugins()
    if not isinstance(component, str):
        plugins = with_component(plugins, component)
        slot, component = component.slot, component.kind_name()
    if slot is None:
        raise ValueError(f"a kind fills a slot: give `slot`, one of {', '.join(plugins.registry.slots())}")
    registered = plugins.registry.find(slot, component)
    if registered is None:
        raise ValueError(f"no kind `{component}` in slot `{slot}`; slots: {', '.join(plugins.registry.slots())}")
    models = models_of(
        registered.config, plugins, options=options or {}, fields=fields, within=within, reference=reference
    )
    broken = {name: broken_promises(subject, level, only) for name, subject in models.items()}
    if any(broken.values()):
        name = f"{kind_of(registered.config)} `{component}`, {place_of(registered.config)},"
        raise AssertionError(in_lines(name, broken))


@checked
def check_model(
    graph: AnySpec, *, plugins: Plugins | None = None, level: Level = "quick", only: Sequence[str] = ()
) -> None:
    """Measure every property on the model of a spec, with the weights of its folder if it has any.

    A graph must have been loaded with these plugins.

    Raises AssertionError with all broken promises, except those that follow from another one.
    """
    plugins = plugins or load_plugins()
    graph = graph if isinstance(graph, Graph) else load(graph, plugins=plugins)
    subject = Subject(replace(graph, weights=None), plugins, weights=graph.weights)
    if broken := broken_promises(subject, level, only):
        raise AssertionError(in_lines(f"`{graph.name}`", {"": broken}))


def broken_promises(subject: Subject, level: Level, only: Sequence[str]) -> dict[str, str]:
    """Return the deviations of a model in words, by the property."""
    properties = properties_of(subject.plugins).chosen(only, level)
    return {outcome.name: outcome.fault for outcome in outcomes(subject, properties) if outcome.status == "failed"}


def in_lines(name: str, broken_by_model: Mapping[str, Mapping[str, str]]) -> str:
    """Format the faults of several models: each finding once, with its models.

    Args:
        name: the component or model that breaks the promises.
        broken_by_model: the broken promises by model; a model without a name is not mentioned.
    """
    where: dict[tuple[str, str], list[str]] = {}
    for model, broken in broken_by_model.items():
        for promise, fault in broken.items():
            where.setdefault((promise, fault), []).append(model)
    lines = [
        f"- {promise}{f', in {_listed(models)}' if any(models) else ''}: {fault}"
        for (promise, fault), models in where.items()
    ]
    count = len({promise for promise, _ in where})
    return "\n".join([f"{name} breaks {'a promise' if count == 1 else f'{count} promises'}", *lines])


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
