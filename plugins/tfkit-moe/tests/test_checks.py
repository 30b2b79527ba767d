"""The warnings of slow widths and of idle routers say what torch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tfkit_moe.checks import idle_routers, slow_widths
from tfkit_moe.stacked import takes_grouped

import tfkit

from .layer import PLUGINS, spec


@pytest.mark.parametrize("width", [64, 68, 72, 100])
def test_it_warns_where_the_grouped_product_does_not_serve(width: int) -> None:
    graph = tfkit.load("mixtral_8x7b", sets=[f"decoder.ffn.d_ff={width}"])
    served = takes_grouped(torch.zeros(1, 4096, dtype=torch.bfloat16), (4096, width, 2 * width))
    actual = list(slow_widths(graph))
    assert bool(actual) is not served
    assert [value.path for value in actual] == [] if served else ["graph.decoder.ffn.d_ff"]


ODD = 'decoder.layers={variants: {odd: {ffn: {d_ff: 99}}}, pattern: {"0": odd, rest: base}}'


def test_layer_variants_too() -> None:
    graph = tfkit.load("mixtral_8x7b", sets=[ODD])
    assert [diagnostic.path for diagnostic in slow_widths(graph)] == ["graph.decoder.layers.variants.odd.ffn.d_ff"]


@pytest.mark.slow
def test_no_published_model_is_slow() -> None:
    plugins = tfkit.load_plugins()
    graphs = [
        tfkit.load(name, plugins=plugins)
        for name, spec in plugins.specs.files.items()
        if spec.plugin.startswith("tfkit-moe")
    ]
    assert graphs
    assert [graph.name for graph in graphs if [*slow_widths(graph), *idle_routers(graph)]] == []


ROUTERS: list[dict[str, Any]] = [
    {"score": score, "order": order, **divided}
    for divided in ({}, {"renormalize": True, "eps": 0.5})
    for order in ("topk_then_score", "score_then_topk")
    for score in ("softmax", "sigmoid")
    # An error: such scores are divided by one anyway.
    if not (divided and (score, order) == ("softmax", "topk_then_score"))
]


@pytest.mark.parametrize("router", ROUTERS, ids=lambda router: "-".join(map(str, router.values())))
@pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 1), (4, 2)])
def test_it_warns_of_a_router_without_a_gradient(router: dict[str, Any], n: int, k: int) -> None:
    graph = tfkit.loads(spec(n_experts=n, n_experts_per_token=k, d_ff=8, router=router), plugins=PLUGINS)
    model = tfkit.build(graph)
    torch.manual_seed(0)
    model(torch.randn(2, 8, 16)).square().sum().backward()
    gradient = model.get_parameter("encoder.layers.0.ffn.router.weight").grad
    assert gradient is not None
    assert [diagnostic.path for diagnostic in idle_routers(graph)] == (
        [] if gradient.abs().max() > 1e-5 else ["graph.encoder.ffn.n_experts_per_token"]
    )
