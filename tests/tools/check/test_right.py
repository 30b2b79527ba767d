"""Models that are right, in ways that a careless property takes for a fault."""

from __future__ import annotations

import pytest

import tfkit
from tfkit.tools.check.check import outcomes
from tfkit.tools.check.known import OWN
from tfkit.tools.check.subject import Subject

from ...sampling import slow

PLUGINS = tfkit.load_plugins(entry_points=False)
TEXT = """
tfkit: 1
name: right
d_model: 16
vocab_size: 29
max_len: 24
dropout: 0.1
graph:
  embedding: {block: embedding}
  stack: {block: decoder, n_layers: 2, attention: {kind: mha, n_heads: 4}, ffn: {kind: gelu, d_ff: 16}}
  logits: {block: lm_head, tie: embedding}
"""
ROPE = "stack.attention.position={kind: rope, scaling: {kind: dynamic, factor: 2, original_max_len: LENGTH}}"
VARIANTS = (
    "stack.layers={pattern: [one, two], "
    "variants: {one: {attention: {mask: {left: 3, right: 0}}}, two: {placement: sandwich}}}"
)
RIGHT = {
    "a stage for dropout": ("embedding.stages=[dropout]", ("train-mode", "dropout")),
    "values that all variants replace": (VARIANTS, ("values", "dropout")),
    "a gate that may be closed": ("stack.attention.gate={activation: relu, per: head}", ("extents",)),
    "buckets of distances behind a mask": (
        "stack.attention={kind: mha, n_heads: 4, position: {kind: t5, n_buckets: 8}, mask: {left: 1, right: 0}}",
        ("every-row",),
    ),
    "a scaling that begins early": (ROPE.replace("LENGTH", "4"), ("neutral", "meaning")),
    "vectors instead of logits, which `keep` leaves alone": ("logits={block: norm}", ("cached-types",)),
    "the first token, without positions": (
        "stack.block=encoder; logits={block: pooler}",
        ("token-order",),
    ),
}


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
@pytest.mark.parametrize("what", RIGHT)
def test_it_holds(what: str, seed: int) -> None:
    change, names = RIGHT[what]
    sets = [*([] if "stages" in change else ["embedding.dropout=0"]), *change.split("; ")]
    graph = tfkit.loads(TEXT, sets=sets, plugins=PLUGINS)
    found = list(outcomes(Subject(graph, PLUGINS, seed), OWN.chosen(names)))
    assert [one.detail for one in found if one.status == "failed"] == []


def test_documents_are_compared_where_the_sequence_is_seen() -> None:
    """A scaling by the length of the row makes documents depend on each other; the check says at which component."""
    graph = tfkit.loads(TEXT, sets=[ROPE.replace("LENGTH", "4")], plugins=PLUGINS)
    (found,) = outcomes(Subject(graph, PLUGINS), OWN.chosen(["documents"]))
    assert (found.status, found.component) == ("failed", "stack.layers.0.attention")
