"""Memory needs of a model: weights, and the KV cache compared with published figures, formulas and a real cache."""

from __future__ import annotations

import pytest
import torch

import tfkit
from tfkit.component import Cached, State
from tfkit.tools.common.memory_needs import cache_size, cached_bytes, check_memory, free_memory, size_of


def test_size_is_that_of_the_built_model(small: tfkit.Graph) -> None:
    model = tfkit.build(small, device="meta", dtype=torch.bfloat16)
    assert size_of(model) == 2 * sum(parameter.numel() for parameter in model.parameters())


def test_what_fits_and_what_does_not(small: tfkit.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tfkit.build(small, device="meta")
    monkeypatch.setattr("tfkit.tools.common.memory_needs.free_memory", lambda device: 2 * size_of(model))
    check_memory(model, "cpu")
    monkeypatch.setattr("tfkit.tools.common.memory_needs.free_memory", lambda device: size_of(model))
    with pytest.raises(tfkit.SpecError, match="not enough memory on cpu"):
        check_memory(model, "cpu")


def test_this_machine_has_memory() -> None:
    free = free_memory(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50


@pytest.mark.parametrize(
    ("name", "per_token", "at_max_len"),
    [
        ("gpt2", 2 * 12 * 768 * 2, 2 * 12 * 768 * 2 * 1024),
        ("llama3_8b", 128 * 1024, 2**30),  # 128 KiB a token, 1 GiB at 8192
        ("llama3_405b", 2 * 126 * 8 * 128 * 2, 2 * 126 * 8 * 128 * 2 * 131072),
        ("palm_540b", 2 * 118 * 256 * 2, 2 * 118 * 256 * 2 * 2048),  # one head of keys and values
    ],
)
def test_published_sizes(name: str, per_token: int, at_max_len: int) -> None:
    size = cache_size(tfkit.load(name))
    assert size is not None
    assert (size.per_token, size.at_max_len, size.per_memory_token) == (per_token, at_max_len, 0)


def test_a_window_bounds_it() -> None:
    size = cache_size(tfkit.load("mistral_7b"))
    assert size is not None
    assert size.windows == (4096,)
    assert size.max_len is not None
    assert size.max_len > 4096
    assert size.at_max_len == 4096 * size.per_token


def test_only_wide_states_are_in_float32() -> None:
    narrow, wide, keys = State(1, 3, 8), State(2, 4, 5, wide=True), Cached(2, 7, window=6)
    assert cached_bytes([narrow, wide, keys], 0, torch.bfloat16) == 2 * 24 + 4 * 40
    assert cached_bytes([narrow, wide, keys], 9, torch.bfloat16) == 2 * 24 + 4 * 40 + 2 * 2 * 6 * 7
    assert cached_bytes([narrow, wide, keys], 3, torch.float64) == 8 * (24 + 40 + 2 * 3 * 7)


def test_an_encoder_keeps_nothing() -> None:
    assert cache_size(tfkit.load("bert_base")) is None
    assert cache_size(tfkit.load("block_512")) is None


@pytest.mark.parametrize("name", ["gpt2", "vaswani_base"])
def test_it_is_what_a_cache_takes(name: str) -> None:
    graph = tfkit.load(name, sets=["d_model=32", "vocab_size=50", "max_len=24", "decoder.attention.n_heads=4"])
    size = cache_size(graph, torch.float32)
    assert size is not None
    cached = tfkit.CachedModel(tfkit.build(graph).eval())
    cached.start(2, **({"source": torch.zeros(2, 7, dtype=torch.long)} if name == "vaswani_base" else {}))
    padding = size.per_token  # one slot more
    assert size.at_max_len is not None
    assert cached.nbytes == 2 * (size.at_max_len + padding + 7 * size.per_memory_token)
