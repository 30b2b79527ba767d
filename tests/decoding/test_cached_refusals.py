"""Errors of `CachedModel`."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import tfkit
from tfkit import CachedModel
from tfkit.graph.input_shapes import max_len_text

from .small import SPECS, build, cached


def ids(rows: int, columns: int) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.long)


MASK = torch.tensor([[False, False, True, True], [True, True, True, True]])
REFUSED = {
    "prefix": (
        "prefix",
        {"known": torch.tensor([2, 5])},
        (ids(2, 4),),
        {},
        "`known` is 5, but the first piece",
    ),
    "prefix_padded": ("prefix", {"known": torch.tensor([3, 2])}, (ids(2, 4), MASK), {}, "`known` is 3, but the first "),
    "no_prefix": ("prefix", None, (ids(2, 4),), {}, "missing: known"),
    "batch": ("decoder", {}, (ids(3, 4),), {}, "3 rows of tokens for 2 sequences: call `start`"),
    "mask": (
        "decoder",
        {},
        (ids(2, 3), MASK),
        {},
        r"the mask must have the shape of the tokens, \(2, 3\); got \(2, 4\)",
    ),
    "nothing": ("decoder", {}, (ids(2, 0),), {}, "a step must have at least one token"),
    "unknown": ("decoder", {}, (ids(2, 4),), {"types": ids(2, 4)}, "unknown inputs: types; possible inputs: none"),
    "types_missing": ("types", {}, (ids(2, 4),), {}, "missing: types"),
    "types_short": ("types", {}, (ids(2, 4),), {"types": ids(2, 3)}, r"`types` is \(2, 3\), and the tokens are \(2, 4"),
    "types_batch": ("types", {}, (ids(2, 4),), {"types": ids(1, 4)}, r"`types` is \(1, 4\), and the tokens are \(2, 4"),
    "no_memory": ("memory", {}, (ids(2, 4),), {}, "missing: source"),
    "memory_rows": (
        "memory",
        {"source": torch.ones(3, 4, 12)},
        (ids(2, 4),),
        {},
        "`source` has 3 rows, but the batch has 2",
    ),
    "memory_mask": (
        "memory",
        {"source": torch.ones(2, 5, 12), "source_mask": MASK},
        (ids(2, 4),),
        {},
        r"`source_mask` is \(2, 4\), but the input that it masks is \(2, 5\)",
    ),
    "long": ("decoder", {}, (ids(2, 13),), {}, "13 more tokens do not fit: 0 of 12 positions are used"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    name, start, args, options, message = REFUSED[case]
    model = cached(name)

    def read() -> None:
        if start is not None:
            model.start(2, **start)
        model(*args, **options)

    with pytest.raises(ValueError, match=message):
        read()


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        ("decoder", 41, f"a length of 41 tokens is more than {max_len_text(40)}"),
        ("decoder", 0, "`length` of `CachedModel` must be an integer of 1 or more or None; got 0"),
        ("features", None, "`m` has no max_len: set the maximum length of sequences, `length=...`"),
    ],
)
def test_lengths_that_are_refused(name: str, length: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        CachedModel(build(SPECS[name]), length=length)


def test_tokens_of_a_memory_have_the_length_of_the_spec() -> None:
    spec = """\
tfkit: 1
name: m
d_model: 16
vocab_size: 23
inputs: {source: {type: tokens, length: 5}, tokens: tokens}
graph:
  source_embedding: {block: embedding, input: source}
  encoder: {block: encoder, n_layers: 1, attention: {n_heads: 2}}
  embedding: {block: embedding, input: tokens}
  decoder: {block: decoder, memory: encoder, n_layers: 1, attention: {n_heads: 2}}
  logits: {block: lm_head}
"""
    with pytest.raises(ValueError, match="`source` must have 5 positions, which this model always reads; got 4"):
        CachedModel(build(spec), length=3).start(2, source=ids(2, 4))


@pytest.mark.parametrize("part", ["", "decoder.layers.1"])
def test_train_mode(part: str) -> None:
    model = build(SPECS["decoder"])
    model.get_submodule(part).train()
    with pytest.raises(ValueError, match="the model is in train mode, and dropout would act"):
        CachedModel(model)


BEGIN = """\
tfkit: 1
name: m
d_model: 16
vocab_size: 23
"""
WHOLE = {
    "encoder": (
        """\
graph:
  embedding: {block: embedding}
  encoder: {block: encoder, n_layers: 1, attention: {n_heads: 2}}
  logits: {block: lm_head}
""",
        """\
error: attention that attends to later tokens needs the full sequence
  --> <spec>:7:53  (graph.encoder.attention)
   |
 7 |   encoder: {block: encoder, n_layers: 1, attention: {n_heads: 2}}
   |                                                     ^^^^^^^^^^^^
   = `m` cannot be decoded token by token""",
    ),
    "variant": (
        """\
graph:
  embedding: {block: embedding}
  encoder:
    block: encoder
    n_layers: 2
    attention: {n_heads: 2, mask: {right: 0}}
    layers: {variants: {wide: {attention: {mask: {left: 1, right: 1}}}}, pattern: [base, wide]}
""",
        """\
error: attention that attends to later tokens needs the full sequence
   --> <spec>:11:43  (graph.encoder.layers.variants.wide.attention)
    |
 11 | ...ers: {variants: {wide: {attention: {mask: {left: 1, right: 1}}}}, pattern: [base, wide]}
    |                                       ^^^^^^^^^^^^^^^^^^^^^^^^^^^
    = `m` cannot be decoded token by token""",
    ),
    "joined": (
        """\
inputs: {pixels: {type: features, width: 16}, tokens: tokens}
graph:
  embedding: {block: embedding, input: tokens}
  both: {block: concat, inputs: [pixels, embedding]}
  decoder: {block: decoder, n_layers: 1, attention: {n_heads: 2}}
""",
        """\
error: sequences that are concatenated along `length` cannot be decoded step by step
  --> <spec>:8:3  (graph.both.along)
   |
 8 |   both: {block: concat, inputs: [pixels, embedding]}
   |   ^^^^
   = `m` cannot be decoded token by token""",
    ),
    "pooled": (
        """\
graph:
  embedding: {block: embedding}
  decoder: {block: decoder, n_layers: 1, attention: {n_heads: 2}}
  one: {block: pooler}
  classes: {block: classifier, n_classes: 3}
""",
        """\
error: block `pooler` cannot be decoded step by step: it requires full sequences
  --> <spec>:8:3  (graph.one)
   |
 8 |   one: {block: pooler}
   |   ^^^
   = `m` cannot be decoded token by token""",
    ),
    "memory_of_itself": (
        """\
graph:
  embedding: {block: embedding}
  encoder: {block: encoder, n_layers: 1, attention: {n_heads: 2}}
  decoder: {block: decoder, input: embedding, memory: encoder, n_layers: 1, attention: {n_heads: 2}}
""",
        """\
error: `embedding` cannot be used both as a full sequence and step by step
  --> (graph.embedding)
   = `m` cannot be decoded token by token""",
    ),
    "an_input_twice": (
        """\
inputs: {x: {type: features, width: 16}}
graph:
  encoder: {block: encoder, n_layers: 1, attention: {n_heads: 2}}
  decoder: {block: decoder, input: x, memory: encoder, n_layers: 1, attention: {n_heads: 2}}
""",
        """\
error: `x` cannot be used both as a full sequence and step by step
  --> (inputs.x)
   = `m` cannot be decoded token by token""",
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_models_that_need_their_sequence_as_a_whole(name: str) -> None:
    spec, text = WHOLE[name]
    begin = BEGIN if "block: embedding" in spec else BEGIN.replace("vocab_size: 23\n", "")
    model = tfkit.build(tfkit.loads(begin + spec)).eval()
    with pytest.raises(tfkit.SpecError) as refused:
        CachedModel(model, length=8)
    assert str(refused.value) == text
