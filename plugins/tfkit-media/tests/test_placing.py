"""Blocks that place images in a text: against loops by hand, and specs that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tfkit_media.placing import ImageBlocks, JoinImages, MergePatches, PlaceImages

import tfkit

from .models import PLUGINS


def spec_with(**nodes: Any) -> dict[str, Any]:
    graph = {
        "embedding": {"block": "embedding", "input": "tokens"},
        "patches": {"block": "patches", "input": "images", "size": 2},
        "joined": {"block": "join_images", "images": "images"},
        "placed": {"block": "place_images", "input": "embedding", "tokens": "tokens", "images": "joined", "token": 8},
        **nodes,
    }
    inputs = {"tokens": "tokens", "images": {"type": "images", "channels": 1, "height": 4, "width": 4}}
    return {"tfkit": 1, "name": "small", "d_model": 4, "vocab_size": 9, "inputs": inputs, "graph": graph}


def test_squares_of_patches_are_those_of_a_loop() -> None:
    x = torch.randn(2, 36, 5)
    grid = x.view(2, 6, 6, 5)
    for size in (1, 2, 3):
        squares = [
            grid[:, row : row + size, column : column + size].reshape(2, size * size, 5)
            for row in range(0, 6, size)
            for column in range(0, 6, size)
        ]
        torch.testing.assert_close(MergePatches(size, 6, mean=True)(x), torch.stack(squares, 1).mean(dim=2))
        torch.testing.assert_close(MergePatches(size, 6, mean=False)(x), torch.stack(squares, 1).flatten(2))


def test_vectors_are_placed_in_order() -> None:
    images = JoinImages(1)(torch.arange(18.0).view(6, 3, 1), torch.zeros(3, 2, 1, 4, 4))
    assert images[:, :, 0].tolist() == [[1, 2, 4, 5], [7, 8, 10, 11], [13, 14, 16, 17]]
    tokens = torch.tensor([[9, 0, 9, 9], [0, 9, 9, 9], [0, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 1, 0]])
    placed = PlaceImages(9)(torch.full((3, 4, 1), -1.0), tokens, images, mask)
    assert placed[:, :, 0].tolist() == [[1, -1, 2, 4], [-1, -1, 7, 8], [-1, -1, -1, -1]]
    assert ImageBlocks(9)(tokens).tolist() == (tokens == 9).long().tolist()


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ({"joined": {"block": "join_images", "images": "images", "skip": 5}}, "must be less than 5"),
        ({"joined": {"block": "join_images", "input": "embedding", "images": "images"}}, "the vectors of images"),
        ({"joined": {"block": "merge_patches", "size": 2}}, "the patches of a square image"),
        ({"summed": {"block": "add", "inputs": ["patches", "embedding"]}}, "must have a row for each image"),
    ],
)
def test_specs_that_cannot_be(nodes: dict[str, Any], message: str) -> None:
    with pytest.raises(tfkit.SpecError, match=message):
        tfkit.load(spec_with(**nodes), plugins=PLUGINS)
