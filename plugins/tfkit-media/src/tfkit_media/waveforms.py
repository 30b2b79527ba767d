"""The front of a model of raw sound: convolutions over the samples of a waveform, norms, and positions by convolutions.

wav2vec 2.0: https://arxiv.org/abs/2006.11477. HuBERT: https://arxiv.org/abs/2106.07447. data2vec:
https://arxiv.org/abs/2202.03555. Moonshine: https://arxiv.org/abs/2410.15608.

b batch, t samples, f frames, c channels, m d_model, g groups, k size of a convolution.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit import OWN_MASK, Invalid
from tfkit.nn import Rearrange, named

NORM_EPS = 1e-5
"""Term added to the variances of the norms between convolutions."""


class WaveformStemConfig(tfkit.BlockConfig):
    """Samples, or other positions of a sequence, to vectors: convolutions without padding, each with an activation.

    A frame is padding if any of its samples is.
    """

    block: Literal["waveform_stem"] = "waveform_stem"
    input: tfkit.MaskedWire | None = None
    """The sequence to read, such as the samples of a waveform, features of width 1."""
    d_model: tfkit.Shared[tfkit.Dim]
    """Number of channels of each convolution, and width of the output."""
    sizes: tuple[tfkit.Dim, ...] = (10, 3, 3, 3, 3, 2, 2)
    """Positions that each convolution covers."""
    strides: tuple[tfkit.Dim, ...] = (5, 2, 2, 2, 2, 2, 2)
    """The stride of each convolution."""
    bias: bool = False
    """If true, convolutions have a bias."""
    normalize: Literal["first", "each", "none"] = "first"
    """`first`: after the first convolution, each channel over all frames that are not padding; `each`: after every
    convolution, each frame over all channels; `none`: no norms."""
    activation: tfkit.ActivationConfig = tfkit.slot("gelu")
    """Activation after each convolution."""
    output_norm: tfkit.NormConfig | None = None
    """Norm of the output."""

    def check(self) -> None:
        """Raise `Invalid` unless each convolution has a size and a stride."""
        super().check()
        if not self.sizes:
            raise Invalid("sizes", "`sizes` must have a number for each convolution; got none")
        if len(self.strides) != len(self.sizes):
            message = (
                f"`strides` must have a number for each of {len(self.sizes)} convolutions; got {len(self.strides)}"
            )
            raise Invalid("strides", message)

    def frames(self, samples: int) -> int:
        """Return the number of frames; 0 or less if a single frame covers more samples."""
        for size, stride in zip(self.sizes, self.strides, strict=True):
            samples = (samples - size) // stride + 1
        return samples

    @property
    def covered(self) -> int:
        """Number of samples that a frame covers."""
        covered = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            covered = (covered - 1) * stride + size
        return covered

    def output(self, inputs: tfkit.Signals) -> tfkit.Signal:
        samples = tfkit.expect(inputs, "input", "sequence")
        length = None if samples.length is None else self.frames(samples.length)
        if length is not None and length < 1:
            raise Invalid(
                "input", f"`input` must have {self.covered} positions, which a frame covers; got {samples.length}"
            )
        return tfkit.Signal("sequence", self.d_model, length, mask=None if samples.mask is None else OWN_MASK)

    def build(self, make: tfkit.Make, inputs: tfkit.Signals) -> nn.Module:
        layers = []
        for number, (size, stride) in enumerate(zip(self.sizes, self.strides, strict=True)):
            width = self.d_model if number else inputs["input"].width
            conv = nn.Conv1d(width, self.d_model, size, stride=stride, bias=self.bias)
            norm: nn.Module | None = None
            if self.normalize == "each":
                norm = FrameNorm(self.d_model, NORM_EPS)
            elif self.normalize == "first" and number == 0:
                norm = PaddedGroupNorm(self.d_model, self.d_model, NORM_EPS)
            layers.append(StemLayer(conv, norm, make(self.activation)))
        output_norm = None if self.output_norm is None else make(self.output_norm, self.d_model)
        stem = WaveformStem if inputs["input"].mask is None else PaddedWaveformStem
        return stem(layers, output_norm)


class StemLayer(nn.Module):
    """A convolution, a norm and an activation: [b, c, t] -> [b, m, f], with the mask [b, f] of the frames."""

    def __init__(self, conv: nn.Conv1d, norm: nn.Module | None, activation: nn.Module) -> None:
        super().__init__()
        self.size = conv.kernel_size[0]
        self.stride = conv.stride[0]
        self.conv = conv
        self.norm = norm
        self.activation = activation

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if mask is not None:
            mask = mask.unfold(1, self.size, self.stride).all(dim=2)
        x = self.conv(x)
        # On a CPU, a convolution of one channel returns the channels of a frame next to each other. A later norm would
        # save a copy for the backward pass, in addition to the values that the activation saves.
        x = x.contiguous() if self.norm is None else self.norm(x, mask)
        return self.activation(x), mask


class FrameNorm(nn.LayerNorm):
    """A layer norm of the channels of each frame, [b, m, f] -> [b, m, f]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps=eps)
        self.to_frames = Rearrange("b m f -> b f m")
        self.to_channels = Rearrange("b f m -> b m f")

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        frames = F.layer_norm(self.to_frames(input), self.normalized_shape, self.weight, self.bias, self.eps)
        channels: Tensor = self.to_channels(frames)
        return channels


class PaddedGroupNorm(nn.GroupNorm):
    """A norm of groups of channels over the frames that are not padding, [b, m, f] -> [b, m, f]."""

    def __init__(self, groups: int, width: int, eps: float) -> None:
        super().__init__(groups, width, eps=eps)
        self.to_groups = Rearrange("b (g c) f -> b g (c f)", g=groups)
        self.to_channels = Rearrange("b g (c f) -> b (g c) f", c=width // groups)

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
        count = mask.sum(dim=1).clamp(min=1)[:, None, None] * (self.num_channels // self.num_groups)
        padding = self.to_groups((~mask)[:, None].expand_as(input))
        wide = self.to_groups(input if input.dtype == torch.float64 else input.float())
        mean = wide.masked_fill(padding, 0.0).sum(dim=2, keepdim=True) / count
        centered = wide - mean
        variance = centered.masked_fill(padding, 0.0).square().sum(dim=2, keepdim=True) / count
        normalized = self.to_channels(centered * (variance + self.eps).rsqrt()).to(input.dtype)
        return normalized * self.weight[:, None] + self.bias[:, None]


class Convolutions(nn.Module):
    """The layers of a stem, and the norm of its output."""

    def __init__(self, layers: list[StemLayer], output_norm: nn.Module | None) -> None:
        super().__init__()
        self.to_channels = Rearrange("b t c -> b c t")
        self.layers = nn.ModuleList(layers)
        self.to_frames = Rearrange("b m f -> b f m")
        self.output_norm = output_norm

    def frames(self, waveform: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the vectors of the frames, [b, f, m], and their mask, [b, f]."""
        x = self.to_channels(waveform)
        for layer in self.layers:
            x, mask = layer(x, mask)
        x = self.to_frames(x)
        if self.output_norm is not None:
            x = self.output_norm(x)
        return x, mask


class WaveformStem(Convolutions):
    """[b, t, 1] -> [b, f, m]."""

    def forward(self, waveform: Tensor) -> Tensor:
        return self.frames(waveform, None)[0]


class PaddedWaveformStem(Convolutions):
    """[b, t, 1] and the padding mask [b, t] -> [b, f, m] and the mask [b, f]."""

    def forward(self, waveform: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self.frames(waveform, None if mask is None else mask.to(torch.bool))


class GroupedConfig(tfkit.BlockConfig):
    """Base class of blocks that compute groups of channels of a sequence separately, and keep its shape."""

    input: tfkit.MaskedWire | None = None
    """The sequence to read."""
    d_model: tfkit.Shared[tfkit.Dim]
    """Width of the sequence."""
    groups: tfkit.Count
    """Number of groups of channels that do not mix."""

    def check(self) -> None:
        """Raise `Invalid` for groups that do not divide the width."""
        super().check()
        if self.d_model % self.groups:
            raise Invalid("groups", f"`groups` must divide d_model, {self.d_model}; got {self.groups}")

    def output(self, inputs: tfkit.Signals) -> tfkit.Signal:
        return tfkit.expect(inputs, "input", "sequence", width=self.d_model)


class GroupNormConfig(GroupedConfig):
    """A norm of a sequence as in images: a group of channels has one mean and one variance over all positions.

    Padding does not count. A single group normalizes all channels together, d_model groups each channel alone.
    """

    block: Literal["group_norm"] = "group_norm"
    groups: tfkit.Count = 1
    """Number of groups of channels."""
    eps: tfkit.PositiveFloat = NORM_EPS
    """Term added to the variances."""

    def build(self, make: tfkit.Make, inputs: tfkit.Signals) -> nn.Module:
        return GroupNorm(self.groups, self.d_model, self.eps)


class GroupNorm(nn.Module):
    """[b, f, m] -> [b, f, m]."""

    def __init__(self, groups: int, width: int, eps: float) -> None:
        super().__init__()
        self.to_channels = Rearrange("b f m -> b m f")
        self.norm = PaddedGroupNorm(groups, width, eps)
        self.to_frames = Rearrange("b m f -> b f m")

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        normalized: Tensor = self.to_frames(
            self.norm(self.to_channels(x), None if mask is None else mask.to(torch.bool))
        )
        return normalized


class ConvPositionConfig(GroupedConfig):
    """Positions from the vectors around each: a convolution and an activation that are added, then a norm.

    The weight of the convolution is a direction times a gain for each of its taps.
    """

    block: Literal["conv_position"] = "conv_position"
    size: tfkit.Dim = 128
    """Positions that the convolution covers, centered; of an even number, one more before than after."""
    groups: tfkit.Count = 16
    """Number of groups of channels that do not mix."""
    activation: tfkit.ActivationConfig = tfkit.slot("gelu")
    """Activation of the convolution."""
    norm: tfkit.NormConfig | None = None
    """Norm of the sum."""
    dropout: tfkit.Shared[tfkit.Immaterial[tfkit.Changeable[tfkit.Probability]]] = 0.0
    """Dropout on the output."""

    def build(self, make: tfkit.Make, inputs: tfkit.Signals) -> nn.Module:
        norm = None if self.norm is None else make(self.norm, self.d_model)
        return ConvPosition(self, make(self.activation), norm)


class ConvPosition(nn.Module):
    """[b, f, m] -> [b, f, m]. Padding is zeros, as beyond both ends of a sequence."""

    def __init__(self, config: ConvPositionConfig, activation: nn.Module, norm: nn.Module | None) -> None:
        super().__init__()
        self.conv = WeightNormConv(config.d_model, config.size, config.groups)
        self.activation = activation
        self.norm = norm
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x = x.masked_fill(~mask.to(torch.bool)[:, :, None], 0.0)
        x = x + self.activation(self.conv(x))
        if self.norm is not None:
            x = self.norm(x)
        return self.dropout(x)


class WeightNormConv(nn.Module):
    """A convolution with as many outputs as inputs, [b, f, m] -> [b, f, m]. https://arxiv.org/abs/1602.07868.

    Attributes:
        direction: [m, m / groups, k]; its length for each tap has no effect.
        gain: [k], the length of the weight for each tap.
        bias: [m].
    """

    def __init__(self, width: int, size: int, groups: int) -> None:
        super().__init__()
        self.size = size
        self.groups = groups
        self.direction = nn.Parameter(torch.empty(width, width // groups, size))
        self.gain = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(width))
        self.to_channels = Rearrange("b f m -> b m f")
        self.to_frames = Rearrange("b m f -> b f m")

    def reset_parameters(self) -> None:
        """Fill the weight at random, with the spread of the published models before training."""
        nn.init.normal_(self.direction, std=2 / math.sqrt(self.size * self.direction.size(0)))
        with torch.no_grad():
            self.gain.copy_(self.direction.square().sum(dim=(0, 1)).sqrt())
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.gain / self.direction.square().sum(dim=(0, 1)).sqrt()
        channels, weight = self.to_channels(x), self.direction * scale
        y = F.conv1d(channels, weight, self.bias, padding=self.size // 2, groups=self.groups)
        frames: Tensor = self.to_frames(y[:, :, : x.size(1)])
        return frames

    def extra_repr(self) -> str:
        return named(self.direction.size(0), size=self.size, groups=self.groups)


class DeepConvPositionConfig(ConvPositionConfig):
    """Positions from the vectors around each: the output of several convolutions is added, then a norm.

    Each convolution has a norm of every position, without weights, and an activation.
    """

    block: Literal["deep_conv_position"] = "deep_conv_position"  # type: ignore[assignment]
    n_layers: tfkit.Count = 5
    """Number of convolutions, one after the other."""
    size: tfkit.Dim = 19
    """Positions that each convolution covers, centered; of an even number, one more before than after."""
    activation: tfkit.ActivationConfig = tfkit.slot("gelu")
    """Activation after each convolution and its norm."""

    def build(self, make: tfkit.Make, inputs: tfkit.Signals) -> nn.Module:
        norm = None if self.norm is None else make(self.norm, self.d_model)
        return DeepConvPosition(self, make(self.activation), norm)


class DeepConvPosition(nn.Module):
    """[b, f, m] -> [b, f, m]. For every convolution, padding is zeros, as beyond both ends of a sequence."""

    def __init__(self, config: DeepConvPositionConfig, activation: nn.Module, norm: nn.Module | None) -> None:
        super().__init__()
        width = config.d_model
        self.to_channels = Rearrange("b f m -> b m f")
        self.convs = nn.ModuleList(
            nn.Conv1d(width, width, config.size, padding=config.size // 2, groups=config.groups)
            for _ in range(config.n_layers)
        )
        self.to_frames = Rearrange("b m f -> b f m")
        self.frame_norm = nn.LayerNorm(width, eps=NORM_EPS, elementwise_affine=False)
        self.activation = activation
        self.norm = norm
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = x
        for conv in self.convs:
            if mask is not None:
                y = y.masked_fill(~mask.to(torch.bool)[:, :, None], 0.0)
            y = self.to_frames(conv(self.to_channels(y)))[:, : x.size(1)]
            y = self.activation(self.frame_norm(y))
        x = x + y
        if self.norm is not None:
            x = self.norm(x)
        return self.dropout(x)
