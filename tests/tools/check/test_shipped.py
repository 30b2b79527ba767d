"""No property is broken in any shipped spec; the smallest relative of each can be made."""

from __future__ import annotations

import pytest

import tfkit
from tfkit.component import AttentionConfig
from tfkit.tools.check.check import outcomes
from tfkit.tools.check.known import properties_of
from tfkit.tools.check.relative import relative
from tfkit.tools.check.subject import Subject

from ...known import NAMES
from ...sampling import chosen, slow, some
from ...small_specs import COVERING

PLUGINS = tfkit.load_plugins()
READING = ("look-ahead", "extents", "padding", "neighbours", "cached", "silent", "every-row", "derivatives", "init")


@pytest.mark.parametrize("name", [*some(COVERING, 3), *(slow(name) for name in NAMES if name not in COVERING)])
def test_a_shipped_spec_has_the_properties_of_reading(name: str) -> None:
    check(name, READING)


@pytest.mark.parametrize("name", some(COVERING, 14))
def test_a_shipped_spec_means_what_the_reference_says(name: str) -> None:
    check(name, ("meaning",))


@pytest.mark.parametrize("name", chosen(NAMES, ["gpt2"]))
def test_a_shipped_spec_has_every_property(name: str) -> None:
    check(name, ())


@pytest.mark.parametrize("name", chosen(["deepseek_v3", "gpt_oss_20b", "dbrx"], ["deepseek_v3"]))
def test_a_mixture_is_compared_with_the_same_experts(name: str) -> None:
    """Another choice is no rounding, and no derivative."""
    check(name, ("rounding", "derivatives"))


def check(name: str, only: tuple[str, ...]) -> None:
    graph = relative(tfkit.load(name, plugins=PLUGINS), PLUGINS).graph
    properties = properties_of(PLUGINS).chosen(only, "quick")
    found = {one.name: one.detail for one in outcomes(Subject(graph, PLUGINS), properties) if one.status == "failed"}
    assert found == {}


@pytest.mark.parametrize("name", some(NAMES, 6))
def test_a_relative_keeps_what_a_model_is(name: str) -> None:
    """Its nodes and ties, the variants of its layers, the ratios of its heads, and its windows."""
    graph = tfkit.load(name, plugins=PLUGINS)
    small = relative(graph, PLUGINS).graph
    assert [(node.name, node.wires) for node in small.nodes] == [(node.name, node.wires) for node in graph.nodes]
    for node in graph.nodes:
        stack = small.node(node.name).stack
        if node.stack is not None and stack is not None:
            assert stack.variants.keys() == node.stack.variants.keys()
            assert stack.depth <= max(6, len(stack.variants))
    ratios = [[one.n_heads // one.kv_heads for _, one in model.configs(AttentionConfig)] for model in (graph, small)]
    assert all(small == large or large > 4 for large, small in zip(*ratios, strict=True) if large != small)
    windows = [
        [one.mask is None or one.mask.left for _, one in model.configs(AttentionConfig)] for model in (graph, small)
    ]
    assert [left is None for left in windows[0]] == [left is None for left in windows[1]]
    assert sum(one.numel() for one in tfkit.build(small, device="meta").parameters()) < 5_000_000
