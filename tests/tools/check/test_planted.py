"""Each planted bug breaks the property that is listed for it; without the bug, no property is broken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tfkit_streams import altup
from torch import Tensor

import tfkit
from tfkit.components import layer
from tfkit.components.attention_core import ScaledDotProduct
from tfkit.nn import Context, wires_of
from tfkit.nn.context import with_values
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.check.reduced import reduced_model

from ...sampling import some
from .models import PLUGINS, measured, subject
from .planted import BUGS, Bug
from .planted.attention import first_is_larger

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("bug", some(BUGS, 8), ids=lambda bug: bug.bug)
def test_the_property_breaks(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = subject(bug.model)
    for owner, name, instead in bug.patches:
        monkeypatch.setattr(owner, name, instead)
    actual = measured(checked, bug.red)
    assert actual.status == "failed", "nothing sees it"
    assert actual.detail


@pytest.mark.parametrize("name", ["gpt2", "llama", "normed"])
def test_a_larger_head_is_seen_in_every_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(subject(name), "head-order").status == "ok"
    monkeypatch.setattr(ScaledDotProduct, "forward", first_is_larger)
    assert "heads in reverse order change the outputs by" in measured(subject(name), "head-order").detail


def test_slopes_belong_to_their_heads() -> None:
    assert measured(subject("bloom"), "head-order").status == "does not apply"


PAIRS = sorted({(bug.model, bug.red) for bug in BUGS})


@pytest.mark.parametrize(("name", "red"), some(PAIRS, 6))
def test_it_holds_without_the_bug(name: str, red: str) -> None:
    actual = measured(subject(name), red)
    assert actual.status == "ok", actual.detail


def test_the_page_has_each_bug_and_the_property_that_sees_it() -> None:
    page = (ROOT / "docs" / "check_bugs.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*?) \| (?:\[(.*?)\].*?|(.*?)) \| `(.*?)`", page, re.MULTILINE)
    actual = {(bug, link or words, red) for bug, link, words, red in rows}
    assert {(bug.bug, bug.where, bug.red) for bug in BUGS} <= actual


def test_no_bug_is_there_twice() -> None:
    assert len({bug.bug for bug in BUGS}) == len(BUGS)


SHARED = """
tfkit: 1
name: shared
d_model: 32
vocab_size: 97
norm: rmsnorm
graph:
  embedding: embedding
  decoder:
    block: decoder
    n_layers: 7
    attention: {kind: mha, n_heads: 4, position: rope, kv_name: near}
    ffn: {kind: swiglu, d_ff: 64}
    layers:
      variants:
        taking: {attention: {kv_name: null, kv_from: near}}
      pattern: [base*3, taking*2, base, taking]
  logits: lm_head
"""


def first_given(context: Context, wires: dict[str, Tensor]) -> Context:
    return with_values(context, wires={**wires, **wires_of(context)})


def test_the_last_of_several_givers_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = reduced_model(tfkit.loads(SHARED, plugins=PLUGINS), PLUGINS).graph
    decoder = graph.node("decoder").stack
    assert decoder is not None
    assert [layer.name for layer in decoder.layers] == ["base", "base", "taking"]
    assert measured(ModelUnderTest(graph, PLUGINS), "meaning").status == "ok"
    monkeypatch.setattr(layer, "with_wires", first_given)
    assert measured(ModelUnderTest(graph, PLUGINS), "meaning").component == "decoder.layers.2.attention"


def test_two_givers_of_a_short_pattern_are_kept() -> None:
    short = SHARED.replace("[base*3, taking*2, base, taking]", "[base, taking]")
    stack = reduced_model(tfkit.loads(short, plugins=PLUGINS), PLUGINS).graph.node("decoder").stack
    assert stack is not None
    assert [layer.name for layer in stack.layers] == ["base", "taking", "base", "taking"]


def test_a_value_around_layers_of_several_variants_has_an_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be changed only in all variants together, and a clip may act only in training."""
    around = "    layer_features: features\n    around: {kind: altup, streams: 3, clip: 120.0, activation: tanh}\n"
    features = """
  table: {block: embedding, input: tokens, d_model: 56}
  features: {block: layer_inputs, inputs: [embedding, table]}
  decoder:
    input: embedding"""
    text = SHARED.replace("    layers:", f"{around}    layers:").replace("\n  decoder:", features)
    text = text.replace("embedding: embedding", "embedding: {block: embedding, input: tokens}") + "d_features: 8\n"
    graph = reduced_model(tfkit.loads(text, plugins=PLUGINS), PLUGINS).graph
    assert measured(ModelUnderTest(graph, PLUGINS), "values").status == "ok"
    clipped = altup.Clipped
    monkeypatch.setattr(altup, "Clipped", lambda d_in, d_out, clip: clipped(d_in, d_out, None))
    assert "`decoder.around.clip` has no effect" in measured(ModelUnderTest(graph, PLUGINS), "values").fault
