"""Blocks that place images in a text: against loops by hand, and specs that cannot be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tfkit_media import tfkit_reference
from tfkit_media.masks import GridWindows
from tfkit_media.placing import ImageBlocks, ImagePositions, JoinImages, MergePatches, PlaceImages
from torch.nn import functional as F

import tfkit
from tfkit.reference import run

from .models import PLUGINS


def spec_with(**nodes: Any) -> dict[str, Any]:
    graph = {
        "embedding": {"block": "embedding", "input": "tokens"},
        "patches": {"block": "patches", "input": "images", "size": 2, "class_token": False},
        "joined": {"block": "join_images", "images": "images"},
        "placed": {"block": "place_images", "input": "embedding", "tokens": "tokens", "images": "joined", "token": 8},
        **nodes,
    }
    inputs = {"tokens": "tokens", "images": {"type": "images", "channels": 1, "height": 4, "width": 4}}
    return {"tfkit": 1, "name": "small", "d_model": 4, "vocab_size": 9, "inputs": inputs, "graph": graph}


def test_squares_of_patches_are_those_of_a_loop() -> None:
    x = torch.randn(2, 72, 5)
    grid = x.view(2, 6, 12, 5)
    for size in (1, 2, 3):
        squares = [
            grid[:, row : row + size, column : column + size].reshape(2, size * size, 5)
            for row in range(0, 6, size)
            for column in range(0, 12, size)
        ]
        merged = {by: MergePatches(size, 6, 12, by=by)(x) for by in ("mean", "concat", "unfold")}
        torch.testing.assert_close(merged["mean"], torch.stack(squares, 1).mean(dim=2))
        torch.testing.assert_close(merged["concat"], torch.stack(squares, 1).flatten(2))
        unfolded = F.unfold(grid.permute(0, 3, 1, 2), kernel_size=size, stride=size)
        torch.testing.assert_close(merged["unfold"], unfolded.transpose(1, 2))


def test_positions_of_images_are_those_of_transformers() -> None:
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    tokens = torch.randint(0, 8, (4, 24), generator=torch.Generator().manual_seed(0))
    for row, starts in enumerate([(1, 9), (0, 7), (3,), ()]):
        for start in starts:
            tokens[row, start : start + 6] = 8
    for rows, columns in ((2, 3), (3, 2), (6, 1)):
        config = {"spatial_merge_size": 2, "tokens_per_second": 2}
        of_vision = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(**config)))
        of_vision.get_vision_position_ids = Qwen2_5_VLModel.get_vision_position_ids.__get__(of_vision)
        for mask in (None, torch.arange(24) >= torch.tensor([[0], [0], [2], [5]])):
            grids = torch.tensor([[1, 2 * rows, 2 * columns]] * 5)
            types = (tokens == 8).int()
            expected, _ = Qwen2_5_VLModel.get_rope_index(of_vision, tokens, types, grids, attention_mask=mask)
            real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
            actual = ImagePositions(8, rows, columns)(tokens, mask=mask)
            assert torch.equal(actual[real], expected.permute(1, 2, 0)[real])


def test_windows_are_those_of_transformers() -> None:
    from transformers.vision_utils import get_vision_window_index

    for rows, columns, size in ((4, 6, 4), (6, 10, 4), (8, 8, 2)):
        index, ends = get_vision_window_index(torch.tensor([[1, rows, columns]]), 2, 4 * size, 4)
        squares = torch.arange(rows * columns).view(rows // 2, 2, columns // 2, 2).transpose(1, 2).reshape(-1, 4)
        window = torch.empty(rows * columns, dtype=torch.long)
        window[squares[index].flatten()] = torch.bucketize(torch.arange(rows * columns), ends[1:], right=True)
        patches = torch.arange(rows * columns)
        same = GridWindows(columns, size)(patches[:, None], patches[None])
        assert torch.equal(same, window[:, None] == window)


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
        ({"joined": {"block": "join_images", "images": "images", "skip": 4}}, "must be less than 4"),
        ({"joined": {"block": "join_images", "input": "embedding", "images": "images"}}, "the vectors of images"),
        ({"joined": {"block": "merge_patches", "size": 3}}, "must divide 2, the rows of patches"),
        ({"joined": {"block": "merge_patches", "input": "embedding", "size": 2}}, "must be the patches of an image"),
        (
            {"positions": {"block": "image_positions", "input": "tokens", "images": "embedding", "token": 8}},
            "join_images",
        ),
        ({"summed": {"block": "add", "inputs": ["patches", "embedding"]}}, "must have a row for each image"),
    ],
)
def test_specs_that_cannot_be(nodes: dict[str, Any], message: str) -> None:
    with pytest.raises(tfkit.SpecError, match=message):
        tfkit.load(spec_with(**nodes), plugins=PLUGINS)


@torch.no_grad()
def test_positions_in_pieces_are_those_of_one_call() -> None:
    position = {"kind": "rope", "sections": [0, 1, 1]}
    attention = {"kind": "mha", "n_heads": 1, "position": position}
    decoder = {"block": "decoder", "input": "placed", "positions": "positions", "n_layers": 1, "attention": attention}
    nodes = {
        "positions": {"block": "image_positions", "input": "tokens", "images": "joined", "token": 8},
        "decoder": {**decoder, "ffn": {"kind": "gelu", "d_ff": 4}},
        "logits": "lm_head",
    }
    torch.manual_seed(0)
    model = tfkit.build(tfkit.load(spec_with(**nodes), plugins=PLUGINS)).eval()
    tokens = torch.tensor([[1, 8, 8, 8, 8, 2, 3, 8, 8, 8, 8, 4], [5, 1, 2, 8, 8, 8, 8, 6, 7, 1, 2, 3]])
    images, mask = torch.randn(2, 2, 1, 4, 4), torch.ones(2, 12, dtype=torch.bool)
    mask[1, :2] = False
    expected = model(tokens, images, tokens_mask=mask)
    cached = tfkit.CachedModel(model, length=12)
    cached.start(2, images=images)
    chunks = zip(tokens.split([3, 6, 3], dim=1), mask.split([3, 6, 3], dim=1), strict=True)
    actual = torch.cat([cached(piece, real) for piece, real in chunks], dim=1)
    torch.testing.assert_close(actual[mask], expected[mask])


def test_the_reference_traces_every_image_of_a_row() -> None:
    graph = tfkit.load(spec_with(), plugins=PLUGINS)
    model = tfkit.build(graph, seed=1)
    inputs = {"tokens": torch.arange(16).view(2, 8) % 9, "images": torch.randn(2, 3, 1, 4, 4)}
    inputs["tokens"][:] = torch.tensor([8] * 6 + [1, 2])
    weights = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
    trace = dict(run(graph, weights, {name: x.numpy() for name, x in inputs.items()}, kinds=tfkit_reference()).trace)
    assert trace["patches"].shape == (6, 4, 4)
    assert trace["embedding"].shape == (2, 8, 4)
