"""Checks of inputs: invalid masks and sequences beyond `max_len` are errors in every calling convention."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import tfkit
from tfkit.graph.input_shapes import max_len_text

from ..sampling import chosen, some

MAX_LEN = 8
HEAD = "tfkit: 1\nname: m\nd_model: 16\nvocab_size: 13\nmax_len: 8\n"
LAYERS = "n_layers: 1, attention: {kind: mha, n_heads: 2%s}, ffn: {kind: relu, d_ff: 24}"
DECODER = HEAD + "graph:\n  e: {block: embedding%s}\n  d: {block: decoder, " + LAYERS + "}\n  l: {block: lm_head}\n"
POSITIONS = {
    "rope": DECODER % ("", ", position: rope"),
    "learned": DECODER % (", position: learned", ""),
    "sinusoidal": DECODER % (", position: sinusoidal", ""),
    "none": DECODER % ("", ""),
}
PAIR = f"""{HEAD}
inputs: [source, target]
graph:
  source_embedding: {{block: embedding, input: source}}
  encoder: {{block: encoder, {LAYERS % ""}}}
  target_embedding: {{block: embedding, input: target}}
  decoder: {{block: decoder, memory: encoder, {LAYERS % ""}}}
  logits: {{block: lm_head}}
"""
CLASSES = f"""{HEAD}
graph:
  e: {{block: embedding}}
  s: {{block: encoder, {LAYERS % ""}}}
  p: {{block: pooler, select: mean}}
  c: {{block: classifier, n_classes: 3}}
"""


def model_of(text: str, *sets: str) -> fx.GraphModule:
    return tfkit.build(tfkit.loads(text, sets=sets)).eval()


def tokens_of(length: int, batch: int = 2) -> Tensor:
    return torch.arange(batch * length).view(batch, length) % 13


REAL = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
BAD_MASKS = {
    "added": torch.where(REAL == 1, 0.0, -math.inf),
    "added, finite": torch.where(REAL == 1, 0.0, -1e9),
    "added, whole": torch.where(REAL == 1, 0, -10_000),
    "half": torch.where(REAL == 1, 0.0, -math.inf).half(),
    "floats": REAL.float(),
    "counts": REAL * 2,
}


def cached(model: fx.GraphModule, tokens: Tensor, mask: Tensor | None = None) -> Any:
    return tfkit.CachedModel(model, length=min(tokens.size(1), MAX_LEN) + 1)(tokens, mask)


def generated(model: fx.GraphModule, tokens: Tensor, mask: Tensor | None = None) -> Any:
    return tfkit.generate(model, tokens, max_new_tokens=1, mask=mask).tokens


def loss(model: fx.GraphModule, tokens: Tensor, mask: Tensor | None = None) -> Any:
    return tfkit.Loss(model)(tokens if mask is None else {"tokens": tokens, "tokens_mask": mask})


def scripted(model: fx.GraphModule, tokens: Tensor, mask: Tensor | None = None) -> Any:
    with pytest.warns(UserWarning, match="TorchScript type system"):
        script = torch.jit.script(model)
    return script(tokens, mask)


CALLS: dict[str, Callable[..., Any]] = {
    "forward": lambda model, tokens, mask=None: model(tokens, mask),
    "attention weights": lambda model, tokens, mask=None: tfkit.attention_weights(model, tokens, tokens_mask=mask),
    "CachedModel": cached,
    "generate": generated,
    "Loss": loss,
    "TorchScript": scripted,
}


# ---- masks ----


@pytest.mark.parametrize(("call", "bad"), chosen(product(CALLS, BAD_MASKS), {*zip(CALLS, cycle(BAD_MASKS))}))
def test_a_mask_that_is_not_one_is_an_error(call: str, bad: str) -> None:
    with pytest.raises(
        (ValueError, torch.jit.Error), match=r"mask is not bool or 0 and 1, .*: `mask\.bool\(\)`; if additive, `"
    ):
        CALLS[call](model_of(POSITIONS["rope"]), tokens_of(5), BAD_MASKS[bad])


NUMBERS = (torch.int64, torch.int32, torch.uint8)


@pytest.mark.parametrize(("call", "dtype"), chosen(product(CALLS, NUMBERS), {*zip(CALLS, cycle(NUMBERS))}))
def test_zeros_and_ones_are_a_mask(call: str, dtype: torch.dtype) -> None:
    model = model_of(POSITIONS["learned"])
    actual, expected = (CALLS[call](model, tokens_of(5), mask) for mask in (REAL.to(dtype), REAL.bool()))
    torch.testing.assert_close(actual, expected, atol=0, rtol=0)


@pytest.mark.parametrize("name", ["source_mask", "target_mask"])
def test_masks_of_two_sequences_are_named(name: str) -> None:
    model, options = model_of(PAIR), {"source": tokens_of(5), "target": tokens_of(5)}
    with pytest.raises(ValueError, match=f"{name} is not bool"):
        model(**options, **{name: BAD_MASKS["added"]})


@pytest.mark.parametrize("bad", BAD_MASKS)
def test_a_memory_mask_of_cached_decoding(bad: str) -> None:
    with pytest.raises(ValueError, match="source_mask is not bool"):
        tfkit.CachedModel(model_of(PAIR), length=8).start(2, source=tokens_of(5), source_mask=BAD_MASKS[bad])
    inputs = {"source": tokens_of(5), "source_mask": BAD_MASKS[bad]}
    with pytest.raises(ValueError, match="source_mask is not bool"):
        tfkit.generate(model_of(PAIR), [[0], [0]], max_new_tokens=1, **inputs)


def test_a_mask_that_only_a_pooler_and_an_encoder_read() -> None:
    with pytest.raises(ValueError, match="tokens_mask is not bool"):
        model_of(CLASSES)(tokens_of(5), tokens_mask=BAD_MASKS["added"])


GAP = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
BY_DISTANCE = ["position: rope", "position: alibi", "position: t5", "mask: {left: 1, right: 0}"]


@pytest.mark.parametrize("attention", BY_DISTANCE)
def test_padding_between_tokens_is_an_error_where_distances_count_it(attention: str) -> None:
    model = model_of(DECODER % ("", f", {attention}"))
    with pytest.raises(ValueError, match="padding must not be between tokens"):
        model(tokens_of(5), GAP)


@pytest.mark.parametrize("position", ["learned", "none"])
@torch.no_grad()
def test_padding_between_tokens_where_tokens_are_counted(position: str) -> None:
    model, tokens = model_of(POSITIONS[position]), tokens_of(5)
    torch.testing.assert_close(model(tokens, GAP)[:1, GAP[0]], model(tokens[:1, GAP[0]]))


@pytest.mark.parametrize("attention", BY_DISTANCE)
@pytest.mark.parametrize("row", [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0]])
def test_padding_at_the_sides_is_none_between_tokens(attention: str, row: list[int]) -> None:
    model_of(DECODER % ("", f", {attention}"))(tokens_of(5, 1), torch.tensor([row]))


def test_no_device_waits_for_a_mask() -> None:
    """On the meta device no value can be looked at, as on an accelerator none is: types alone decide there."""
    model = tfkit.build(tfkit.loads(POSITIONS["rope"]), device="meta")
    tokens, mask = tokens_of(5).to("meta"), BAD_MASKS["counts"].to("meta")
    assert model(tokens, mask).shape == (2, 5, 13)
    with pytest.raises(ValueError, match="tokens_mask is not bool"):
        model(tokens, mask.float())


@pytest.mark.slow
def test_a_compiled_model_takes_numbers() -> None:
    torch._dynamo.reset()
    model = model_of(POSITIONS["rope"])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tokens_of(5), REAL), model(tokens_of(5), REAL))


# ---- lengths ----


@pytest.mark.parametrize("call", chosen(CALLS, CALLS.keys() - {"TorchScript"}))
@pytest.mark.parametrize("position", some(POSITIONS, 1))
def test_more_tokens_than_max_len_are_an_error(call: str, position: str) -> None:
    model = model_of(POSITIONS[position])
    CALLS[call](model, tokens_of(MAX_LEN - 1))
    words = f"more than {max_len_text(MAX_LEN)}|the maximum length of the model|do not fit"
    with pytest.raises((ValueError, torch.jit.Error), match=words.replace("(", r"\(").replace(")", r"\)")):
        CALLS[call](model, tokens_of(MAX_LEN + 1))


@pytest.mark.parametrize("position", POSITIONS)
def test_the_forward_says_what_graph_limits_say(position: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the message is compared below
        model_of(POSITIONS[position])(tokens_of(MAX_LEN + 1))
    assert str(caught.value) == f"the 9 tokens of `tokens` are more than {max_len_text(MAX_LEN)}"


@pytest.mark.parametrize("options", ["source", "target"])
def test_both_sequences_of_a_pair(options: str) -> None:
    lengths = {"source": 3, "target": 3} | {options: MAX_LEN + 1}
    with pytest.raises(ValueError, match=f"the 9 tokens of `{options}` are more than max_len"):
        model_of(PAIR)(**{name: tokens_of(length) for name, length in lengths.items()})


@pytest.mark.parametrize("position", ["rope", "sinusoidal", "none"])
def test_the_way_to_longer_sequences_keeps_all_weights(position: str) -> None:
    """Extrapolation is asked for: with a larger max_len, everything else is as it was."""
    short, long = model_of(POSITIONS[position]), model_of(POSITIONS[position], "max_len=32")
    long.load_state_dict(short.state_dict())
    torch.testing.assert_close(long(tokens_of(8)), short(tokens_of(8)), atol=0, rtol=0)
    assert long(tokens_of(20)).shape == (2, 20, 13)


def test_without_max_len_nothing_is_too_long() -> None:
    text = POSITIONS["rope"].replace("max_len: 8\n", "")
    assert model_of(text)(tokens_of(50)).shape == (2, 50, 13)


def test_learned_positions_have_a_limit_of_their_own() -> None:
    text = POSITIONS["learned"].replace("max_len: 8\n", "").replace("learned", "{kind: learned, max_len: 6}")
    with pytest.raises(ValueError, match=r"the 7 tokens of `tokens` are more than max_len \(6\)"):
        model_of(text)(tokens_of(7))


@pytest.mark.slow
def test_an_exported_program_has_the_limit() -> None:
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(model_of(POSITIONS["rope"]), (tokens_of(5),), dynamic_shapes=(free,))
    assert program.module()(tokens_of(MAX_LEN)).shape == (2, MAX_LEN, 13)
    with pytest.raises(AssertionError, match="Guard failed"):
        program.module()(tokens_of(MAX_LEN + 1))
