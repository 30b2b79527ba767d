"""The check of a component, or of a model: every broken property in one error, or every property as a separate test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Annotated, Any

import torch
from torch import nn

from tfkit.arguments import checked
from tfkit.building.edits import AnyModel, MeasuredModel, as_model, copied_model
from tfkit.component import Component
from tfkit.errors import SpecError
from tfkit.graph.expand import Graph, expand, load
from tfkit.plugin.manager import Plugins, load_plugins
from tfkit.plugin.registry import class_location
from tfkit.spec.load import take_spec
from tfkit.spec.messages import kind_of
from tfkit.tools.check.check import AnySubject, outcomes_of
from tfkit.tools.check.components import LAYOUTS, Layout, models_of, with_component
from tfkit.tools.check.measure import Level, Outcome, Property
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.check.properties.all import PropertySet, properties_of

__tracebackhide__ = True  # pytest shows the test that fails, not the functions of this module


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
    xfail: Mapping[str, str] | None = None,
) -> None:
    """Check that small models around a component have every property that tfkit guarantees.

    Args:
        component: its kind, or its config class, which need not be installed.
        slot: the slot that it fills; only with a kind. One of attention, mixer, mask_rule, ffn, norm, residual,
            activation, position, rope_scaling and init; a block is checked by `check_model` with a spec of your own.
            Or one of a run: optimizer, schedule, loss, data, metric and callback, which are checked in a small run.
        fields: the other keys of a spec, besides `kind`. Required integers, and fields with a name that the
            built-in components use (`activation`, `factor`), have small defaults; d_model is 16.
        options: several values for each of some further keys, `{"gate": [None, "silu"], "softcap": [None, 5.0]}`: every
            two of them meet in a model, unless the component rejects that.
        within: the models to build: `encoder`, `decoder`, and `memory`, which is a decoder with cross-attention.
        plugins: the plugins to look up a kind in; by default, all installed plugins.
        level: `full` includes properties that take seconds: `torch.compile`, exports.
        only: names of properties; by default, all properties of that level.
        reference: a function in NumPy that computes the output of the component, as `tfkit.reference` and
            `tfkit.reference.training` describe it.
        xfail: properties that are expected to fail, by name, with the reason. A property that holds again fails.

    Raises:
        AssertionError: properties are broken; the message lists all of them, each with the models that show it. Or no
            property in `only` applies to any model.
        SpecError: the component rejects its fields or its slot.
        TypeError: the class is not a proper config.
        ValueError: there is no such kind, slot or property in `xfail`, or no small model for the component.
    """
    plugins = plugins or load_plugins()
    if not isinstance(component, str):
        plugins = with_component(plugins, component)
        slot, component = component.slot, component.kind_name()
    if slot is None:
        raise ValueError(f"`slot` is missing: pass the slot of the kind, one of {', '.join(plugins.registry.slots())}")
    registered = plugins.registry.find(slot, component)
    if registered is None:
        raise ValueError(
            f"there is no kind `{component}` in slot `{slot}`; slots: {', '.join(plugins.registry.slots())}"
        )
    models = _component_subjects(registered.config, plugins, options or {}, fields, within, reference)
    name = f"{kind_of(registered.config)} `{component}`, {class_location(registered.config)},"
    raise_faults(name, models, plugins, level, only, xfail)


@checked
def check_model(
    graph: AnyModel,
    *,
    plugins: Plugins | None = None,
    level: Level = "quick",
    only: Sequence[str] = (),
    xfail: Mapping[str, str] | None = None,
) -> None:
    """Measure every property on the model of a spec, with the weights of its folder if it has any, or on a built model.

    A built model is measured as a copy in float32 on the CPU. If it was edited, properties that need a new build of its
    spec do not apply, and a warning lists the edits. A graph must have been loaded with these plugins. `xfail` contains
    properties that are expected to fail, by name, with the reason.

    Raises AssertionError with all broken properties, except consequences of other broken properties, or if no property
    in `only` applies to the model.
    """
    plugins = plugins or load_plugins()
    if not isinstance(graph, Graph | nn.Module | MeasuredModel):
        graph = load(graph, plugins=plugins)
    model = as_model(graph, "its modules are measured, without properties that need a build of the spec")
    graph = replace(model.graph, weights=None)
    module = None if model.module is None else copied_model(model.module, device="cpu", dtype=torch.float32)
    subject = ModelUnderTest(graph, plugins, weights=model.graph.weights, module=module, edits=model.edits)
    raise_faults(f"`{graph.name}`", {"": subject}, plugins, level, only, xfail)


def _component_subjects(
    config: type[Component],
    plugins: Plugins,
    options: Mapping[str, Sequence[Any]],
    fields: Mapping[str, Any] | None,
    within: Sequence[Layout],
    reference: Callable[..., Any] | None,
) -> Mapping[str, AnySubject]:
    """Return the small models, or the small subjects of a plugin, around a component."""
    subject_type = properties_of(plugins).type_of(config.slot)
    if subject_type is not None:
        return subject_type.around(config, plugins, options=options, fields=fields, reference=reference)
    return models_of(config, plugins, options=options, fields=fields, within=within, reference=reference)


def raise_faults(
    name: str,
    models: Mapping[str, AnySubject],
    plugins: Plugins,
    level: Level,
    only: Sequence[str] = (),
    xfail: Mapping[str, str] | None = None,
) -> None:
    """Raise AssertionError for broken properties outside `xfail`, and for properties of `xfail` that hold everywhere.

    Properties that are chosen by name must not pass unmeasured: if none of `only` applies to any model, that is an
    AssertionError, too.
    """
    xfail = xfail or {}
    properties = _available_properties(plugins, xfail).chosen(only, level)
    results = {model: list(outcomes_of(subject, properties, strict=True)) for model, subject in models.items()}
    outcomes = [outcome for measured in results.values() for outcome in measured]
    failed = {outcome.name for outcome in outcomes if outcome.status == "failed"}
    if only and not any(outcome.status in ("ok", "failed") for outcome in outcomes):
        reasons = dict.fromkeys(f"- {outcome.name}: {outcome.detail}" for outcome in outcomes)
        raise AssertionError("\n".join([f"no property in `only` applies to {name.rstrip(',')}", *reasons]))

    def fault(outcome: Outcome) -> str:
        if outcome.name not in xfail:
            return outcome.fault if outcome.status == "failed" else ""
        holds = outcome.status == "ok" and outcome.name not in failed
        return f"it holds, but `xfail` expects a failure: {xfail[outcome.name]}" if holds else ""

    broken = {
        model: {item.name: fault(item) for item in measured if fault(item)} for model, measured in results.items()
    }
    if any(broken.values()):
        raise AssertionError(fault_lines(name, broken))


def _available_properties(plugins: Plugins, xfail: Mapping[str, str]) -> PropertySet:
    """Return the available properties; raise ValueError if `xfail` names a property that does not exist."""
    properties = properties_of(plugins)
    try:
        properties.chosen(list(xfail))
    except SpecError as error:
        raise ValueError(error.diagnostics[0].message) from None
    return properties


def fault_lines(name: str, broken_by_model: Mapping[str, Mapping[str, str]]) -> str:
    """Format the faults of several models: each finding once, with its models.

    Args:
        name: the component or model that breaks the properties.
        broken_by_model: the broken properties by model; a model without a name is not mentioned.
    """
    where: dict[tuple[str, str], list[str]] = {}
    for model, broken in broken_by_model.items():
        for prop, fault in broken.items():
            where.setdefault((prop, fault), []).append(model)
    lines = [
        f"- {prop}{f', in {_joined_words(models)}' if any(models) else ''}: {fault}"
        for (prop, fault), models in where.items()
    ]
    count = len({prop for prop, _ in where})
    return "\n".join([f"{name} breaks {'a guarantee' if count == 1 else f'{count} guarantees'}", *lines])


def _joined_words(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# ---- a test for each property ----


Check = Callable[[], None]
"""One property, measured on all models of a component; raises AssertionError if it is broken."""


def parametrize_with_checks(
    component: type[Component],
    *,
    fields: Mapping[str, Any] | None = None,
    options: Mapping[str, Sequence[Any]] | None = None,
    within: Sequence[Layout] = LAYOUTS,
    spec: Mapping[str, Any] | None = None,
    xfail: Mapping[str, str] | None = None,
    plugins: Plugins | None = None,
    level: Level = "quick",
    reference: Callable[..., Any] | None = None,
) -> Callable[[Callable[[Check], None]], Any]:
    """Turn a test that takes a `check` and calls it into one test for each property of `tfkit check`.

        @tfkit.testing.parametrize_with_checks(AdditiveConfig, xfail={"script": "it takes **kwargs"})
        def test_additive(check):
            check()

    Args:
        component: its config class, which need not be installed.
        fields: the other keys of a spec, besides `kind`, as for `check_component`.
        options: several values for each of some further keys, of which every two meet in a model.
        within: the models to build around it.
        spec: a small spec, for a block, which has no other model; or a small run with the kind in its slot, for data
            whose examples are not tokens.
        xfail: properties that are expected to fail, by name, with the reason. A property that holds again fails.
        plugins: the plugins that the models need; by default, all installed plugins.
        level: `full` includes properties that take seconds.
        reference: a function in NumPy that computes the output of the component, as `tfkit.reference` describes it.

    Raises:
        ValueError: `xfail` names a property that does not exist, or a block has no `spec`.
    """
    import pytest

    available, xfail = with_component(plugins or load_plugins(), component), xfail or {}
    properties = _available_properties(available, xfail)
    subject_type = properties.type_of(component.slot)
    of = "model" if subject_type is None else subject_type.name

    @cache
    def subjects() -> Mapping[str, AnySubject]:
        if spec is not None and subject_type is not None:
            kinds = None if reference is None else {component.slot: {component.kind_name(): reference}}
            return {f"its {of}": subject_type.read(spec, available, kinds=kinds)}
        if spec is not None:
            return {"its spec": ModelUnderTest(expand(take_spec(spec, available)), available)}
        return _component_subjects(component, available, options or {}, fields, within, reference)

    if component.slot == "block" and spec is None:
        raise ValueError("a block has no small model: pass its `spec`")
    marks = {name: pytest.mark.xfail(reason=text, strict=True, raises=AssertionError) for name, text in xfail.items()}
    tests = [
        pytest.param(_property_check(prop, subjects), id=prop.name, marks=marks.get(prop.name, ()))
        for prop in properties.chosen((), level)
        if prop.of == of
    ]
    return pytest.mark.parametrize("check", tests)


def _property_check(prop: Property, subjects: Callable[[], Mapping[str, AnySubject]]) -> Check:
    """Measure a property on all subjects; the test is skipped if it applies to none."""

    def check() -> None:
        import pytest

        results = {name: next(outcomes_of(subject, [prop], strict=True)) for name, subject in subjects().items()}
        broken = [f"in {name}: {o.fault}" for name, o in results.items() if o.status == "failed"]
        if broken:
            raise AssertionError("\n".join(broken))
        if not any(o.status == "ok" for o in results.values()):
            pytest.skip(next(o.detail for o in results.values()))

    return check
