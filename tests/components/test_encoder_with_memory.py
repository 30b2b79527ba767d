"""An encoder with a memory, through every tool that handles stacks; `parity` compares it with other libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

import tfkit
from tfkit.testing import check_model
from tfkit.tools.show.layer_programs import programs_of

SPEC = """
    tfkit: 1
    name: block_with_text
    d_model: 16
    inputs: {image: {type: features, width: 16}, text: {type: features, width: 24}}
    graph:
      block:
        block: encoder
        input: image
        memory: text
        n_layers: 2
        attention: {kind: mha, n_heads: 2, bias: {o: true}}
        ffn: {kind: geglu, d_ff: 24}
"""
ALONE = "block.layers={variants: {alone: {sublayers: [attention, ffn]}}, pattern: [base, alone]}"
CASES = {"each layer reads it": [], "every other layer reads it": [ALONE]}


def graph(*sets: str) -> tfkit.Graph:
    return tfkit.loads(SPEC, sets=sets)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_it_keeps_every_promise_of_a_model(case: str) -> None:
    check_model(graph(*CASES[case]))


def test_show_writes_the_program_of_each_layer() -> None:
    first, second, *_ = programs_of(graph(ALONE))
    assert "x = x + cross_attention(layernorm(x), memory)" in first.lines
    assert not any("cross_attention" in line for line in second.lines)


def test_draw_knows_its_memory() -> None:
    assert "cross-attention" in tfkit.draw(graph()).description


def test_cost_counts_a_memory_of_its_own_length() -> None:
    """Of 2 layers: keys and values of the text, scores and what they weigh, and nothing else grows with the text."""
    short, long = (tfkit.cost(graph(), length=8, memory_length=n, mode="prefill") for n in (3, 5))
    keys_and_values, scores = 2 * 24 * 16 * 2, 2 * 8 * 16 * 2
    assert long.total.flops - short.total.flops == 2 * 2 * (keys_and_values + scores)


@pytest.mark.slow
def test_it_can_be_ejected(tmp_path: Path) -> None:
    assert "memory" in tfkit.eject(graph(ALONE))


@pytest.mark.parametrize("suffix", ["ts", pytest.param("pt2", marks=pytest.mark.slow)])
def test_it_can_be_exported(suffix: str, tmp_path: Path) -> None:
    tfkit.export(tfkit.build(graph(ALONE)).eval(), tmp_path / f"block.{suffix}")


def test_it_is_read_as_a_whole() -> None:
    with pytest.raises(tfkit.SpecError, match="attention that attends to later tokens needs the full sequence"):
        tfkit.CachedModel(tfkit.build(graph()).eval(), length=8)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["block.memory=null", "block.cross_attention={n_heads: 2}"], "cross-attention needs a memory"),
        (["block.sublayers=[attention, ffn]"], "`memory` has no effect: no sublayer attends to it"),
        (["block.attention=null"], "a layer of a stack with a memory must have an attention"),
        (["block.memory=block"], "`block` cannot be its own input"),
    ],
)
def test_what_cannot_be(sets: list[str], message: str) -> None:
    with pytest.raises(tfkit.SpecError, match=message):
        graph(*sets)
