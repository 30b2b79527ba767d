"""Correct models that a careless property would report as faulty."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import tfkit
from tfkit.tools.check.check import outcomes_of
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.check.properties import costs
from tfkit.tools.check.properties.numbers import _distance_of_tokens
from tfkit.tools.check.properties.steps import SequenceBatch, reading_schedules
from tfkit.tools.check.properties.training import parameter_gradients
from tfkit.tools.check.reduced import reduced_model
from tfkit.tools.check.runs import arguments_of
from tfkit.tools.params.count import count_params

from ...sampling import chosen, slow, spread
from .models import PROPERTIES, faults, measured

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
BEHIND = """
tfkit: 1
name: behind
d_model: 16
vocab_size: 29
inputs: {first: tokens, second: tokens}
graph:
  one: {block: embedding, input: first}
  other: {block: embedding, input: second}
  both: {block: concat, inputs: [one, other]}
  stack:
    block: encoder
    n_layers: 1
    attention: {kind: mha, n_heads: 4, position: rope}
    ffn: {kind: gelu, d_ff: 16}
"""
SCALED = "stack.attention.position={kind: rope, width: 2, scaling: {SCALING}}"
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
    "rows of distances, none for later keys": (
        "stack.attention.position={kind: disentangled, max_distance: 6, n_buckets: 4}",
        ("every-row",),
    ),
    "rows of distances behind a mask": (
        "stack.attention={kind: mha, n_heads: 4, position: {kind: disentangled, max_distance: 6}, "
        "mask: {left: 3, right: 0}}",
        ("every-row",),
    ),
    "a scaling that begins early": (ROPE.replace("LENGTH", "4"), ("neutral", "meaning")),
    "one pair of channels, which turns alike for any theta": (
        "stack.attention.position={kind: rope, width: 2}",
        ("values",),
    ),
    "heads of two channels": ("stack.attention={kind: mha, n_heads: 4, d_head: 2, position: rope}", ("values",)),
    "one pair of several that turns": (
        "stack.attention.position={kind: rope, scaling: {kind: proportional, width: 2}}",
        ("values",),
    ),
    "one pair, whose wave is short": (
        SCALED.replace("SCALING", "kind: llama3, factor: 2, original_max_len: 16, high_freq_factor: 2"),
        ("values",),
    ),
    "one pair, whose temperature is given": (
        SCALED.replace("SCALING", "kind: yarn, factor: 2, original_max_len: 16, temperature: 1.1"),
        ("values",),
    ),
    "an embedding of two channels": (
        "embedding.d_embed=2; embedding.position=sinusoidal; logits={block: lm_head}",
        ("values",),
    ),
    "slopes for heads of one channel": (
        "stack.attention={kind: mha, n_heads: 4, d_head: 1, position: {kind: alibi, scaled: true}}",
        ("values",),
    ),
    "logits that are large without their softcap": (
        "vocab_size=53; init=torch; logits={block: lm_head, tie: embedding, softcap: 0.5}",
        ("neutral",),
    ),
    "vectors instead of logits, which `keep` leaves alone": ("logits={block: norm}", ("cached-types",)),
    "the first token, without positions": (
        "stack.block=encoder; logits={block: pooler}",
        ("token-order",),
    ),
    "a window behind a rule, which counts the tokens before padding": (
        "stack.block=encoder; logits={block: pooler}; "
        "stack.attention={kind: mha, n_heads: 4, mask: {left: 3, rule: {kind: blocks, size: 2}}}",
        ("extents",),
    ),
}


QUICK_NAMES = (
    "rows of distances, none for later keys",
    "rows of distances behind a mask",
    "a window behind a rule, which counts the tokens before padding",
)


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
@pytest.mark.parametrize("what", chosen(RIGHT, [*spread([*RIGHT], 3), *QUICK_NAMES]))
def test_it_holds(what: str, seed: int) -> None:
    change, names = RIGHT[what]
    sets = [*([] if "stages" in change else ["embedding.dropout=0"]), *change.split("; ")]
    graph = tfkit.loads(TEXT, sets=sets, plugins=PLUGINS)
    assert faults(ModelUnderTest(graph, PLUGINS, seed), names) == {}


@pytest.mark.parametrize("more", [-3, 0, 3])
def test_a_count_may_differ_in_neither_direction(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(model: object) -> object:
        counted = count_params(model)  # type: ignore[arg-type]
        return replace(counted, total=counted.total + more)

    monkeypatch.setattr(costs, "count_params", changed)
    plugins = tfkit.load_plugins(entry_points=False)
    subject = ModelUnderTest(reduced_model(tfkit.load("gpt2", plugins=plugins), plugins).graph, plugins)
    assert measured(subject, "counts").status == ("failed" if more else "ok")


def test_recording_the_inputs_of_modules_changes_no_output() -> None:
    """Also where layers share weights, so that a module runs several times."""
    checked = ModelUnderTest(reduced_model(tfkit.load("albert_base", plugins=PLUGINS), PLUGINS).graph, PLUGINS)
    outputs: list[torch.Tensor] = []
    checked.model.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    arguments_of(checked.model, checked.layers, checked.inputs())
    assert torch.equal(outputs[0], checked.run(checked.inputs())[0])


def test_the_inputs_of_a_module_that_runs_again_are_those_of_its_first_run() -> None:
    checked = ModelUnderTest(reduced_model(tfkit.load("albert_base", plugins=PLUGINS), PLUGINS).graph, PLUGINS)
    first = next(iter(checked.layers))
    arguments: list[torch.Tensor] = []
    checked.model.get_submodule(first).register_forward_pre_hook(lambda _module, args: arguments.append(args[0]))
    recorded = arguments_of(checked.model, [first], checked.inputs())[first]
    assert len(arguments) > 1
    assert torch.equal(recorded[0], arguments[0])
    assert not torch.equal(recorded[0], arguments[-1])


def test_a_first_step_has_the_blocks_of_its_own_tokens() -> None:
    sets = ["inputs={tokens: tokens, images: {type: positions}}", "embedding.input=tokens", "stack.input=embedding"]
    model = tfkit.build(tfkit.loads(TEXT, sets=[*sets, "stack.blocks=images"], plugins=PLUGINS))
    inputs = {
        "tokens": torch.arange(14).view(2, 7),
        "images": torch.tensor([[0, 1, 1, 2, 2, 2, 3], [4, 4, 4, 5, 5, 0, 6]]),
    }
    rows = SequenceBatch.of(model, inputs)
    assert rows.started_by(4).stepwise["images"].tolist() == [[0, 1, 1, 2, 0, 0, 0], [4, 4, 4, 5, 0, 0, 0]]
    padded = torch.tensor([[False, True, True], [False, False, True]])
    assert rows.started_by(padded).stepwise["images"].tolist() == [[0, 1, 0, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0, 0]]


def test_schedules_have_the_padding_of_their_names() -> None:
    batch, length = 4, 19
    schedules = reading_schedules(batch, length)
    changes = {}
    for name, schedule in schedules.items():
        masks = [step for step in schedule if isinstance(step, torch.Tensor)]
        assert sum(step.size(1) if isinstance(step, torch.Tensor) else step for step in schedule) >= length - 1
        steps = [step.int().diff(dim=1) for step in masks if step.size(1) > 1]
        changes[name] = (any((step > 0).any() for step in steps), any((step < 0).any() for step in steps))
    assert {name for name, change in changes.items() if change == (True, False)} == {"padded on the left"}
    assert {name for name, change in changes.items() if change == (False, True)} == {"padded on the right"}
    assert {name for name, change in changes.items() if change == (True, True)} == {"padded in between"}
    for side, order in (("left", 1), ("right", -1)):
        first = schedules[f"padded on the {side}"][0]
        assert isinstance(first, torch.Tensor)
        assert first.sum(dim=1).tolist() == [9, 8, 7, 6]
        assert torch.equal(first, first.int().mul(order).sort(dim=1).values.mul(order).bool())


@pytest.mark.parametrize("output", ["logits", "second"])
def test_each_output_must_be_finite_in_train_mode(output: str) -> None:
    second = "graph.second={block: lm_head, input: stack}"
    model = tfkit.build(tfkit.loads(TEXT, sets=[second, "outputs=[logits, second]"], plugins=PLUGINS))
    model.get_submodule(output).register_forward_hook(lambda _module, _args, y: y + torch.inf)
    (deviation,) = parameter_gradients(model, {"tokens": torch.arange(6)[None]})
    assert deviation.detail == "outputs are not finite in train mode"


def test_outputs_of_another_shape_are_infinitely_far_from_the_reference() -> None:
    """Even if they could be broadcast."""
    expected, real = np.ones((2, 3, 4)), np.ones((2, 3), dtype=bool)
    assert _distance_of_tokens(torch.ones(2, 3, 4), expected, real) == 0
    assert _distance_of_tokens(torch.ones(2, 3, 1), expected, real) == math.inf


def test_a_rotation_of_all_channels_stays_one_in_the_reduced_model() -> None:
    attention = "stack.attention={kind: mha, n_heads: 4, d_head: 24, position: {kind: rope, width: 24}}"
    graph = reduced_model(tfkit.loads(TEXT, sets=[attention], plugins=PLUGINS), PLUGINS).graph
    reduced: Any = graph.node("stack").config
    assert reduced.attention.position.width == reduced.attention.head_width < 24


def test_padding_between_tokens_is_compared_with_the_meaning() -> None:
    """Two sequences, one behind the other: a mask that is none of the inputs."""
    subject = ModelUnderTest(tfkit.loads(BEHIND, plugins=PLUGINS), PLUGINS)
    actual = {
        outcome.name: outcome.status
        for outcome in outcomes_of(subject, PROPERTIES.chosen(["extents", "padding", "meaning"]))
    }
    assert actual == {"extents": "ok", "padding": "does not apply", "meaning": "ok"}


def test_documents_are_compared_where_the_sequence_is_seen() -> None:
    """A scaling by the length of the row makes documents depend on each other; the check says at which component."""
    graph = tfkit.loads(TEXT, sets=[ROPE.replace("LENGTH", "4")], plugins=PLUGINS)
    actual = measured(ModelUnderTest(graph, PLUGINS), "documents")
    assert (actual.status, actual.component) == ("failed", "stack.layers.0.attention")


def test_documents_of_a_decoder_attend_to_the_same_memory() -> None:
    graph = reduced_model(tfkit.load("bart_base", plugins=PLUGINS), PLUGINS).graph
    assert measured(ModelUnderTest(graph, PLUGINS), "documents").status == "ok"
