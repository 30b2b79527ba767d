"""Every tool supports features that no published model has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tfkit
from tfkit.tools.cost.cost import cost
from tfkit.tools.draw.svg import to_svg
from tfkit.tools.eject.proof import Alone, check
from tfkit.tools.eject.write import eject
from tfkit.tools.export.export import export
from tfkit.tools.params.count import count_params
from tfkit.tools.show.prose import prose_of

from ..components.test_matrix import CHOSEN, ROWS, load, name_of, spec_of
from ..decoding.test_cached_models import COVERED_SPECS, SPECS, build
from .cost.test_counter import B, T, counted, memory_length
from .draw.geometry import faults

LATENTS = """
tfkit: 1
name: latents
d_model: 16
vocab_size: 11
max_len: 32
inputs: [source, target]
graph:
  source_embedding: {block: embedding, input: source}
  embedding: {block: embedding, input: target}
  decoder:
    block: decoder
    memory: source_embedding
    n_layers: 1
    attention: {kind: mla, n_heads: 3, q_rank: 7, kv_rank: 8, d_nope: 6, d_rope: 4, d_v: 5, kv_scale: 1.5}
    ffn: {kind: gelu, d_ff: 24}
  logits: {block: lm_head}
"""
IN_A_ROW = """
tfkit: 1
name: in_a_row
d_model: 16
vocab_size: 23
inputs: [a, b]
graph:
  one: {block: embedding, input: a}
  two: {block: embedding, input: b}
  both: {block: concat, inputs: [one, two]}
  encoder: {block: encoder, n_layers: 1, attention: {n_heads: 2}, ffn: {kind: relu, d_ff: 24}}
  logits: {block: lm_head}
"""
MODELS: dict[str, Callable[[], tfkit.Graph]] = {
    **{name: lambda text=text: build(text).meta["graph"] for name, text in SPECS.items() if name not in COVERED_SPECS},  # type: ignore[misc]
    "latents": lambda: tfkit.loads(LATENTS),
    "in_a_row": lambda: tfkit.loads(IN_A_ROW),
}
PARTICULAR = {
    "latents": "a method that is drawn into one that is drawn into another",
    "in_a_row": "a head that reads more positions than an input has",
    "local_and_global": "a variant that is called like a keyword",
    "several_heads": "two widths of a head, of which the config says one",
    "several_outputs": "a node without logits among the outputs",
    "mqa-steps-rope_partial-layernorm_no_bias-memory-sandwich-silu": "contexts, of which one has a temperature",
}
"""What is particular about them."""
ALL_VALUES = {name_of(row): row for row in ROWS if row in CHOSEN or name_of(row) in PARTICULAR}
"""Rows whose values are scripted in `components/test_matrix.py`, too."""
MODELS |= {name: lambda row=row: load(spec_of(row)) for name, row in ALL_VALUES.items()}  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_tool(alone: Alone, name: str, tmp_path: Path) -> None:
    graph = MODELS[name]()
    assert check(graph, eject(graph), alone).ran
    if name not in ALL_VALUES:
        assert export(tfkit.build(graph), tmp_path / "model.ts").difference <= 1e-5
    actual = cost(graph, batch=B, length=T, memory_length=memory_length(graph), dtype=torch.float32)
    assert (actual.total.flops_forward, actual.total.flops_backward) == counted(graph)
    assert actual.total.parameters == count_params(graph).total
    assert prose_of(graph)
    picture = tfkit.draw(graph)
    assert list(faults(picture)) == []
    svg = to_svg(picture)
    assert [name for name in graph.inputs if name not in svg and name.replace("_", " ") not in svg] == []
