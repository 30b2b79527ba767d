"""The warning of slow widths says what torch does."""

from __future__ import annotations

import pytest
import torch
from tfkit_moe.checks import slow_widths
from tfkit_moe.stacked import takes_grouped

import tfkit


@pytest.mark.parametrize("width", [64, 68, 72, 100])
def test_it_warns_where_the_grouped_product_does_not_serve(width: int) -> None:
    graph = tfkit.load("mixtral_8x7b", sets=[f"decoder.ffn.d_ff={width}"])
    served = takes_grouped(torch.zeros(1, 4096, dtype=torch.bfloat16), (4096, width, 2 * width))
    found = list(slow_widths(graph))
    assert bool(found) is not served
    assert [one.path for one in found] == [] if served else ["graph.decoder.ffn.d_ff"]


ODD = 'decoder.layers={variants: {odd: {ffn: {d_ff: 99}}}, pattern: {"0": odd, rest: base}}'


def test_layer_variants_too() -> None:
    graph = tfkit.load("mixtral_8x7b", sets=[ODD])
    assert [one.path for one in slow_widths(graph)] == ["graph.decoder.layers.variants.odd.ffn.d_ff"]


def test_no_published_model_is_slow() -> None:
    names = [name for name, spec in tfkit.load_plugins().specs.files.items() if spec.plugin.startswith("tfkit-moe")]
    assert names
    assert [name for name in names if list(slow_widths(tfkit.load(name)))] == []
