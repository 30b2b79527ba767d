"""Every shipped spec has all properties, and its reduced model can be built."""

from __future__ import annotations

import json

import pytest

import tfkit
from tfkit.component import AttentionConfig
from tfkit.spec.render import spec_data
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.check.reduced import reduced_model

from ...known import NAMES
from ...models import MODEL_OF, MODELS, SIZES
from ...sampling import chosen, some, spread
from ...small_specs import COVERING
from .models import faults

PLUGINS = tfkit.load_plugins()
READING = (
    "look-ahead",
    "extents",
    "padding",
    "neighbours",
    "cached",
    "zero-sublayers",
    "every-row",
    "derivatives",
    "init",
)


@pytest.mark.parametrize("name", chosen(MODELS, ["gpt2"]))
def test_a_shipped_spec_has_every_property(name: str) -> None:
    check(name, ())


@pytest.mark.slow
@pytest.mark.parametrize("name", spread(COVERING, 1))
def test_a_shipped_spec_has_the_properties_of_reading(name: str) -> None:
    check(name, READING)


@pytest.mark.slow
def test_a_mixture_is_compared_with_the_same_experts() -> None:
    """Another choice is no rounding, and no derivative."""
    check("deepseek_v3", ("rounding", "derivatives"))


def check(name: str, only: tuple[str, ...]) -> None:
    assert faults(ModelUnderTest(tfkit.loads(reduced_text(name), plugins=PLUGINS), PLUGINS), only) == {}


def reduced_text(name: str) -> str:
    """The reduced model of a spec as JSON, without what describes it."""
    model = reduced_model(tfkit.load(name, plugins=PLUGINS), PLUGINS).graph.spec.model
    return json.dumps(spec_data(model.model_copy(update={"name": "reduced", "source": None, "description": None})))


@pytest.mark.parametrize("name", some(SIZES, 6))
def test_the_sizes_of_a_model_reduce_to_the_same_model(name: str) -> None:
    assert {*map(reduced_text, SIZES[name].split())} == {reduced_text(name)}


def test_each_spec_has_a_model() -> None:
    assert {*MODEL_OF, *MODELS} == {*NAMES}
    assert {*SIZES} <= {*MODELS}


@pytest.mark.slow
def test_models_are_distinct() -> None:
    """A spec that reduces to a model of the list is listed there, so that tests do not prove a model twice."""
    assert len({*map(reduced_text, MODELS)}) == len(MODELS)


@pytest.mark.parametrize("name", some(NAMES, 4))
def test_a_reduced_model_keeps_what_a_model_is(name: str) -> None:
    """Its nodes and ties, the variants of its layers, the ratios of its heads, and its windows."""
    graph = tfkit.load(name, plugins=PLUGINS)
    small = reduced_model(graph, PLUGINS).graph
    assert [(node.name, node.wires) for node in small.nodes] == [(node.name, node.wires) for node in graph.nodes]
    for node in graph.nodes:
        stack = small.node(node.name).stack
        if node.stack is not None and stack is not None:
            assert stack.variants.keys() == node.stack.variants.keys()
            assert stack.depth <= max(6, len(stack.variants))
    ratios = [
        [attention.n_heads // attention.kv_heads for _, attention in model.configs(AttentionConfig)]
        for model in (graph, small)
    ]
    assert all(small == large or large > 4 for large, small in zip(*ratios, strict=True) if large != small)
    windows = [
        [attention.mask is None or attention.mask.left for _, attention in model.configs(AttentionConfig)]
        for model in (graph, small)
    ]
    assert [left is None for left in windows[0]] == [left is None for left in windows[1]]
    assert sum(parameter.numel() for parameter in tfkit.build(small, device="meta").parameters()) < 5_000_000
