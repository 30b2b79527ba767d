"""The functions that replace those of einops in ejected files, compared with einops."""

from __future__ import annotations

import einops
import pytest
import torch

from tfkit.tools.eject.patterns import pack, unpack

TENSORS = [torch.randn(2, *middle, 7) for middle in ((3,), (2, 5), ())]
"""Tensors of shapes without equal sizes."""


def test_pack() -> None:
    packed, shapes = pack(TENSORS, 1, 1)
    expected, their_shapes = einops.pack(TENSORS, "b * d")
    assert torch.equal(packed, expected)
    assert [tuple(shape) for shape in shapes] == [tuple(shape) for shape in their_shapes]


@pytest.mark.parametrize("shapes", [[(3,), (2, 5), ()], [(-1,), (2, 5), ()], [(3,), (2, -1), ()], [(3,), (-1, 5), ()]])
def test_unpack_finds_a_free_size(shapes: list[tuple[int, ...]]) -> None:
    packed, _ = einops.pack(TENSORS, "b * d")
    parts = unpack(packed, [torch.Size(shape) for shape in shapes], 1)
    for part, expected in zip(parts, einops.unpack(packed, shapes, "b * d"), strict=True):
        assert torch.equal(part, expected)
