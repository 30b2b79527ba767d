"""Every shipped spec has all properties, and its reduced model can be built."""

from __future__ import annotations

import json
from functools import cache

import pytest

import tfkit
from tfkit.component import AttentionConfig
from tfkit.spec.render import document
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.check.reduced import reduced_model

from ...known import NAMES
from ...sampling import chosen, some, spread
from ...small_specs import COVERING
from .models import faults

PLUGINS = tfkit.load_plugins()
READING = ("look-ahead", "extents", "padding", "neighbours", "cached", "silent", "every-row", "derivatives", "init")


@pytest.mark.parametrize("name", chosen(NAMES, ["gpt2"]))
def test_a_shipped_spec_has_every_property(name: str) -> None:
    check(name, ())


@pytest.mark.parametrize("name", spread(COVERING, 1))
def test_a_shipped_spec_has_the_properties_of_reading(name: str) -> None:
    check(name, READING)


def test_a_mixture_is_compared_with_the_same_experts() -> None:
    """Another choice is no rounding, and no derivative."""
    check("deepseek_v3", ("rounding", "derivatives"))


def check(name: str, only: tuple[str, ...]) -> None:
    model = reduced_model(tfkit.load(name, plugins=PLUGINS), PLUGINS).graph.spec.model
    alike = model.model_copy(update={"name": "reduced", "source": None, "description": None})
    assert broken(json.dumps(document(alike)), only) == {}


@cache
def broken(spec: str, only: tuple[str, ...]) -> dict[str, str]:
    """The broken properties of a reduced model; the reduced models of many specs are equal, and checked once."""
    return faults(ModelUnderTest(tfkit.loads(spec, plugins=PLUGINS), PLUGINS), only)


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
