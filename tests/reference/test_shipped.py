"""Every shipped spec without plugins, as its reduced model, computes what the reference computes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

import tfkit
from tfkit.component import Component, ResidualConfig, parts
from tfkit.reference import BUILT_IN, UnknownKind
from tfkit.tools.check.model_under_test import ModelUnderTest, reference_functions
from tfkit.tools.check.reduced import reduced_model

from ..models import MODELS
from ..sampling import chosen, spread
from ..small_specs import COVERING
from .agreement import check_agreement

PLUGINS = tfkit.load_plugins()


@pytest.mark.parametrize("name", chosen(MODELS, spread(COVERING, 3)))
def test_a_shipped_spec_means_what_the_reference_says(name: str) -> None:
    subject = ModelUnderTest(reduced_model(tfkit.load(name, plugins=PLUGINS), PLUGINS).graph, PLUGINS)
    calls = [subject.inputs(padding=side) for side in (("none", "left", "right") if subject.padded else ("none",))]
    with nullcontext() if defined(subject.graph) else pytest.raises(UnknownKind):
        check_agreement(subject.graph, *calls)


def test_every_kind_of_the_shipped_plugins_has_a_formula() -> None:
    """Without a function, `meaning` does not apply to a kind: no other test would show that a registry has lost it."""
    functions = reference_functions(PLUGINS, {})
    missing = {
        f"{slot} {kind}"
        for slot in {*BUILT_IN, *functions}
        for kind in PLUGINS.registry.kinds(slot)
        if kind not in {*BUILT_IN.get(slot, {}), *functions.get(slot, {})}
    }
    assert missing == {"residual add"}  # the layer computes it


def defined(graph: tfkit.Graph) -> bool:
    """True if the reference has a function for every kind of a model."""
    components = [config for _, config in parts((), graph.spec.model) if isinstance(config, Component)]
    components = [config for config in components if not isinstance(config, ResidualConfig)]
    slots = {*BUILT_IN, "mixer", "residual"}  # the others are of plugins; `init` and its like compute nothing
    return all(config.kind_name() in BUILT_IN.get(config.slot, {}) for config in components if config.slot in slots)
