"""How a `CachedModel` is used: beginnings, rows, types of numbers, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import tfkit
from tfkit import CachedModel
from tfkit.components.context import place
from tfkit.nn import Past, count_positions
from tfkit.testing import check_cached, example_inputs

from .small import build, spec_of

ATTENTION = {"n_heads": 4, "position": "rope"}
SPECS = {
    "decoder": spec_of({"attention": ATTENTION}),
    "learned": spec_of({"attention": {"n_heads": 4}}, {"position": "learned"}),
    "window": spec_of({"attention": {**ATTENTION, "mask": {"left": 2, "right": 0}}}),
    "dynamic": spec_of(
        {
            "attention": {
                "n_heads": 4,
                "position": {"kind": "rope", "scaling": {"kind": "dynamic", "factor": 4.0, "original_max_len": 4}},
            }
        }
    ),
    "memory": spec_of({"attention": ATTENTION, "memory": "source"}, source={"type": "features", "width": 12}),
    "prefix": spec_of({"attention": ATTENTION, "prefix": "known"}, known="lengths"),
    "types": spec_of({"attention": ATTENTION}, {"tables": {"types": 3}}, types="tokens"),
    "features": """
tfkit: 1
name: m
inputs: {x: {type: features, width: 16}}
graph:
  decoder: {block: decoder, d_model: 16, n_layers: 2, attention: {n_heads: 4, position: rope}}
""",
    "memory_of_two": """
tfkit: 1
name: m
d_model: 16
vocab_size: 23
max_len: 40
inputs: {a: {type: features, width: 16}, b: {type: features, width: 16}, tokens: tokens}
graph:
  memory: {block: concat, inputs: [a, b]}
  embedding: {block: embedding, input: tokens}
  decoder: {block: decoder, input: embedding, memory: memory, n_layers: 2, attention: {n_heads: 4}}
  logits: {block: lm_head}
""",
}


def cached(name: str, length: int = 12, **given: Any) -> CachedModel:
    return CachedModel(build(SPECS[name]), length=length, **given)


def tokens(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randint(23, (rows, columns), generator=torch.Generator().manual_seed(seed))


def error(found: Tensor, want: Tensor) -> float:
    return float((found - want).detach().abs().max())


# ---- beginnings ----


def test_one_batch_leaves_nothing_for_the_next() -> None:
    """What is no number stays where it is written, and a mask does not hide it."""
    model = cached("features")
    model(torch.full((2, 8, 16), torch.nan))
    model.start(2)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[False, True, True, True], [True, True, True, True]])
    model(x[:, :4], mask)
    found = model(x[:, 4:])
    want = torch.cat((model.model(x[:1, 1:]), model.model(x[1:])[:, 1:]))
    assert error(found[:, -1], want[:, -1]) < 1e-5


def test_a_memory_of_another_length_and_batch() -> None:
    model, generator = cached("memory"), torch.Generator().manual_seed(0)
    for rows, columns in ((3, 5), (2, 7), (2, 4), (3, 5)):
        source, ids = torch.randn(rows, columns, 12, generator=generator), tokens(rows, 6, columns)
        model.start(rows, source=source)
        found = torch.cat([model(ids[:, :2]), *[model(one) for one in ids[:, 2:].split(1, dim=1)]], dim=1)
        assert error(found, model.model(ids, source=source)) < 1e-5


def test_without_a_start_the_sequences_go_on() -> None:
    model, ids = cached("decoder"), tokens(2, 6)
    model(ids[:, :4])
    assert model.used == 4
    assert error(model(ids[:, 4:]), model.model(ids)[:, 4:]) < 1e-5


def test_what_is_refused_changes_nothing() -> None:
    model, ids = cached("decoder", length=5), tokens(2, 5)
    model(ids[:, :4])
    with pytest.raises(ValueError, match="2 more tokens do not fit: 4 of 5 places are taken"):
        model(ids[:, :2])
    assert error(model(ids[:, 4:]), model.model(ids)[:, 4:]) < 1e-5


def test_two_caches_of_one_model() -> None:
    model, ids = build(SPECS["window"]), tokens(2, 8)
    first, second = CachedModel(model, length=8), CachedModel(model, length=8)
    first(ids[:, :5])
    second(ids[:, 2:])
    assert error(first(ids[:, 5:]), model(ids)[:, 5:]) < 1e-5


@pytest.mark.parametrize("again", [False, True], ids=["goes_on", "starts"])
def test_begun_in_inference_mode(again: bool) -> None:
    model, ids = cached("decoder"), tokens(2, 4)
    with torch.inference_mode():
        model(ids)
    if again:
        model.start(2)
    assert model(ids[:, :1]).shape == (2, 1, 23)


def test_a_model_that_moved_to_another_type() -> None:
    model, ids = cached("decoder"), tokens(2, 4)
    model(ids)
    model.model.double()
    model.start(2)
    model(ids[:, :2])
    assert error(model(ids[:, 2:]), model.model(ids)[:, 2:]) < 1e-12


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("start", [0, 2])
def test_no_slot_is_written_twice(start: int, padded: bool) -> None:
    """Where a piece is longer than the window; which of two would be kept is for the device to decide."""
    padding = torch.tensor([[True] * 9, [False] * 2 + [True] * 5 + [False, True]]) if padded else None
    past = Past(start, 20, torch.tensor([start, 1]) if padded else None)
    positions = count_positions(torch.zeros(2, 9), padding, past)
    cache, _, _ = place(positions, padding, past, 4)
    for slots in cache.slots.tolist() if padded else [cache.slots.tolist()]:
        assert sorted(slot for slot in slots if slot < 4) == [0, 1, 2, 3]


# ---- rows ----


@pytest.mark.parametrize("name", ["memory", "memory_of_two", "prefix"])
def test_repeated_before_anything_was_read(name: str) -> None:
    model = cached(name)
    inputs = example_inputs(model.model.meta["graph"], batch=2, length=5)
    once = {one: inputs[one] for one in inputs if one != "tokens"}
    model.start(2, **once)
    model.repeat(3)
    ids = tokens(6, 6)
    found = torch.cat((model(ids[:, :5]), model(ids[:, 5:])), dim=1)
    once = {one: value.repeat_interleave(3, dim=0) for one, value in once.items()}
    assert error(found, model.model(tokens=ids, **once)) < 1e-5


@pytest.mark.parametrize("keep", [1, 2, 9])
def test_keep(keep: int) -> None:
    model, ids = cached("decoder"), tokens(2, 6)
    want = model.model(ids)
    assert error(model(ids[:, :5], keep=keep), want[:, max(0, 5 - keep) : 5]) < 1e-5
    assert error(model(ids[:, 5:], keep=keep), want[:, 5:]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
def test_a_mask_of_numbers(dtype: torch.dtype) -> None:
    model, ids = cached("decoder"), tokens(2, 5)
    model(ids[:, :4], torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]).to(dtype))
    assert error(model(ids[:, 4:])[0], model.model(ids[:1, 2:])[0, 2:]) < 1e-5


def test_the_input_with_padding_is_the_one_that_is_counted() -> None:
    """However the spec orders its inputs."""
    spec = SPECS["types"].replace("  tokens: tokens\n  types: tokens\n", "  types: tokens\n  tokens: tokens\n")
    assert spec != SPECS["types"]
    model, ids, types = CachedModel(build(spec), length=12), tokens(1, 5), torch.tensor([[0, 1, 2, 1, 0]])
    model(ids[:, :4], torch.tensor([[False, False, True, True]]), types=types[:, :4])
    found = model(ids[:, 4:], types=types[:, 4:])
    assert error(found, model.model(tokens=ids[:, 2:], types=types[:, 2:])[:, 2:]) < 1e-5


# ---- lengths and types ----


def test_more_places_than_are_used() -> None:
    model = build(SPECS["window"])
    ids = tokens(2, 9)
    for length in (9, 10, 40):
        read = CachedModel(model, length=length)
        found = torch.cat([read(one) for one in ids.split((4, 1, 1, 3), dim=1)], dim=1)
        assert error(found, model(ids)) < 1e-5


def test_a_window_holds_no_more_than_it_reads() -> None:
    sizes = {}
    for left in (None, 2, 100):
        mask = {} if left is None else {"mask": {"left": left, "right": 0}}
        read = CachedModel(build(spec_of({"attention": {**ATTENTION, **mask}})), length=12)
        read.start(2)
        sizes[left] = read.nbytes
    token = 2 * 2 * 2 * 16 * 4  # rows, layers, keys and values, width, bytes
    assert sizes == {None: 13 * token, 2: 4 * token, 100: 13 * token}  # one place more, for padding


def test_a_scaling_takes_the_length_of_the_caches() -> None:
    """Theirs, not that of what was read: dynamic scaling of 6 tokens is that of 12."""
    model, ids = cached("dynamic", length=12), tokens(1, 12)
    found = torch.cat((model(ids[:, :4]), model(ids[:, 4:6])), dim=1)
    assert error(found, model.model(ids)[:, :6]) < 1e-5
    assert error(found, model.model(ids[:, :6])) > 1e-3


def test_max_len_is_the_length_unless_given() -> None:
    assert CachedModel(build(SPECS["decoder"])).length == 40


@pytest.mark.parametrize("name", ["decoder", "memory", "window", "learned"])
def test_bfloat16(name: str) -> None:
    graph = tfkit.loads(SPECS[name])
    model = build(graph).to(torch.bfloat16)
    inputs = {n: x.bfloat16() if x.is_floating_point() else x for n, x in example_inputs(graph, length=12).items()}
    check_cached(model, inputs, tolerance=0.05)


@pytest.mark.parametrize("name", ["decoder", "memory", "window", "learned"])
def test_autocast(name: str) -> None:
    graph = tfkit.loads(SPECS[name])
    with torch.autocast("cpu", torch.bfloat16):
        check_cached(build(graph), example_inputs(graph, length=12), tolerance=0.05)


# ---- refusals ----


def ids(rows: int, columns: int) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.long)


MASK = torch.tensor([[False, False, True, True], [True, True, True, True]])
REFUSED = {
    "prefix": ("prefix", {"known": torch.tensor([2, 5])}, (ids(2, 4),), {}, "`known` is 5, and the first piece has 4 "),
    "prefix_padded": ("prefix", {"known": torch.tensor([3, 2])}, (ids(2, 4), MASK), {}, "`known` is 3, and the first "),
    "no_prefix": ("prefix", None, (ids(2, 4),), {}, "missing: known"),
    "batch": ("decoder", {}, (ids(3, 4),), {}, "3 rows of tokens, and 2 sequences were begun: call `start`"),
    "mask": ("decoder", {}, (ids(2, 3), MASK), {}, r"the mask is \(2, 4\), and the tokens are \(2, 3\)"),
    "nothing": ("decoder", {}, (ids(2, 0),), {}, "a piece has at least one token"),
    "unknown": ("decoder", {}, (ids(2, 4),), {"types": ids(2, 4)}, "unknown: types; what can be given here: nothing"),
    "types_missing": ("types", {}, (ids(2, 4),), {}, "missing: types"),
    "types_short": ("types", {}, (ids(2, 4),), {"types": ids(2, 3)}, r"`types` is \(2, 3\), and the tokens are \(2, 4"),
    "types_batch": ("types", {}, (ids(2, 4),), {"types": ids(1, 4)}, r"`types` is \(1, 4\), and the tokens are \(2, 4"),
    "no_memory": ("memory", {}, (ids(2, 4),), {}, "missing: source"),
    "memory_rows": (
        "memory",
        {"source": torch.ones(3, 4, 12)},
        (ids(2, 4),),
        {},
        "`source` has 3 rows, and the batch has 2",
    ),
    "memory_mask": (
        "memory",
        {"source": torch.ones(2, 5, 12), "source_mask": MASK},
        (ids(2, 4),),
        {},
        r"`source_mask` is \(2, 4\), and what it hides is \(2, 5\)",
    ),
    "long": ("decoder", {}, (ids(2, 13),), {}, "13 more tokens do not fit: 0 of 12 places are taken"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    name, start, args, given, message = REFUSED[case]
    model = cached(name)

    def read() -> None:
        if start is not None:
            model.start(2, **start)
        model(*args, **given)

    with pytest.raises(ValueError, match=message):
        read()


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        ("decoder", 41, "length (41) is beyond the max_len of `m`, 40"),
        ("decoder", 0, "length (0) must be positive"),
        ("features", None, "`m` has no max_len: say how long sequences may be, `length=...`"),
    ],
)
def test_lengths_that_are_refused(name: str, length: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        CachedModel(build(SPECS[name]), length=length)


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
error: attention that reads later tokens needs the whole sequence
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
error: attention that reads later tokens needs the whole sequence
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
error: sequences that stand one after the other cannot be read in pieces
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
error: block `pooler` reads sequences as a whole
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
error: `embedding` is read as a whole and in pieces
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
error: `x` is read as a whole and in pieces
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
