"""What no published model has: every tool takes it, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tfkit
from tfkit.tools.cost import cost
from tfkit.tools.draw import to_svg
from tfkit.tools.eject import check, eject
from tfkit.tools.explain import explain
from tfkit.tools.export.export import export
from tfkit.tools.params import count_params

from ..decoding.test_cached_models import SPECS, build
from ..test_matrix import ROWS, load, name_of, spec_of

MODELS: dict[str, Callable[[], tfkit.Graph]] = {
    **{name: lambda text=text: build(text).meta["graph"] for name, text in SPECS.items()},  # type: ignore[misc]
    **{name_of(row): lambda row=row: load(spec_of(row)) for row in ROWS},  # type: ignore[misc]
}
QUICK = {
    "local_and_global": "a variant that is called like a keyword",
    "several_heads": "two widths of a head, of which the config says one",
    "memory_of_two": "a memory that is made of two inputs",
    "several_outputs": "a node without logits among the outputs",
    "mqa-steps-rope_partial-layernorm_no_bias-memory-sandwich-silu": "contexts, of which one has a temperature",
}
"""What is particular about them."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_every_tool(name: str, tmp_path: Path) -> None:
    graph = MODELS[name]()
    assert check(graph, eject(graph)).ran
    assert export(tfkit.build(graph), tmp_path / "model.ts").difference <= 1e-5
    found = cost(graph, batch=2, length=9, dtype=torch.float32)
    assert sum(row.flops for row in found.rows()) == found.total.flops
    assert found.total.parameters == count_params(graph).total
    assert explain(graph)
    assert to_svg(tfkit.draw(graph)).startswith("<svg")
