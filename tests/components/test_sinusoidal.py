"""The three sinusoidal tables of published models, each compared with published code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import yaml
from torch import Tensor
from transformers.models.ctrl.modeling_ctrl import positional_encoding
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings
from transformers.models.fsmt.modeling_fsmt import SinusoidalPositionalEmbedding as FSMTPositions
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding as M2M100Positions
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding as MarianPositions
from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding as XGLMPositions

import tfkit
from tfkit.checkpoint.computed import writing_function

D = 16
LENGTH = 9
IDS = torch.full((1, LENGTH), 5)


def marian() -> Tensor:
    table = MarianPositions(LENGTH, D)
    return table.create_weight()


def interleaved() -> Tensor:
    table = torch.empty(LENGTH, D)
    create_sinusoidal_embeddings(LENGTH, D, table)
    return table


FAIRSEQ = "{kind: sinusoidal, layout: half, endpoint: true, offset: 2}"
TABLES: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "m2m_100": (FAIRSEQ, lambda: M2M100Positions(32, D, 1)(IDS)[0]),
    "xglm": (FAIRSEQ, lambda: XGLMPositions(32, D, 1)(torch.arange(LENGTH)[None])[0]),
    "fsmt": (FAIRSEQ, lambda: FSMTPositions.get_embedding(32, D, 1)[2 : 2 + LENGTH]),
    "marian": ("{kind: sinusoidal, layout: half}", marian),
    "ctrl": ("{kind: sinusoidal, layout: half}", lambda: positional_encoding(LENGTH, D, torch.float)),
    "distilbert": ("sinusoidal", interleaved),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_that_of(name: str) -> None:
    position, table = TABLES[name]
    torch.testing.assert_close(added(position, IDS), table(), rtol=1e-5, atol=1e-6)


def test_a_table_is_written_with_the_rows_before_its_first_position() -> None:
    embedding = {"block": "embedding", "position": yaml.safe_load(FAIRSEQ), "max_len": LENGTH}
    spec = {"tfkit": 1, "name": "t", "d_model": D, "vocab_size": 9, "graph": {"embedding": embedding}}
    text = "sinusoids(embedding.position, embedding.max_len)"
    table = writing_function(tfkit.build(tfkit.load(spec)), "table.weight", text)
    assert table is not None
    expected = FSMTPositions.get_embedding(LENGTH + 2, D, 1)
    assert table().shape == expected.shape
    torch.testing.assert_close(table()[2:], expected[2:], rtol=1e-5, atol=1e-6)


def test_padding_is_not_counted() -> None:
    """Of theirs: the positions of the tokens are those that they would have alone."""
    ids = torch.tensor([[1, 1, 5, 7, 6]])
    theirs = M2M100Positions(32, D, 1)(ids)[0]
    torch.testing.assert_close(added(FAIRSEQ, ids, ids != 1)[2:], theirs[2:], rtol=1e-5, atol=1e-6)


def added(position: str, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """What an embedding adds to its tokens, [t, d]."""
    text = f"tfkit: 1\nname: test\nd_model: {D}\nvocab_size: 11\ngraph:\n  embedding: {{block: embedding}}\n"
    model = tfkit.build(tfkit.loads(text, sets=[f"graph.embedding.position={position}"]))
    actual: Tensor = model(ids, mask) - model.embedding.tokens(ids)
    return actual[0].detach()
