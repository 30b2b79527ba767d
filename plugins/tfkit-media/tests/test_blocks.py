"""The blocks against torch: a convolution, an interpolation of positions, and the order of tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.embeddings import get_2d_sincos_pos_embed
from tfkit_media import ConvStem, EndPool, GridBias, GridBiasConfig, GridRope, GridRopeConfig, StackFrames
from tfkit_media.rope import Rotation
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.beit.modeling_beit import BeitConfig, BeitRelativePositionBias
from transformers.models.dinov3_vit import modeling_dinov3_vit as dinov3
from transformers.models.pixtral.modeling_pixtral import PixtralVisionRotaryEmbedding
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionRotaryEmbedding

import tfkit
import tfkit.testing
from tfkit.cli import main

from .models import PLUGINS, error_of, sequence_of, spec_of


@torch.no_grad()
def test_patches_are_a_convolution() -> None:
    model = sequence_of("patches", {"size": 4, "position": None, "class_token": False}, channels=2, height=9, width=14)
    conv = nn.Conv2d(2, 8, 4, stride=4)
    conv.weight.copy_(model.front.project.weight.unflatten(1, (2, 4, 4)))
    conv.bias.copy_(model.front.project.bias)
    image = torch.randn(3, 2, 9, 14)
    torch.testing.assert_close(model(image), conv(image).flatten(2).mT)


@torch.no_grad()
def test_patches_may_overlap() -> None:
    fields = {"size": 4, "row_stride": 3, "column_stride": 2, "position": None, "class_token": False}
    model = sequence_of("patches", fields, channels=2, height=9, width=13)
    conv = nn.Conv2d(2, 8, 4, stride=(3, 2))
    conv.weight.copy_(model.front.project.weight.unflatten(1, (2, 4, 4)))
    conv.bias.copy_(model.front.project.bias)
    image = torch.randn(3, 2, 9, 13)
    expected = conv(image).flatten(2).mT
    assert expected.shape == (3, 2 * 5, 8)
    torch.testing.assert_close(model(image), expected)


@torch.no_grad()
def test_patches_of_equal_frames_are_a_convolution_of_a_video() -> None:
    fields = {"size": 4, "frames": 3, "position": None, "class_token": False, "bias": False}
    model = sequence_of("patches", fields, channels=2, height=8, width=12)
    conv = nn.Conv3d(2, 8, (3, 4, 4), stride=(3, 4, 4), bias=False)
    conv.weight.copy_(model.front.project.weight.unflatten(1, (2, 3, 4, 4)))
    image = torch.randn(3, 2, 8, 12)
    video = image[:, :, None].expand(-1, -1, 3, -1, -1)
    torch.testing.assert_close(model(image), conv(video).flatten(2).mT)


@torch.no_grad()
def test_spectrograms_are_images_whose_columns_are_frames() -> None:
    config: Any = SimpleNamespace(d_model=6, strides=(1, 2), size=3, dropout=0.0)
    stems = [ConvStem(config, 4, nn.GELU(), None, several=several) for several in (False, True)]
    stems[1].load_state_dict(stems[0].state_dict())
    sounds = torch.randn(2, 3, 1, 4, 10)
    torch.testing.assert_close(stems[1](sounds), stems[0](sounds.flatten(0, 2).mT))
    stacked = StackFrames(5)(stems[1](sounds))
    torch.testing.assert_close(stacked, torch.stack([stems[1](sounds).flatten(1)], dim=1))


@torch.no_grad()
def test_class_tokens_come_first_and_registers_have_no_position() -> None:
    fields = {"size": 4, "distillation_token": True, "registers": 3}
    model = sequence_of("patches", fields, height=8, width=12)
    front, image = model.front, torch.randn(2, 2, 8, 12)
    x, position = model(image), front.position.weight
    assert x.shape == (2, 1 + 1 + 3 + 6, 8)
    torch.testing.assert_close(x[1, 0], front.class_token.weight[0] + position[0])
    torch.testing.assert_close(x[1, 1], front.distillation_token.weight[0] + position[1])
    torch.testing.assert_close(x[1, 2:5], front.registers.weight)
    torch.testing.assert_close(x[:, 5:], front.project(front.split(image)) + position[2:])


def test_an_image_of_another_size_is_an_error() -> None:
    model = sequence_of("patches", {"size": 4})
    with pytest.raises(ValueError, match=r"`x` must be an image of 2 x 8 x 8; got \[3, 2, 8, 12\]"):
        model(torch.zeros(3, 2, 8, 12))


@pytest.mark.parametrize("antialias", [False, True])
@torch.no_grad()
def test_learned_positions_are_interpolated_as_published_models_do(antialias: bool) -> None:
    fields = {"size": 4, "learned_height": 24, "learned_width": 24, "antialias": antialias}
    model = sequence_of("patches", fields, height=12, width=20)
    front, image = model.front, torch.randn(2, 2, 12, 20)
    learned = front.position.weight
    assert learned.shape == (1 + 36, 8)
    grid = learned[1:].view(1, 6, 6, 8).permute(0, 3, 1, 2)
    resized = F.interpolate(grid, size=(3, 5), mode="bicubic", align_corners=False, antialias=antialias)
    expected = front.project(front.split(image)) + resized.permute(0, 2, 3, 1).reshape(15, 8)
    torch.testing.assert_close(model(image)[:, 1:], expected)


@torch.no_grad()
def test_the_same_weights_serve_images_of_several_sizes() -> None:
    small = sequence_of("patches", {"size": 4}, height=12, width=12)
    large = sequence_of("patches", {"size": 4, "learned_height": 12, "learned_width": 12}, height=16, width=20)
    large.load_state_dict(small.state_dict())
    assert large(torch.randn(1, 2, 16, 20)).shape == (1, 21, 8)


@torch.no_grad()
def test_sinusoidal_positions_are_those_of_diffusers() -> None:
    model = sequence_of("patches", {"size": 4, "position": "sinusoidal"}, height=12, width=12)
    front, image = model.front, torch.randn(2, 2, 12, 12)
    table = get_2d_sincos_pos_embed(8, 3, cls_token=True, extra_tokens=1, base_size=3, output_type="pt")
    added = model(image) - torch.cat((front.class_token(image), front.project(front.split(image))), dim=1)
    torch.testing.assert_close(added, table.float().expand(2, -1, -1), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_heads_turn_as_in_dinov3() -> None:
    config = dinov3.DINOv3ViTConfig(
        hidden_size=16, num_attention_heads=2, image_size=[12, 20], patch_size=4, rope_theta=50.0
    )
    cos, sin = dinov3.DINOv3ViTRopePositionEmbedding(config).eval()(torch.zeros(1, 3, 12, 20))
    rope = GridRopeConfig(rows=3, columns=5, registers=2, theta=50.0)
    table = GridRope(rope, 8)(torch.arange(18)[None], 18)
    x = torch.randn(2, 2, 18, 8)
    torch.testing.assert_close(Rotation()(x, table), dinov3.apply_rotary_pos_emb(x, x, cos, sin)[0])


@pytest.mark.parametrize("staggered", [False, True])
@torch.no_grad()
def test_heads_turn_by_counted_rows_as_in_qwen_and_pixtral(staggered: bool) -> None:
    config = SimpleNamespace(
        hidden_size=16, num_attention_heads=2, rope_parameters={"rope_type": "axial", "rope_theta": 50.0}
    )
    module = PixtralVisionRotaryEmbedding if staggered else Qwen2_5_VLVisionRotaryEmbedding
    x = torch.randn(2, 2, 15, 8)
    grid = torch.cartesian_prod(torch.arange(3), torch.arange(5))
    cos, sin = module(config)(x, grid)
    rope = GridRopeConfig(rows=3, columns=5, class_token=False, coordinates="counted", staggered=staggered, theta=50.0)
    table = GridRope(rope, 8)(torch.arange(15)[None], 15)
    torch.testing.assert_close(Rotation()(x, table), dinov3.apply_rotary_pos_emb(x, x, cos, sin)[0])


@torch.no_grad()
def test_scores_have_the_bias_of_beit() -> None:
    config = BeitConfig(image_size=12, patch_size=4, num_attention_heads=2)
    theirs, bias = BeitRelativePositionBias(config), GridBias(GridBiasConfig(rows=3, columns=3), 2)
    bias.distances.weight.normal_()
    theirs.relative_position_bias_table.copy_(bias.distances.weight)
    positions = torch.arange(10)[None]
    torch.testing.assert_close(bias(positions, positions), theirs((3, 3)))


@torch.no_grad()
def test_the_end_of_a_text() -> None:
    x, tokens = torch.randn(2, 4, 3), torch.tensor([[5, 9, 2, 9], [9, 1, 12, 9]])
    torch.testing.assert_close(EndPool(9)(x, tokens), torch.stack((x[0, 1], x[1, 0])))
    torch.testing.assert_close(EndPool(None)(x, tokens), torch.stack((x[0, 1], x[1, 2])))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, 1] = mask[0, 3] = False  # no end is left in this text
    for end in (9, None):
        pooled = EndPool(end)(x, tokens.masked_fill(~mask, 9), mask)
        torch.testing.assert_close(pooled[0], EndPool(end)(x[:1, mask[0]], tokens[:1, mask[0]])[0])


@torch.no_grad()
def test_a_stem_is_two_convolutions() -> None:
    sets = {"position": {"kind": "learned", "max_len": 6}}
    model = sequence_of("conv_stem", sets, input={"type": "features", "width": 5, "length": 11})
    stem, frames = model.front, torch.randn(2, 11, 5)
    x: Tensor = frames.mT
    for conv, stride in zip(stem.convs, (1, 2), strict=True):
        x = F.gelu(F.conv1d(x, conv.weight, conv.bias, stride=stride, padding=1))
    assert x.size(2) == 6
    torch.testing.assert_close(model(frames), x.mT + stem.position.table.weight)


@torch.no_grad()
def test_the_mean_of_patches_leaves_out_the_tokens_in_front() -> None:
    model = sequence_of("patches", {"size": 4, "registers": 2}, {"pool": {"block": "token_pool", "registers": 2}})
    image = torch.randn(2, 2, 8, 8)
    x = model.front(image)
    torch.testing.assert_close(model(image), torch.cat((x[:, 0], x[:, 3:].mean(1)), dim=1))


@torch.no_grad()
def test_the_mean_of_the_class_tokens() -> None:
    pool = {"pool": {"block": "token_pool", "select": "class_tokens"}}
    model = sequence_of("patches", {"size": 4, "distillation_token": True}, pool)
    image = torch.randn(2, 2, 8, 8)
    torch.testing.assert_close(model(image), model.front(image)[:, :2].mean(1))
    with pytest.raises(tfkit.SpecError, match="`registers` has no effect: the class tokens come first"):
        sequence_of("patches", {"size": 4}, {"pool": {**pool["pool"], "registers": 1}})
    with pytest.raises(tfkit.SpecError, match="a class and a distillation token; got 1 position"):
        sequence_of("patches", {"size": 8, "class_token": False}, pool)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 9}, "a patch of 9 x 9 must fit into an image of 2 x 8 x 8"),
        ({"class_token": False, "distillation_token": True}, "cannot be used without `class_token`"),
        ({"position": None, "antialias": True}, "`antialias` has no effect"),
        ({"antialias": True}, "the positions are not interpolated"),
        ({"learned_height": 16}, "`learned_width` is missing"),
        ({"learned_height": 8, "learned_width": 8}, "the image has this size"),
        ({"position": "sinusoidal", "d_model": 6}, "multiple of 4; got 6"),
    ],
)
def test_patches_that_cannot_be(fields: dict[str, object], message: str) -> None:
    assert message in error_of("patches", {"size": 4, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 4}, "`size` must be odd; got 4"),
        ({"strides": []}, "`strides` must have a number for each convolution"),
        ({"position": {"kind": "learned", "max_len": 3}}, "8 frames become 4 positions, but there are 3"),
    ],
)
def test_stems_that_cannot_be(fields: dict[str, object], message: str) -> None:
    assert message in error_of("conv_stem", fields, input={"type": "features", "width": 5, "length": 8})


def test_pictures_show_an_image_going_in() -> None:
    assert "image [b, 3, 224, 224]" in tfkit.draw(tfkit.load("vit_base_16", plugins=PLUGINS))._repr_svg_()


@pytest.mark.slow
def test_a_tiny_vit_passes_all_checks() -> None:
    sizes = ["d_model=24", "encoder.n_layers=2", "encoder.attention.n_heads=3", "encoder.ffn.d_ff=40"]
    image = ["inputs.image={type: image, channels: 3, height: 12, width: 8}", "patches.size=4", "logits.n_classes=5"]
    graph = tfkit.load("vit_base_16", sets=[*sizes, *image], plugins=PLUGINS)
    tfkit.testing.check_model(graph, plugins=PLUGINS)


SLOW = (
    "ast_base_audioset",
    "beit_base_16",
    "hubert_base",
    "wav2vec2_large_lv60",
    "moonshine_tiny",
    "data2vec_audio_base",
    "siglip_base_16",
    "dinov2_with_registers_base",
    "dinov3_vit_small_16",
    "siglip_vision_base_16",
)


@pytest.mark.parametrize(
    "name", ["vit_base_16", "whisper_tiny", "clip_base_32", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)]
)
def test_models_compute_what_the_reference_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", name, "--only", "meaning"]) == 0, capsys.readouterr()
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 ok")  # not: does not apply


@pytest.mark.parametrize(
    ("fields", "height"),
    [
        ({"learned_height": 24, "learned_width": 16, "antialias": True}, 12),
        ({"learned_height": 8, "learned_width": 12, "distillation_token": True, "registers": 2}, 12),
        ({"position": "sinusoidal", "bias": False}, 9),
        ({"row_stride": 2, "column_stride": 3, "learned_height": 9, "learned_width": 8}, 12),
    ],
)
def test_patches_are_what_the_reference_says(fields: dict[str, Any], height: int) -> None:
    image = {"type": "image", "channels": 2, "height": height, "width": 9}
    graph = tfkit.load(spec_of("patches", {"size": 4, **fields}, None, image), plugins=PLUGINS)
    tfkit.testing.check_model(graph, plugins=PLUGINS, only=["meaning"])


def test_a_bias_of_a_grid_is_what_the_reference_says() -> None:
    attention = {"kind": "mha", "n_heads": 2, "position": {"kind": "grid_bias", "rows": 2, "columns": 3}}
    encoder = {
        "block": "encoder",
        "n_layers": 1,
        "d_model": 8,
        "attention": attention,
        "ffn": {"kind": "relu", "d_ff": 8},
    }
    image = {"type": "image", "channels": 2, "height": 8, "width": 12}
    graph = tfkit.load(
        spec_of("patches", {"size": 4}, {"encoder": {**encoder, "norm": "layernorm"}}, image), plugins=PLUGINS
    )
    tfkit.testing.check_model(graph, plugins=PLUGINS, only=["meaning"])


@pytest.mark.parametrize("end", [None, 3])
def test_the_end_of_a_text_is_what_the_reference_says(end: int | None) -> None:
    graph: dict[str, Any] = {"embedding": {"block": "embedding", "d_model": 8, "vocab_size": 6}}
    graph["pooled"] = {"block": "end_pool", "tokens": "tokens", "end": end}
    spec = {"tfkit": 1, "name": "small", "inputs": {"tokens": "tokens"}, "graph": graph}
    tfkit.testing.check_model(tfkit.load(spec, plugins=PLUGINS), plugins=PLUGINS, only=["meaning"])
