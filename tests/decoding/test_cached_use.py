"""Use of a `CachedModel`: starts, rows, lengths and dtypes."""

from __future__ import annotations

import pytest
import torch

import tfkit
from tfkit import CachedModel
from tfkit.components.cached_keys import place
from tfkit.nn import Past, count_positions
from tfkit.testing import check_cached, example_inputs

from ..sampling import some
from .small import ATTENTION, SPECS, build, cached, error, spec_of, tokens

OPTIONAL = """
tfkit: 1
name: m
d_model: 16
vocab_size: 23
inputs: {source: tokens, types: {type: tokens, optional: true}, target: tokens}
graph:
  memory: {block: embedding, input: source, tables: {types: 2}}
  embedding: {block: embedding, input: target}
  decoder: {block: decoder, memory: memory, n_layers: 1, attention: {n_heads: 2}, ffn: {kind: relu, d_ff: 24}}
  logits: lm_head
"""

# ---- beginnings ----


def test_one_batch_leaves_nothing_for_the_next() -> None:
    """What is no number stays where it is written, and a mask does not hide it."""
    model = cached("features")
    model(torch.full((2, 8, 16), torch.nan))
    model.start(2)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[False, True, True, True], [True, True, True, True]])
    model(x[:, :4], mask)
    actual = model(x[:, 4:])
    want = torch.cat((model.model(x[:1, 1:]), model.model(x[1:])[:, 1:]))
    assert error(actual[:, -1], want[:, -1]) < 1e-5


def test_a_memory_of_another_length_and_batch() -> None:
    model, generator = cached("memory"), torch.Generator().manual_seed(0)
    for rows, columns in ((3, 5), (2, 7), (2, 4), (3, 5)):
        source, ids = torch.randn(rows, columns, 12, generator=generator), tokens(rows, 6, columns)
        model.start(rows, source=source)
        actual = torch.cat([model(ids[:, :2]), *[model(word) for word in ids[:, 2:].split(1, dim=1)]], dim=1)
        assert error(actual, model.model(ids, source=source)) < 1e-5


@torch.no_grad()
def test_a_memory_with_an_input_that_may_be_left_out() -> None:
    model = tfkit.build(tfkit.loads(OPTIONAL)).eval()
    source, types, ids = tokens(2, 7), tokens(2, 7, 1) % 2, tokens(2, 5, 2)
    reading = CachedModel(model, length=8)
    for inputs in ({"source": source}, {"source": source, "types": types}):
        reading.start(2, **inputs)
        actual = torch.cat([reading(ids[:, :3]), reading(ids[:, 3:])], dim=1)
        assert error(actual, model(target=ids, **inputs)) < 1e-5


def test_without_a_start_the_sequences_go_on() -> None:
    model, ids = cached("decoder"), tokens(2, 6)
    model(ids[:, :4])
    assert model.used == 4
    assert error(model(ids[:, 4:]), model.model(ids)[:, 4:]) < 1e-5


def test_what_is_refused_changes_nothing() -> None:
    model, ids = cached("decoder", length=5), tokens(2, 5)
    model(ids[:, :4])
    with pytest.raises(ValueError, match="2 more tokens do not fit: 4 of 5 positions are used"):
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
    cache = place(positions, padding, past, 4).cache
    for slots in cache.slots.tolist() if padded else [cache.slots.tolist()]:
        assert sorted(slot for slot in slots if slot < 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("start", [1, 2])
def test_a_piece_that_overwrites_slots_attends_to_their_keys(start: int) -> None:
    past = Past(start, 20, None)
    keys = place(count_positions(torch.zeros(1, 9), None, past), None, past, 4)
    assert keys.keys.tolist() == [[*range(start + 9)]]
    assert (keys.cache.before, keys.cache.after) == (start, 0)


# ---- rows ----


@pytest.mark.parametrize("name", ["memory", "memory_of_two", "prefix"])
def test_repeated_before_anything_was_read(name: str) -> None:
    model = cached(name)
    inputs = example_inputs(model.model.meta["graph"], batch=2, length=5)
    once = {item: inputs[item] for item in inputs if item != "tokens"}
    model.start(2, **once)
    model.repeat(3)
    ids = tokens(6, 6)
    actual = torch.cat((model(ids[:, :5]), model(ids[:, 5:])), dim=1)
    once = {item: value.repeat_interleave(3, dim=0) for item, value in once.items()}
    assert error(actual, model.model(tokens=ids, **once)) < 1e-5


@pytest.mark.parametrize("keep", [1, 2, 9])
def test_keep(keep: int) -> None:
    model, ids = cached("decoder"), tokens(2, 6)
    want = model.model(ids)
    assert error(model(ids[:, :5], keep=keep), want[:, max(0, 5 - keep) : 5]) < 1e-5
    assert error(model(ids[:, 5:], keep=keep), want[:, 5:]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.long, torch.uint8])
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
    actual = model(ids[:, 4:], types=types[:, 4:])
    assert error(actual, model.model(tokens=ids[:, 2:], types=types[:, 2:])[:, 2:]) < 1e-5


# ---- lengths and types ----


def test_more_places_than_are_used() -> None:
    model = build(SPECS["window"])
    ids = tokens(2, 9)
    for length in (9, 10, 40):
        read = CachedModel(model, length=length)
        actual = torch.cat([read(word) for word in ids.split((4, 1, 1, 3), dim=1)], dim=1)
        assert error(actual, model(ids)) < 1e-5


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
    actual = torch.cat((model(ids[:, :4]), model(ids[:, 4:6])), dim=1)
    assert error(actual, model.model(ids)[:, :6]) < 1e-5
    assert error(actual, model.model(ids[:, :6])) > 1e-3


def test_max_len_is_the_length_unless_given() -> None:
    assert CachedModel(build(SPECS["decoder"])).length == 40


@pytest.mark.parametrize("name", some(["decoder", "memory", "window", "learned"], 2))
def test_bfloat16(name: str) -> None:
    graph = tfkit.loads(SPECS[name])
    model = build(graph).to(torch.bfloat16)
    inputs = {n: x.bfloat16() if x.is_floating_point() else x for n, x in example_inputs(graph, length=12).items()}
    check_cached(model, inputs, tolerance=0.05)


@pytest.mark.parametrize("name", some(["decoder", "memory", "window", "learned"], 1))
def test_autocast(name: str) -> None:
    graph = tfkit.loads(SPECS[name])
    with torch.autocast("cpu", torch.bfloat16):
        check_cached(build(graph), example_inputs(graph, length=12), tolerance=0.05)


def test_the_device_of_new_tensors_changes_nothing() -> None:
    model, tokens = build(SPECS["prefix"]), torch.tensor([[3, 4, 5], [6, 7, 8]])
    names = torch.tensor([2, 3])
    with torch.device("meta"):
        cached = CachedModel(model, length=8)
        cached.start(2, known=names)
        actual = cached(tokens)
    torch.testing.assert_close(actual, model(tokens, names))
