"""Mixers from a plugin in every place of a layer: read at once, incrementally, with padding, and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, fx, nn

import tfkit
from tfkit import CachedModel
from tfkit.components.decoder import DecoderConfig
from tfkit.graph.decode_split import split_for_decoding
from tfkit.graph.wiring import node_ignoring_pairs
from tfkit.nn import Context, order_tokens, restore_order, token_order
from tfkit.reference import Part
from tfkit.reference.model import Array
from tfkit.run.checked_run import mask_of
from tfkit.testing import Layout, check_cached, check_component, check_model, example_inputs
from tfkit.testing.component import raise_faults
from tfkit.tools.check.components import with_component
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.draw.model_scene import scene_of
from tfkit.tools.draw.scene import Tower
from tfkit.tools.show.layer_programs import programs_of

from ..decoding import small
from ..decoding.small import spec_of
from ..sampling import chosen, slow

PLUGINS = tfkit.load_plugins(plugin_dirs=[Path(__file__).parent], entry_points=False)
ATTENTION = {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2, "position": "rope"}
STACKS: dict[str, dict[str, Any]] = yaml.safe_load("""
alone: {mixer: gated_conv}
wide_state: {mixer: decay}
without_state: {mixer: {kind: gated_conv, size: 1}}
before_attention: {mixer: gated_conv, attention: &gqa {kind: gqa, n_heads: 4, n_kv_heads: 2, position: rope}}
after_attention: {mixer: decay, attention: *gqa, sublayers: [attention, mixer, ffn]}
twice: {mixer: {kind: gated_conv, size: 4}, attention: *gqa, sublayers: [mixer, attention, mixer, ffn, attention]}
alternating:
  n_layers: 4
  mixer: gated_conv
  layers:
    variants:
      full: {mixer: null, attention: *gqa}
      window: {mixer: decay, attention: {kind: mha, n_heads: 2, position: alibi, mask: {left: 2, right: 0}}}
    pattern: [base, full, window]
parallel:
  mixer: gated_conv
  attention: *gqa
  input_norm: true
  sublayers: [{sublayer: mixer, reads: input, norm_in: false}, {sublayer: attention, reads: input, norm_in: false}, ffn]
shared_weights: {n_layers: 4, mixer: gated_conv, attention: *gqa, layers: {groups: 2}}
in_an_attention: {attention: {kind: conv_attention, n_heads: 4, position: rope}}
in_an_attention_after_a_mixer: {mixer: decay, attention: {kind: conv_attention, n_heads: 4, position: rope}}
""")
SPECS = {name: spec_of(fields) for name, fields in STACKS.items()}
SPECS["with_a_memory"] = spec_of(
    {"mixer": "gated_conv", "attention": {"n_heads": 4}, "memory": "source"}, source={"type": "features", "width": 12}
)
HYBRID = SPECS["alternating"]
PURE = ("alone", "wide_state", "without_state")
"""Models without positions: padding may lie between the tokens of a full forward."""
QUICK_SPECS = {"alone", "in_an_attention_after_a_mixer"}
"""Models that show most of what the remaining ones show."""
LENGTH = 13
CUTS = ([1] * LENGTH, [7, 1, 5], [LENGTH - 1, 1])


def build(spec: str) -> fx.GraphModule:
    return small.build(tfkit.loads(spec, plugins=PLUGINS))


def tokens() -> Tensor:
    return torch.randint(23, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def masks() -> dict[str, Tensor]:
    """Three rows of 13, 9 and 6 tokens, with padding in each place."""
    columns, counts = torch.arange(LENGTH), torch.tensor([[LENGTH], [9], [6]])
    order = torch.stack([torch.randperm(LENGTH, generator=torch.Generator().manual_seed(row)) for row in range(3)])
    return {"left": columns >= LENGTH - counts, "right": columns < counts, "between": order < counts}


def alone(model: fx.GraphModule, ids: Tensor, mask: Tensor) -> list[Tensor]:
    return [model(row[real][None])[0] for row, real in zip(ids, mask, strict=True)]


def assert_rows(output: Tensor, mask: Tensor, expected: list[Tensor]) -> None:
    for row, real, logits in zip(output, mask, expected, strict=True):
        torch.testing.assert_close(row[real], logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", chosen(SPECS, QUICK_SPECS))
def test_tokens_read_incrementally_have_the_logits_of_one_forward(name: str) -> None:
    model = build(SPECS[name])
    check_cached(model, example_inputs(model.meta["graph"], length=LENGTH))


@pytest.mark.parametrize("name", chosen(STACKS, QUICK_SPECS))
@pytest.mark.parametrize("side", ["left", "right", "between"])
@torch.no_grad()
def test_a_padded_row_is_the_row_alone(name: str, side: str) -> None:
    model, ids, mask = build(SPECS[name]), tokens(), masks()[side]
    expected = alone(model, ids, mask)
    if side != "between" or name in PURE:
        assert_rows(model(ids, tokens_mask=mask), mask, expected)
    for cut in CUTS:
        cached = CachedModel(model, length=LENGTH)
        chunks = zip(ids.split(cut, dim=1), mask.split(cut, dim=1), strict=True)
        assert_rows(torch.cat([cached(*piece) for piece in chunks], dim=1), mask, expected)


@pytest.mark.parametrize("name", ["alone", "wide_state", "alternating", "in_an_attention_after_a_mixer"])
def test_padding_alone_changes_no_state(name: str) -> None:
    model, ids = build(SPECS[name]), tokens()
    cached = CachedModel(model, length=2 * LENGTH)
    cached(ids)
    states = [tensor.clone() for tensor in of_states(cached)]
    assert states
    cached(ids.flip(0), torch.zeros_like(ids, dtype=torch.bool))
    assert all(torch.equal(old, new) for old, new in zip(states, of_states(cached), strict=True))


def of_states(cached: CachedModel) -> list[Tensor]:
    entries = [entry for layer in cached._parts.step_nodes["decoder"][1].caches for entry in layer]
    tensors = [tensor for layer in cached._cache["decoder"] for tensor in layer]
    return [x for x, entry in zip(tensors, entries, strict=True) if isinstance(entry, tfkit.State)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_wide_state_has_at_least_float32(dtype: torch.dtype) -> None:
    cached = CachedModel(build(SPECS["wide_state"]).to(dtype), length=LENGTH)
    cached(tokens())
    assert cached.dtypes == {torch.promote_types(dtype, torch.float32)}
    assert CachedModel(build(SPECS["alone"]).to(dtype), length=LENGTH).dtypes == set()
    narrow = CachedModel(build(SPECS["alone"]).to(dtype), length=LENGTH)
    narrow(tokens())
    assert narrow.dtypes == {dtype}


def test_a_ragged_batch_generates_what_each_prompt_does_alone() -> None:
    model, prompts = build(HYBRID), [[1, 2, 3, 4, 5], [6], [7, 8]]
    together = tfkit.generate(model, prompts, max_new_tokens=6)
    for row, prompt in zip(together.tokens, prompts, strict=True):
        assert torch.equal(row, tfkit.generate(model, [prompt], max_new_tokens=6).tokens[0])


def test_samples_continue_the_state_of_their_prompt() -> None:
    """A sample of a prompt is the same whether other prompts, or other samples, stand next to it."""
    model, prompts = build(SPECS["wide_state"]), [[1, 2, 3, 4, 5], [6, 9], [7, 8, 9]]
    cached = CachedModel(model, length=LENGTH)
    ids = tokens()
    cached(ids[:, :6])
    cached.repeat(2)
    result = cached(ids[:, 6:].repeat_interleave(2, dim=0))
    torch.testing.assert_close(result, model(ids)[:, 6:].repeat_interleave(2, dim=0), atol=1e-5, rtol=1e-5)
    samples = tfkit.generate(model, prompts, max_new_tokens=5, temperature=1.0, n_samples=2).tokens
    for number, prompt in enumerate(prompts):
        rows = tfkit.generate(model, [prompt], max_new_tokens=5, temperature=1.0, n_samples=2, first_prompt=number)
        assert torch.equal(rows.tokens, samples[2 * number : 2 * number + 2])


def test_tokens_come_first_in_their_order() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    x = torch.arange(1.0, 16).view(3, 5, 1)
    padding, order, documents = token_order(mask)
    context = Context(None, None, None, padding=padding, order=order)
    first = order_tokens(x, context)
    assert documents is None
    assert padding.sum(dim=1).tolist() == [3, 5, 0]
    assert first[0, :, 0].tolist() == [2, 3, 5, 1, 4]
    assert torch.equal(first[1:], x[1:])
    assert torch.equal(restore_order(first, context), x)


def test_the_tokens_of_a_document_are_neighbours() -> None:
    of = torch.tensor([[0, 1, 0, -1, 1, 0], [2, 2, 2, 2, 3, 3]])
    mask = (of[:, :, None] == of[:, None]) & (of >= 0)[:, None]
    for pairs in (mask, mask.tril()):
        padding, order, documents = token_order(pairs)
        x = torch.arange(12.0).view(2, 6, 1)
        context = Context(None, None, None, padding=padding, order=order, documents=documents)
        first = order_tokens(x, context)
        assert first[:, :, 0].tolist() == [[0, 2, 5, 1, 4, 3], [6, 7, 8, 9, 10, 11]]
        assert padding.sum(dim=1).tolist() == [5, 6]
        assert documents is not None
        assert documents.tolist() == [[0, 0, 0, 1, 1, 6], [0, 0, 0, 0, 4, 4]]
        assert torch.equal(restore_order(first, context), x)


def test_without_padding_nothing_moves() -> None:
    x, context = torch.ones(1, 2, 3), Context(None, None, None)
    assert order_tokens(x, context) is x
    assert restore_order(x, context) is x


@pytest.mark.parametrize(
    ("suffix", "tolerance"), [pytest.param("ts", 0), pytest.param("pt2", 1e-6), pytest.param("onnx", 1e-5)]
)
@pytest.mark.parametrize("name", ["alternating", "wide_state"])
@pytest.mark.slow
def test_exported_files_decode(tmp_path: Path, name: str, suffix: str, tolerance: float) -> None:
    exported = tfkit.export(build(SPECS[name]), tmp_path / f"m.{suffix}", plugins=PLUGINS)
    assert exported.difference <= tolerance
    assert sum("by cached decoding" in check.case for check in exported.checks) == 3


def test_what_a_layer_shows() -> None:
    graph = tfkit.loads(SPECS["parallel"], plugins=PLUGINS)
    layer = tfkit.build(graph).get_submodule("decoder.layers.0")
    assert "restore_order(self.mixer(order_tokens(input_norm, context), context), context)" in str(layer.code)
    program, _ = programs_of(graph)
    assert "x = x + mixer(input)" in program.lines
    tower = scene_of(graph).nodes["decoder"]
    assert isinstance(tower, Tower)
    assert [box.role for box in tower.layers[0].boxes() if box.role != "norm"] == ["mixer", "attention", "ffn"]


FULL = {"mixer": {"kind": "gated_conv", "size": 5}, "attention": ATTENTION}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no kind": ({"mixer": "unknown_mixer"}, "unknown_mixer"),
    "left out": ({**FULL, "sublayers": ["attention", "ffn"]}, "`mixer` has no effect"),
    "not there": ({"attention": ATTENTION, "sublayers": ["mixer", "attention", "ffn"]}, "has no `mixer` to run"),
    "misspelt": ({**FULL, "sublayers": ["mixr", "attention", "ffn"]}, "unknown sublayer `mixr`"),
    "another width": ({"mixer": {"kind": "gated_conv", "d_model": 8}}, "`mixer` must have the width of its stack"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    fields, message = REFUSED[name]
    with pytest.raises(tfkit.SpecError, match=message):
        tfkit.loads(spec_of(fields), plugins=PLUGINS)


class FourierConfig(tfkit.MixerConfig):
    """Mixes all positions, and keeps nothing."""

    kind: Literal["fourier"] = "fourier"

    def build(self, make: tfkit.Make) -> nn.Module:
        raise NotImplementedError


def test_a_mixer_without_states_is_named_where_it_would_have_to_decode() -> None:
    graph = tfkit.loads(spec_of({"mixer": "fourier"}), plugins=with_component(PLUGINS, FourierConfig))
    with pytest.raises(tfkit.SpecError, match="mixer `fourier` does not cache its tokens"):
        split_for_decoding(graph)


class SlotsConfig(FourierConfig):
    """Wants a slot for each token, whose order only an attention gets."""

    kind: Literal["slots"] = "slots"  # type: ignore[assignment]

    @property
    def cached(self) -> tuple[tfkit.Cached, ...]:
        return (tfkit.Cached(1, self.d_model),)


def test_a_mixer_has_no_slots_of_tokens() -> None:
    graph = tfkit.loads(spec_of({"mixer": "slots"}), plugins=with_component(PLUGINS, SlotsConfig))
    with pytest.raises(tfkit.SpecError, match="mixer `slots` must keep states, not slots of tokens"):
        split_for_decoding(graph)


def test_documents_in_a_row_are_refused_by_name() -> None:
    graph = tfkit.loads(HYBRID, plugins=PLUGINS)
    assert node_ignoring_pairs(graph) == "decoder"
    with pytest.raises(tfkit.Invalid, match="`decoder` carries a state across them") as error:
        mask_of(graph, ["tokens"])
    assert "rows of a single document" in str(error.value.help)
    pairs = torch.ones(3, LENGTH, LENGTH, dtype=torch.bool)
    with pytest.raises(ValueError, match="tokens_mask has pairs of tokens"):
        build(HYBRID)(tokens(), tokens_mask=pairs)


class ResamplerConfig(tfkit.SublayerConfig):
    """A slot for a sublayer that is neither an attention nor a mixer."""

    slot = "resampler"
    takes_context = False
    d_model: tfkit.Shared[tfkit.Dim]


class ResampleConfig(ResamplerConfig):
    """A linear layer."""

    kind: Literal["resample"] = "resample"

    def build(self, make: tfkit.Make) -> nn.Module:
        return tfkit.Linear(self.d_model, self.d_model, bias=False)


class ResamplingDecoderConfig(DecoderConfig):
    """A decoder with one more sublayer."""

    block: Literal["resampling_decoder"] = "resampling_decoder"  # type: ignore[assignment]
    resample: ResamplerConfig | None = None


@pytest.mark.parametrize("order", [slow(None), ["resample", "ffn", "attention"]])
def test_the_layer_of_a_plugin_brings_a_sublayer(order: list[str] | None) -> None:
    plugins = with_component(with_component(PLUGINS, ResampleConfig), ResamplingDecoderConfig)
    fields = {"block": "resampling_decoder", "attention": ATTENTION, "resample": "resample", "sublayers": order}
    model = small.build(tfkit.loads(spec_of({k: v for k, v in fields.items() if v is not None}), plugins=plugins))
    names = [step.name for step in model.meta["graph"].node("decoder").stack.layers[0].steps]
    assert names == (order or ["attention", "ffn", "resample"])
    check_cached(model, example_inputs(model.meta["graph"], length=LENGTH))


# ---- what tools say ----


def gated_conv(part: Part, x: Array) -> Array:
    """The definition of `gated_conv` in NumPy, of the tokens x [t, d_model] of one sequence."""
    before, after, x = np.split(part.at("input").linear(x, True), 3, axis=1)
    weight = part.at("conv").weight()
    padded = np.concatenate([np.zeros((weight.shape[1] - 1, x.shape[1])), before * x])
    windows = [padded[i : i + weight.shape[1]] for i in range(len(x))]
    y = np.array([(window * weight.T).sum(axis=0) for window in windows]).reshape(x.shape)
    return part.at("output").linear(after * y, True)


def decay(part: Part, x: Array) -> Array:
    """The definition of `decay` in NumPy: a recurrence, token by token."""
    factor, state, rows = np.exp(-np.exp(part.weight("rate_log"))), np.zeros(x.shape[1]), []
    for token in part.at("input").linear(x, True):
        state = factor * state + (1 - factor) * token
        rows.append(state)
    return part.at("output").linear(np.array(rows).reshape(x.shape), True)


@pytest.mark.parametrize(("kind", "reference"), [("gated_conv", gated_conv), ("decay", decay)])
@pytest.mark.parametrize("layout", ["encoder", "decoder", "memory"])
@pytest.mark.slow
def test_check_component(kind: str, reference: Any, layout: Layout) -> None:
    check_component(kind, slot="mixer", plugins=PLUGINS, reference=reference, within=[layout])


@pytest.mark.parametrize("name", ["alternating", "in_an_attention_after_a_mixer", "parallel", "twice"])
@pytest.mark.slow
def test_check_model(name: str) -> None:
    check_model(tfkit.loads(SPECS[name], plugins=PLUGINS), plugins=PLUGINS)


@pytest.mark.slow
def test_programs_and_meaning() -> None:
    kinds = {"mixer": {"gated_conv": gated_conv, "decay": decay}}
    subject = ModelUnderTest(tfkit.loads(HYBRID, plugins=PLUGINS), PLUGINS, kinds=kinds)
    raise_faults("hybrid", {"": subject}, PLUGINS, "full", ["meaning", "cached-step", "eject"])
