"""Pairwise masks: each of several documents in a row has the outputs that it has alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tfkit
from tfkit.component import AttentionBackend
from tfkit.graph.wiring import node_ignoring_pairs
from tfkit.spec.render import render_spec

from ..sampling import chosen
from .attentions import BACKENDS, FEATURES, spec

DOCUMENTS = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 3, 3], [1, 2, 2, 2, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1]])
"""In three rows; 0 is padding."""
PAIRS = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None, :]) & (DOCUMENTS[:, :, None] > 0)
TOKENS = torch.randint(17, (3, 9), generator=torch.Generator().manual_seed(0))
KINDS = {
    **{name: (layout, config, []) for name, (layout, config) in FEATURES.items() if layout in ("decoder", "encoder")},
    "learned": ("decoder", {}, ["graph.embedding.position=learned"]),
    "sinusoidal": ("encoder", {}, ["graph.embedding.position=sinusoidal"]),
    "temperature": ("decoder", {"position": "rope", "temperature": {"beta": 0.7, "original_max_len": 2}}, []),
}


def of_documents() -> Iterator[tuple[int, Tensor]]:
    """The row of each document, and its places there."""
    for row, numbers in enumerate(DOCUMENTS):
        yield from ((row, numbers == number) for number in numbers.unique().tolist() if number)


def built(name: str, backend: AttentionBackend = "sdpa") -> Any:
    layout, config, sets = KINDS[name]
    text = render_spec(spec(layout, config).spec.model)
    return tfkit.build(tfkit.loads(text, sets=sets), attention_backend=backend)


@pytest.mark.usefixtures("flex")
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("name", "backend"), chosen(product(KINDS, BACKENDS), [*zip(KINDS, cycle(BACKENDS))][::2]))
def test_each_document_has_the_logits_that_it_has_alone(name: str, backend: AttentionBackend) -> None:
    model = built(name, backend)
    with torch.no_grad():
        together = model(TOKENS, tokens_mask=PAIRS)
        for row, columns in of_documents():
            alone = model(TOKENS[row : row + 1, columns])[0]
            torch.testing.assert_close(together[row, columns], alone, atol=1e-5, rtol=0)
        padded = model(TOKENS, tokens_mask=(DOCUMENTS > 0))
    assert (together[0, 3:] - padded[0, 3:]).abs().max() > 1e-3  # without pairs, documents see each other


def test_losses_are_those_of_separate_rows() -> None:
    model = built("learned")
    packed = tfkit.loss(model, {"tokens": TOKENS, "tokens_mask": PAIRS}, reduction="sum")
    logits = [model(TOKENS[row : row + 1, columns])[0] for row, columns in of_documents()]
    tokens = [TOKENS[row, columns] for row, columns in of_documents()]
    alone = [F.cross_entropy(value[:-1], ids[1:], reduction="sum") for value, ids in zip(logits, tokens, strict=True)]
    assert packed.item() == pytest.approx(sum(value.item() for value in alone), abs=1e-4)
    mean = tfkit.loss(model, {"tokens": TOKENS, "tokens_mask": PAIRS})
    assert mean.item() == pytest.approx(packed.item() / sum(len(ids) - 1 for ids in tokens), abs=1e-5)


def test_a_mask_of_pairs_that_is_one_of_padding() -> None:
    model, real = built("learned"), DOCUMENTS > 0
    with torch.no_grad():
        expected = model(TOKENS, tokens_mask=real)
        actual = model(TOKENS, tokens_mask=real[:, :, None] & real[:, None, :])
    torch.testing.assert_close(actual[real], expected[real], atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["learned", "temperature", "encoder_alibi"])
def test_scripts_read_them_too(name: str) -> None:
    model = built(name).eval()
    with pytest.warns(UserWarning, match="TorchScript type system"):
        script = torch.jit.script(model)
    with torch.no_grad():
        torch.testing.assert_close(script(TOKENS, tokens_mask=PAIRS), model(TOKENS, tokens_mask=PAIRS))


@pytest.mark.slow
def test_compiled_models_read_them_too() -> None:
    torch._dynamo.reset()
    model = built("learned").eval()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(TOKENS, PAIRS), model(TOKENS, PAIRS))


# ---- models that cannot ----

POOLED = """\
tfkit: 1
name: m
d_model: 16
vocab_size: 17
graph:
  e: {block: embedding}
  s: {block: encoder, n_layers: 1, attention: {kind: mha, n_heads: 2}, ffn: {kind: relu, d_ff: 24}}
  p: {block: pooler, select: mean}
  c: {block: classifier, n_classes: 3}
"""


def test_a_pooler_knows_no_documents() -> None:
    graph = tfkit.loads(POOLED)
    assert node_ignoring_pairs(graph) == "p"
    with pytest.raises(ValueError, match="tokens_mask has pairs of tokens"):
        tfkit.build(graph)(TOKENS, tokens_mask=PAIRS)


JOINED = (
    POOLED.split("  p:", maxsplit=1)[0]
    + """\
  n: {block: norm, input: e}
  joined: {block: concat, inputs: [s, n], along: length}
  same_width: {block: linear}
  head: {block: lm_head}
"""
)


def test_sequences_joined_by_position_stay_apart_and_those_joined_in_a_row_do_not() -> None:
    graph = tfkit.loads(JOINED)
    assert node_ignoring_pairs(graph) == "joined"
    with pytest.raises(ValueError, match="tokens_mask has pairs of tokens"):
        tfkit.build(graph)(TOKENS, tokens_mask=PAIRS)
    model = tfkit.build(tfkit.loads(JOINED, sets=["joined.along=width"]))
    assert node_ignoring_pairs(model.meta["graph"]) is None
    with torch.no_grad():
        together = model(TOKENS, tokens_mask=PAIRS)
        for row, columns in of_documents():
            alone = model(TOKENS[row : row + 1, columns])[0]
            torch.testing.assert_close(together[row, columns], alone, atol=1e-5, rtol=0)


def test_a_memory_is_read_as_a_whole() -> None:
    sizes = ["d_model=16", "vocab_size=17", *(f"{value}.n_layers=1" for value in ("encoder", "decoder"))]
    graph = tfkit.load("t5_small", sets=sizes)
    assert node_ignoring_pairs(graph) == "decoder"
    with pytest.raises(ValueError, match="source_mask has pairs of tokens"):
        tfkit.build(graph)(TOKENS, TOKENS, source_mask=PAIRS)


def test_caches_know_no_documents() -> None:
    model = built("learned").eval()
    with pytest.raises(ValueError, match="mask has pairs of tokens"):
        tfkit.CachedModel(model, length=12)(TOKENS, PAIRS)
    with pytest.raises(ValueError, match="mask has pairs of tokens"):
        tfkit.generate(model, TOKENS, max_new_tokens=1, mask=PAIRS)


def test_a_mask_of_other_pairs_is_named() -> None:
    with pytest.raises(ValueError, match=r"`tokens_mask` must be bool \[3, 9, 9\]"):
        built("learned")(TOKENS, tokens_mask=PAIRS[:, :, :5])


def test_decoders_and_encoders_obey() -> None:
    assert all(node_ignoring_pairs(spec(layout, config)) is None for layout, config, _ in KINDS.values())
