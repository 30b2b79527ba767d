"""Mask rules, compared with a loop over queries and keys, with a cache, and the errors of conditions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tfkit
from tfkit.components.context import AttentionContext
from tfkit.testing import check_component

from .attentions import FEATURES, mixed, served, spec

LENGTH = 12
RULES: dict[str, tuple[dict[str, Any], Callable[[int, int], bool]]] = {
    "chunk": ({"kind": "chunk", "size": 4}, lambda q, k: q // 4 == k // 4),
    "blocks": ({"kind": "blocks", "size": 3}, lambda q, k: k // 3 <= q // 3),
    "expression": (
        {"kind": "expression", "where": "not (q - k) % 3 == 1 and 2 <= q + 2 or k < -1 + 2 * 1"},
        lambda q, k: (q - k) % 3 != 1 or k < 1,
    ),
}
REAL = torch.ones(4, LENGTH, dtype=torch.bool)
REAL[1, :3], REAL[2, 7:], REAL[3, 5:7] = False, False, False


def context(rule: dict[str, Any]) -> AttentionContext:
    module = tfkit.build(spec("encoder", {"mask": {"left": 2, "rule": rule}})).get_submodule("stack.shared.base")
    assert isinstance(module, AttentionContext)
    return module


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("documents", [False, True])
def test_a_rule_holds_next_to_extents_padding_and_documents(name: str, documents: bool) -> None:
    config, fits = RULES[name]
    together = torch.arange(LENGTH) // (7 if documents else LENGTH)
    pairs = REAL[:, None] & REAL[:, :, None] & (together == together[:, None])
    mask = context(config)(torch.zeros(4, LENGTH, 32), pairs if documents else REAL, None).mask
    assert mask is not None
    for b, q, k in pairs.nonzero().tolist():
        position, key = (int(pairs[b, q, :i].sum()) for i in (q, k))  # tokens before it, in its document
        assert bool(mask[b, 0, q, k] == 0) == (position - key <= 2 and fits(position, key)), (b, q, k)
    assert not (mask[:, 0] == 0)[~pairs & REAL[:, :, None]].any()


@torch.no_grad()
def test_a_chunk_bounds_the_cache() -> None:
    graph = spec("decoder", {"position": "rope", "mask": {"right": 0, "rule": {"kind": "chunk", "size": 4}}})
    model = tfkit.build(graph).eval()
    ids = torch.randint(17, (4, LENGTH))
    y = model(ids, tokens_mask=REAL)
    for row, real, actual in zip(ids, REAL, y, strict=True):
        torch.testing.assert_close(actual[real], model(row[real][None])[0], rtol=0, atol=1e-5)
    for mask, cuts in ((REAL, [1] * LENGTH), (REAL, [7, 1, 4]), (None, [5, 1, 6])):
        cached = tfkit.CachedModel(model, length=LENGTH)
        chunks = zip(ids.split(cuts, dim=1), REAL.split(cuts, dim=1), strict=True)
        actual = torch.cat([cached(piece, None if mask is None else real) for piece, real in chunks], dim=1)
        expected, real = (model(ids), ...) if mask is None else (y, REAL)
        torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=1e-5)
        assert cached.nbytes == 4 * 2 * 2 * (4 + 1) * 32 * 4  # rows, layers, keys and values, slots, channels, bytes


@torch.no_grad()
@pytest.mark.usefixtures("flex")
@pytest.mark.parametrize("feature", ["chunk", "prefix_expression"])
def test_a_rule_becomes_a_mask_mod_of_flex_attention(feature: str) -> None:
    graph = spec(*FEATURES[feature])
    model, dense = tfkit.build(graph, attention_backend="flex"), tfkit.build(graph)
    rules = served(model)
    torch.testing.assert_close(model(**mixed(graph)), dense(**mixed(graph)), rtol=0, atol=1e-5)
    assert rules == [True, True]


def test_blocks_are_not_decoded_token_by_token() -> None:
    model = tfkit.build(spec("encoder", {"mask": {"rule": {"kind": "blocks", "size": 4}}})).eval()
    with pytest.raises(ValueError, match="attention with the mask rule `blocks` that attends to later tokens"):
        tfkit.CachedModel(model, length=8)
    with pytest.raises(tfkit.SpecError, match="`blocks` has no effect with `right: 0`"):
        spec("decoder", {"mask": {"right": 0, "rule": {"kind": "blocks", "size": 4}}})


@pytest.mark.parametrize(
    ("sides", "error"),
    [
        ({"rule": {"kind": "blocks", "size": 4}, "right": 2}, None),
        ({"rule": {"kind": "blocks", "size": 4}, "right": 3}, "`right` has no effect: `blocks` hides .* 3 positions"),
        ({"rule": {"kind": "blocks", "size": 4}, "left": 9, "right": 2}, None),
        ({"rule": {"kind": "chunk", "size": 4}, "left": 2, "right": 2}, None),
        ({"rule": {"kind": "chunk", "size": 4}, "left": 3}, "`left` has no effect: `chunk` hides .* got 3"),
        ({"rule": {"kind": "chunk", "size": 4}, "right": 5}, "`right` has no effect: `chunk` hides .* got 5"),
        ({"rule": {"kind": "chunk", "size": 1}, "right": 0}, None),
    ],
)
def test_an_extent_beyond_a_chunk_or_block_is_refused(sides: dict[str, Any], error: str | None) -> None:
    if error is None:
        assert spec("encoder", {"mask": sides})
    else:
        with pytest.raises(tfkit.SpecError, match=error):
            spec("encoder", {"mask": sides})


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("q - k", "a condition must compare two numbers; got `q - k` in column 1"),
        ("q < k and a > 1", "a number must be q, k, .*; got `a` in column 11"),
        ("q < 1 or q // (k + 1) < 2", r"a divisor must be a positive integer; got `k \+ 1` in column 16"),
        ("0 < q < k", "a condition must compare two numbers"),
        ("1 < 2 or q < k", "a comparison must contain q or k; got `1 < 2` in column 1"),
        ("print() == q", r"a number must be q, k, .*; got `print\(\)` in column 1"),
        ("q.data == k", "a number must be q, k"),
        ("q < 'a'", "a number must be q, k"),
        ("q < 99999999999", r"an integer below 2\^31"),
        ("q <", "must be an expression .*; got `q <`, with an error in column"),
        ("(" * 150, "must be an expression"),
        ("q < k" + " " * 200, "at most 200 characters"),
    ],
)
def test_errors_of_a_condition(where: str, error: str) -> None:
    with pytest.raises(tfkit.SpecError, match=error):
        spec("decoder", {"mask": {"right": 0, "rule": {"kind": "expression", "where": where}}})


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_every_property_holds(name: str) -> None:
    check_component(name, slot="mask_rule")
