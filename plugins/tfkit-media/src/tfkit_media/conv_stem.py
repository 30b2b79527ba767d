"""The front of a model of sound: convolutions over the frames of a mel spectrogram, and positions.

Whisper: https://arxiv.org/abs/2212.04356.

b batch, f frames, t positions, m d_model.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

import tfkit
from tfkit import Invalid
from tfkit.nn import Rearrange


class ConvStemConfig(tfkit.BlockConfig):
    """Frames to vectors: a convolution and an activation for each stride, plus positions."""

    block: Literal["conv_stem"] = "conv_stem"
    input: tfkit.Wire | None = None
    """The frames to read; or the spectrograms of each row, images of one channel whose columns are frames."""
    d_model: tfkit.Shared[tfkit.Dim]
    """Width of the output."""
    size: tfkit.Dim = 3
    """Frames that a convolution covers; odd."""
    strides: tuple[tfkit.Count, ...] = (1, 2)
    """The stride of each convolution."""
    activation: tfkit.ActivationConfig = tfkit.slot("gelu")
    """Activation after each convolution."""
    position: tfkit.InputPositionConfig | None = None
    """Positions that are added."""
    dropout: tfkit.Shared[tfkit.Immaterial[tfkit.Changeable[tfkit.Probability]]] = 0.0
    """Dropout on the output."""

    def check(self) -> None:
        """Raise `Invalid` for an even kernel size, a stem without convolutions, and unsuitable positions."""
        super().check()
        if self.size % 2 == 0:
            raise Invalid("size", f"`size` must be odd; got {self.size}")
        if not self.strides:
            raise Invalid("strides", "`strides` must have a number for each convolution; got none")
        if self.position is not None:
            self.position.check_width(self.d_model)

    def output(self, inputs: tfkit.Signals) -> tfkit.Signal:
        frames = tfkit.expect(inputs, "input", "sequence", "images")
        if frames.type == "images" and frames.channels != 1:
            raise Invalid("input", f"`input` must be spectrograms of one channel; got {frames.in_words()}")
        n_frames = length = frames.width if frames.type == "images" else frames.length
        for stride in self.strides:
            length = None if length is None else (length - 1) // stride + 1
        longest = None if self.position is None else self.position.longest
        if length is not None and longest is not None and length > longest:
            message = f"{n_frames} frames become {length} positions, but there are {longest}"
            raise Invalid("position", message, help="set `max_len` of the position, or make the input shorter")
        return tfkit.Signal("sequence", self.d_model, length)

    def build(self, make: tfkit.Make, inputs: tfkit.Signals) -> nn.Module:
        frames: tfkit.Signal = inputs["input"]
        position = None if self.position is None else make(self.position, self.d_model)
        several = frames.type == "images"
        width = (frames.rows if several else frames.width) or 0
        return ConvStem(self, width, make(self.activation), position, several=several)


class ConvStem(nn.Module):
    """[b, f, width] -> [b, t, m], or spectrograms [b, n, 1, width, f] -> [b * n, t, m]."""

    def __init__(
        self, config: ConvStemConfig, width: int, activation: nn.Module, position: nn.Module | None, *, several: bool
    ) -> None:
        super().__init__()
        self.several = several
        widths = [width, *[config.d_model] * (len(config.strides) - 1)]
        self.to_channels = Rearrange("b t m -> b m t")
        self.convs = nn.ModuleList(
            nn.Conv1d(width, config.d_model, config.size, stride=stride, padding=config.size // 2)
            for width, stride in zip(widths, config.strides, strict=True)
        )
        self.activation = activation
        self.to_positions = Rearrange("b m t -> b t m")
        self.position = position
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, frames: Tensor) -> Tensor:
        x = frames.flatten(0, 2) if self.several else self.to_channels(frames)
        for conv in self.convs:
            x = self.activation(conv(x))
        x = self.to_positions(x)
        if self.position is not None:
            positions = torch.arange(x.size(1), device=x.device)[None]
            x = x + self.position(positions).to(x.dtype)
        return self.dropout(x)


class StackFramesConfig(tfkit.BlockConfig):
    """Neighbouring vectors of a sequence, concatenated: a sequence of fewer and wider vectors."""

    block: Literal["stack_frames"] = "stack_frames"
    input: tfkit.Wire | None = None
    """The sequence, of a fixed length."""
    size: tfkit.Dim
    """Number of vectors that are concatenated."""

    def output(self, inputs: tfkit.Signals) -> tfkit.Signal:
        frames = tfkit.expect(inputs, "input", "sequence")
        if frames.length is None or frames.mask is not None:
            raise Invalid("input", f"`input` must have a fixed length and no padding; got {frames.in_words()}")
        if frames.length % self.size:
            raise Invalid("size", f"`size` must divide {frames.length}, the positions of the input; got {self.size}")
        return tfkit.Signal("sequence", (frames.width or 0) * self.size, frames.length // self.size)

    def build(self, make: tfkit.Make, inputs: tfkit.Signals) -> nn.Module:
        return StackFrames(self.size)


class StackFrames(nn.Module):
    """[b, (t n), m] -> [b, t, n m]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.stack = Rearrange("b (t n) m -> b t (n m)", n=size)

    def forward(self, x: Tensor) -> Tensor:
        stacked: Tensor = self.stack(x)
        return stacked
