"""Shipped language models, at a small size, have with caches the outputs that they have without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tfkit
from tfkit.graph.expand import Graph
from tfkit.testing import check_cached, check_cached_step, example_inputs

from ..sampling import chosen
from ..small_specs import FEW, SHIPPED, reductions
from .small import build

WHOLE = {
    "bert_base": "attention that reads later tokens needs the whole sequence",
    "block_512": "attention that reads later tokens needs the whole sequence",
}
"""The models that need their sequence as a whole, and why."""
STEPWISE = [name for name in SHIPPED if name not in WHOLE]
LENGTH = 16


def sets_of(name: str) -> Iterator[str]:
    """Changes that make a model small, and its windows much shorter than the sequences."""
    graph = tfkit.load(name)
    yield from (change for change in reductions(graph) if not change.startswith("max_len"))
    if any(getattr(node.config, "max_len", None) for node in graph.nodes):
        yield f"max_len={LENGTH}"
    for node in graph.nodes:
        for path, layer in node.config.distinct() if hasattr(node.config, "distinct") else ():
            yield f"{node.name}.attention.n_heads=4"
            if layer.attention.kind == "gqa":
                yield f"{node.name}.attention.n_kv_heads=2"
            if layer.attention.mask is not None:
                yield f"{node.name}.{path}attention.mask.left=3"


def small(name: str) -> Graph:
    return tfkit.load(name, sets=sets_of(name))


@pytest.mark.parametrize("name", chosen(STEPWISE, FEW))
def test_a_shipped_model(name: str) -> None:
    graph = small(name)
    check_cached(build(graph), example_inputs(graph, length=LENGTH))


@pytest.mark.parametrize(("name", "windows"), [("mistral_7b", {4}), ("gpt3_175b", {None, 4}), ("gpt2", {None})])
def test_the_windows_of_the_small_models(name: str, windows: set[int | None]) -> None:
    node = small(name).node("decoder")
    assert {one.window for layer in node.config.pieces(node.signals).caches for one in layer} == windows


@pytest.mark.parametrize(
    "name",
    chosen(STEPWISE, ["mistral_7b"]),
)
def test_a_shipped_step_is_captured_and_scripted(name: str) -> None:
    graph = small(name)
    check_cached_step(build(graph), example_inputs(graph, length=LENGTH))


@pytest.mark.parametrize("name", WHOLE)
def test_a_shipped_model_that_needs_the_whole(name: str) -> None:
    with pytest.raises(tfkit.SpecError) as refused:
        tfkit.CachedModel(build(small(name)), length=8)
    (only,) = refused.value.diagnostics
    assert only.message == WHOLE[name]
    assert only.path == "graph.encoder.attention"
    assert only.notes == (f"`{name}` cannot be decoded token by token",)
