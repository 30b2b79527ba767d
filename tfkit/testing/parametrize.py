"""Every check of a component as a separate test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from tfkit.component import Component
from tfkit.errors import SpecError
from tfkit.graph.expand import expand
from tfkit.plugin.manager import Plugins, load_plugins
from tfkit.spec.load import take_spec
from tfkit.tools.check.check import outcomes
from tfkit.tools.check.components import models_of
from tfkit.tools.check.known import properties_of
from tfkit.tools.check.measure import Level, Property
from tfkit.tools.check.small import LAYOUTS, Layout, with_component
from tfkit.tools.check.subject import Subject

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
        spec: a small spec, for a block, which has no other model.
        xfail: properties that are expected to fail, by name, with the reason. A property that holds again fails.
        plugins: the plugins that the models need; all installed ones unless given.
        level: `full` measures what takes seconds too.
        reference: a function in NumPy that says what the component computes, as `tfkit.reference` describes it.

    Raises:
        ValueError: `xfail` names a property that does not exist, or a block has no `spec`.
    """
    import pytest

    available, xfail = with_component(plugins or load_plugins(), component), xfail or {}

    @cache
    def models() -> dict[str, Subject]:
        if spec is not None:
            return {"its spec": Subject(expand(take_spec(spec, available)), available)}
        return models_of(component, available, options=options or {}, fields=fields, within=within, reference=reference)

    try:
        properties_of(available).chosen(list(xfail))
    except SpecError as error:
        raise ValueError(error.diagnostics[0].message) from None
    if component.slot == "block" and spec is None:
        raise ValueError("a block has no small model: give its `spec`")
    tests = [
        pytest.param(
            _check(prop, models),
            id=prop.name,
            marks=[pytest.mark.xfail(reason=xfail[prop.name], strict=True, raises=AssertionError)]
            if prop.name in xfail
            else [],
        )
        for prop in properties_of(available).chosen((), level)
    ]
    return pytest.mark.parametrize("check", tests)


def _check(prop: Property, models: Callable[[], Mapping[str, Subject]]) -> Check:
    """Measure a property on all models; the test is skipped if it applies to none."""

    def check() -> None:
        import pytest

        __tracebackhide__ = True  # pytest then shows the author's test alone
        results = {name: next(outcomes(subject, [prop])) for name, subject in models().items()}
        broken = [f"in {name}: {o.fault}" for name, o in results.items() if o.status == "failed"]
        if broken:
            raise AssertionError("\n".join(broken))
        if not any(o.status == "ok" for o in results.values()):
            pytest.skip(next(o.detail for o in results.values()))

    return check
