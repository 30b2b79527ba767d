"""The blocks of raw sound against torch: convolutions, their norms and padding, and a convolution with weight norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import tfkit
import tfkit.testing

from .models import PLUGINS, error_of, sequence_of, spec_of

STEM = {"sizes": [5, 3, 2], "strides": [3, 2, 1]}
POSITIONS = {"front_position": {"block": "conv_position", "d_model": 8, "size": 4, "groups": 2}}
SAMPLES = 65


def waveform(**fields: Any) -> Mapping[str, Any]:
    return {"type": "features", "width": 1, **fields}


def stem_of(x: Tensor, stem: nn.Module, *, each: bool, bias: bool) -> Tensor:
    """The convolutions of STEM, by the functions of torch."""
    for number, (layer, stride) in enumerate(zip(stem.layers, (3, 2, 1), strict=True)):
        x = F.conv1d(x, layer.conv.weight, layer.conv.bias if bias else None, stride=stride)
        if each:
            x = F.layer_norm(x.mT, (8,), layer.norm.weight, layer.norm.bias).mT
        elif number == 0:
            x = F.instance_norm(x) * layer.norm.weight[:, None] + layer.norm.bias[:, None]
        x = F.gelu(x)
    return x.mT


@pytest.mark.parametrize(("each", "bias"), [(False, False), (True, True)])
@torch.no_grad()
def test_a_stem_is_convolutions_with_norms(each: bool, bias: bool) -> None:
    fields = {**STEM, "normalize": "each" if each else "first", "bias": bias}
    model = sequence_of("waveform_stem", fields, input=waveform())
    samples = torch.randn(3, SAMPLES, 1)
    expected = stem_of(samples.mT, model.front, each=each, bias=bias)
    assert expected.shape == (3, 9, 8)
    torch.testing.assert_close(model(samples), expected)


@pytest.mark.parametrize("normalize", ["first", "each"])
@torch.no_grad()
def test_padding_does_not_change_the_frames_of_a_row(normalize: str) -> None:
    model = sequence_of("waveform_stem", {**STEM, "normalize": normalize}, POSITIONS, input=waveform())
    samples, lengths = torch.randn(3, SAMPLES, 1), (SAMPLES, 47, 46)
    mask = torch.arange(SAMPLES) < torch.tensor(lengths)[:, None]
    padded = model(samples, mask)
    for row, length in enumerate(lengths):
        alone = model(samples[row : row + 1, :length])[0]
        assert len(alone) == (9, 6, 5)[row]
        torch.testing.assert_close(padded[row, : len(alone)], alone)


@torch.no_grad()
def test_a_frame_is_padding_if_any_of_its_samples_is() -> None:
    model = sequence_of("waveform_stem", STEM, input=waveform())
    mask = torch.ones(2, SAMPLES, dtype=torch.bool)
    mask[0, :1] = mask[1, -1:] = False
    _, frames = model.front(torch.randn(2, SAMPLES, 1), mask)
    assert frames[0].tolist() == [False] + [True] * 8
    assert frames[1].tolist() == [True] * 8 + [False]


@pytest.mark.parametrize("size", [4, 5])
@torch.no_grad()
def test_positions_are_a_convolution_with_weight_norm(size: int) -> None:
    model = sequence_of("conv_position", {"size": size, "groups": 2}, input={"type": "features", "width": 8})
    conv = weight_norm(nn.Conv1d(8, 8, size, padding=size // 2, groups=2), dim=2)
    conv.parametrizations.weight.original0.copy_(model.front.conv.gain[None, None])
    conv.parametrizations.weight.original1.copy_(model.front.conv.direction)
    conv.bias.copy_(model.front.conv.bias)
    x = torch.randn(3, 11, 8)
    torch.testing.assert_close(model(x), x + F.gelu(conv(x.mT)[:, :, :11].mT))


def test_a_new_convolution_has_the_spread_of_the_published_models() -> None:
    fields = {"d_model": 64, "size": 32, "groups": 4}
    conv = sequence_of("conv_position", fields, input={"type": "features", "width": 64}).front.conv
    conv.reset_parameters()
    weight = conv.direction * conv.gain / conv.direction.square().sum(dim=(0, 1)).sqrt()
    assert weight.std().item() == pytest.approx(2 / (32 * 64) ** 0.5, rel=0.03)
    torch.testing.assert_close(weight, conv.direction)


@pytest.mark.parametrize(
    ("fields", "input", "message"),
    [
        ({"sizes": [], "strides": []}, waveform(), "`sizes` must have a number for each convolution; got none"),
        ({"sizes": [3, 3]}, waveform(), "`strides` must have a number for each of 2 convolutions; got 7"),
        ({}, waveform(length=399), "`input` must have 400 positions, which a frame covers; got 399"),
    ],
)
def test_stems_that_cannot_be(fields: Mapping[str, Any], input: Mapping[str, Any], message: str) -> None:
    assert message in error_of("waveform_stem", fields, input=input)


@pytest.mark.parametrize("size", [4, 5])
@torch.no_grad()
def test_positions_by_several_convolutions(size: int) -> None:
    fields = {"n_layers": 3, "size": size, "groups": 2, "activation": "relu"}
    model = sequence_of("deep_conv_position", fields, input={"type": "features", "width": 8})
    x, lengths = torch.randn(3, 11, 8), (11, 7, 2)
    padded = model(x, torch.arange(11) < torch.tensor(lengths)[:, None])
    for row, length in enumerate(lengths):
        y = alone = x[row : row + 1, :length]
        for conv in model.front.convs:
            y = F.conv1d(y.mT, conv.weight, conv.bias, padding=size // 2, groups=2)[:, :, :length].mT
            y = F.relu(F.layer_norm(y, (8,)))
        torch.testing.assert_close(model(alone), alone + y)
        torch.testing.assert_close(padded[row, :length], (alone + y)[0])


@pytest.mark.parametrize("block", ["conv_position", "deep_conv_position", "group_norm"])
def test_groups_divide_the_width(block: str) -> None:
    input = {"type": "features", "width": 8}
    assert "`groups` must divide d_model, 8; got 3" in error_of(block, {"groups": 3}, input=input)


NORMALIZED = {
    "normed": {"block": "group_norm", "d_model": 8, "groups": 2, "eps": 0.1},
    "stem_2": {"block": "waveform_stem", "d_model": 6, "sizes": [3], "strides": [2], "normalize": "none"},
}
"""A norm of groups, and a second stem, which takes vectors."""


@torch.no_grad()
def test_stems_and_norms_in_a_row() -> None:
    model = sequence_of("waveform_stem", {**STEM, "normalize": "none"}, NORMALIZED, input=waveform())
    samples, lengths = torch.randn(3, SAMPLES, 1), (SAMPLES, 59, 47)
    mask = torch.arange(SAMPLES) < torch.tensor(lengths)[:, None]
    padded = model(samples, mask)
    for row, length in enumerate(lengths):
        x = samples[row : row + 1, :length].mT
        for layer, stride in zip(model.front.layers, (3, 2, 1), strict=True):
            x = F.gelu(F.conv1d(x, layer.conv.weight, stride=stride))
        x = F.group_norm(x, 2, model.normed.norm.weight, model.normed.norm.bias, eps=0.1)
        expected = F.gelu(F.conv1d(x, model.stem_2.layers[0].conv.weight, stride=2))[0].mT
        assert len(expected) == (4, 3, 2)[row]
        torch.testing.assert_close(model(samples[row : row + 1, :length])[0], expected)
        torch.testing.assert_close(padded[row, : len(expected)], expected)


@pytest.mark.parametrize(
    ("stem", "positions"),
    [
        ({"normalize": "each", "bias": True, "activation": "relu", "output_norm": "layernorm"}, {"size": 3}),
        ({"normalize": "first"}, {"size": 6, "norm": "rmsnorm"}),
    ],
)
def test_waveforms_are_what_the_reference_says(stem: Mapping[str, Any], positions: Mapping[str, Any]) -> None:
    more = {"front_position": {**POSITIONS["front_position"], **positions}}
    input = waveform(length=SAMPLES, padded=True)  # the last frame ends with the last sample
    graph = tfkit.load(spec_of("waveform_stem", {**STEM, **stem}, more, input), plugins=PLUGINS)
    tfkit.testing.check_model(graph, plugins=PLUGINS, only=["meaning"])


@pytest.mark.parametrize("size", [4, 5])
def test_several_convolutions_are_what_the_reference_says(size: int) -> None:
    fields = {"n_layers": 2, "size": size, "groups": 2, "norm": "layernorm"}
    input = {"type": "features", "width": 8, "padded": True, "length": 9}
    graph = tfkit.load(spec_of("deep_conv_position", fields, None, input), plugins=PLUGINS)
    tfkit.testing.check_model(graph, plugins=PLUGINS, only=["meaning"])


def test_norms_of_groups_are_what_the_reference_says() -> None:
    input = waveform(length=SAMPLES, padded=True)
    graph = tfkit.load(spec_of("waveform_stem", {**STEM, "normalize": "none"}, NORMALIZED, input), plugins=PLUGINS)
    tfkit.testing.check_model(graph, plugins=PLUGINS, only=["meaning"])
