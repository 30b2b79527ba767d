"""An image as a sequence: a linear layer on each patch, class and register tokens, and positions of a grid.

Learned positions have the size of the images that they were learned on. For other images they are interpolated.

ViT: https://arxiv.org/abs/2010.11929. Registers: https://arxiv.org/abs/2309.16588.
Sinusoidal positions of a grid: https://arxiv.org/abs/2111.06377.

b batch, t positions, c channels, p and q rows and columns of a patch, i and j rows and columns of the grid, m d_model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit import Invalid
from tfkit.nn import Linear, Rearrange, Table, settings


class PatchesConfig(tfkit.BlockConfig):
    """An image to vectors: class and register tokens, then each patch projected, plus positions."""

    block: Literal["patches"] = "patches"
    input: tfkit.Wire | None = None
    """The image to read, or the images of each row."""
    d_model: tfkit.Shared[tfkit.Dim]
    """Width of the output."""
    size: tfkit.Dim = 16
    """Rows and columns of a patch; rows and columns of the image that do not fill a patch are ignored."""
    row_stride: tfkit.Dim | None = None
    """Rows from a patch to the next patch below it, by default `size`; fewer if patches overlap, as in AST."""
    column_stride: tfkit.Dim | None = None
    """Columns from a patch to the next patch on its right, by default `size`."""
    frames: tfkit.Dim = 1
    """Number of frames of a patch, all of which are the image, as in models that also read videos."""
    bias: bool = True
    """If true, the projection has a bias."""
    class_token: bool = True
    """If true, a learned token precedes the patches, as for classifiers."""
    distillation_token: bool = False
    """If true, a second learned token follows it, as in DeiT."""
    registers: tfkit.Extent = 0
    """Number of learned tokens without a position, between the class tokens and the patches."""
    position: Literal["learned", "sinusoidal"] | None = "learned"
    """Positions that are added: learned, of class tokens and patches; or sines of the row and column of each patch."""
    learned_height: tfkit.Dim | None = None
    """Rows of the images that the positions were learned on, in pixels; by default, the rows of the input."""
    learned_width: tfkit.Dim | None = None
    """Columns of these images."""
    antialias: bool = False
    """If true, the interpolation to smaller images averages, as in DINOv2 with registers."""
    dropout: tfkit.Shared[tfkit.Immaterial[tfkit.Changeable[tfkit.Probability]]] = 0.0
    """Dropout on the output."""

    def check(self) -> None:
        """Raise `Invalid` for a distillation token without a class token, idle settings, and invalid widths."""
        super().check()
        if self.distillation_token and not self.class_token:
            raise Invalid("distillation_token", "`distillation_token` cannot be used without `class_token`")
        for name in ("learned_height", "learned_width", "antialias"):
            if getattr(self, name) and self.position != "learned":
                raise Invalid(name, f"`{name}` has no effect: no positions are learned", help="remove it")
        if (self.learned_height is None) != (self.learned_width is None):
            name = "learned_width" if self.learned_width is None else "learned_height"
            raise Invalid(name, f"`{name}` is missing: the positions were learned on images of two sizes")
        if self.antialias and self.learned_height is None:
            help = "add `learned_height` and `learned_width`, or remove it"
            raise Invalid("antialias", "`antialias` has no effect: the positions are not interpolated", help=help)
        if self.position == "sinusoidal" and self.d_model % 4:
            raise Invalid("position", f"sinusoidal positions need a width that is a multiple of 4; got {self.d_model}")

    @property
    def pattern_sizes(self) -> Mapping[str, int]:
        """Sizes by letter: p and q the rows and columns of a patch, t its frames."""
        return {"p": self.size, "q": self.size, "t": self.frames}

    @property
    def front(self) -> int:
        """Number of class tokens, which have a position."""
        return int(self.class_token) + int(self.distillation_token)

    @property
    def strides(self) -> tuple[int, int]:
        """Rows and columns from a patch to the next."""
        return self.row_stride or self.size, self.column_stride or self.size

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the patches of an image."""
        row_stride, column_stride = self.strides
        return (height - self.size + row_stride) // row_stride, (width - self.size + column_stride) // column_stride

    def output(self, inputs: tfkit.Signals) -> tfkit.Signal:
        image = tfkit.expect(inputs, "input", "image", "images")
        rows, columns = self.grid(image.rows or 0, image.width or 0)
        if min(rows, columns) < 1:
            raise Invalid("size", f"a patch of {self.size} x {self.size} must fit into {image.in_words()}")
        if self.learned_height == image.rows and self.learned_width == image.width:
            message = "`learned_height` and `learned_width` have no effect: the image has this size"
            raise Invalid("learned_height", message, help="remove both")
        if self.learned_height is not None and min(self.grid(self.learned_height, self.learned_width or 0)) < 1:
            raise Invalid("learned_height", f"a patch of {self.size} x {self.size} must fit into the learned size")
        front = self.front + self.registers
        return tfkit.Signal("sequence", self.d_model, front + rows * columns, rows=None if front else rows)

    def build(self, make: tfkit.Make, inputs: tfkit.Signals) -> nn.Module:
        return Patches(self, inputs["input"])


class Patches(nn.Module):
    """[b, c, height, width] -> [b, t, m], or images [b, n, c, height, width] -> [b * n, t, m]."""

    def __init__(self, config: PatchesConfig, image: tfkit.Signal) -> None:
        super().__init__()
        self.several = image.type == "images"
        self.image_height = image.rows or 0
        self.image_width = image.width or 0
        grid = config.grid(self.image_height, self.image_width)
        ends = [(n - 1) * stride + config.size for n, stride in zip(grid, config.strides, strict=True)]
        self.height, self.width = ends
        self.split: nn.Module = Rearrange("b c (i p) (j q) -> b (i j) (c p q)", p=config.size, q=config.size)
        if config.strides != (config.size, config.size):
            self.split = Windows(config.size, *config.strides)
        pixels = (image.channels or 0) * config.frames * config.size * config.size
        self.project = Linear(pixels, config.d_model, bias=config.bias)
        self.frames = config.frames
        self.class_token = Tokens(1, config.d_model) if config.class_token else None
        self.distillation_token = Tokens(1, config.d_model) if config.distillation_token else None
        self.registers = Tokens(config.registers, config.d_model) if config.registers else None
        self.position: nn.Module | None = None
        if config.position == "learned":
            learned = grid
            if config.learned_height is not None and config.learned_width is not None:
                learned = config.grid(config.learned_height, config.learned_width)
            self.position = LearnedGrid(config.front, learned, grid, config.d_model, antialias=config.antialias)
        elif config.position == "sinusoidal":
            self.position = SinusoidalGrid(config.front, grid, config.d_model)
        self.front = config.front
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, image: Tensor) -> Tensor:
        if self.several:
            image = image.flatten(0, 1)
        # Without this check, an image of a different size would be cropped silently.
        assert image.size(2) == self.image_height, "an image of another height"
        assert image.size(3) == self.image_width, "an image of another width"
        image = image[:, :, : self.height, : self.width]
        if self.frames > 1:
            image = image.repeat_interleave(self.frames, dim=1)
        x = self.project(self.split(image))
        if self.distillation_token is not None:
            x = torch.cat((self.distillation_token(x), x), dim=1)
        if self.class_token is not None:
            x = torch.cat((self.class_token(x), x), dim=1)
        if self.position is not None:
            x = self.position(x)
        if self.registers is not None:
            x = torch.cat((x[:, : self.front], self.registers(x), x[:, self.front :]), dim=1)
        return self.dropout(x)


class Windows(nn.Module):
    """The values of patches that overlap, or have gaps: [b, c, height, width] -> [b, i * j, c * p * q]."""

    extra_repr = settings

    def __init__(self, size: int, row_stride: int, column_stride: int) -> None:
        super().__init__()
        self.size = size
        self.row_stride = row_stride
        self.column_stride = column_stride
        self.to_sequence = Rearrange("b c i j p q -> b (i j) (c p q)")

    def forward(self, image: Tensor) -> Tensor:
        rows = image.unfold(2, self.size, self.row_stride)
        patches: Tensor = self.to_sequence(rows.unfold(3, self.size, self.column_stride))
        return patches


class Tokens(Table):
    """Learned tokens for every row of a batch: x [b, t, m] -> [b, rows of the table, m]."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.weight.expand(x.size(0), -1, -1)


class LearnedGrid(Table):
    """x [b, t, m] plus learned positions of class tokens and of a grid, interpolated if the grid has another size."""

    def __init__(
        self, front: int, learned: tuple[int, int], grid: tuple[int, int], width: int, *, antialias: bool
    ) -> None:
        super().__init__(front + learned[0] * learned[1], width)
        self.front = front
        self.grid = grid
        self.interpolates = learned != grid
        self.antialias = antialias
        self.to_grid = Rearrange("b (i j) m -> b m i j", j=learned[1])
        self.to_sequence = Rearrange("b m i j -> b (i j) m")

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight = self.weight
        if self.interpolates:
            learned = self.to_grid(weight[None, self.front :])
            # Interpolation in half precision would round the positions.
            wide = learned if learned.dtype == torch.float64 else learned.float()
            rows, columns = self.grid
            resized = F.interpolate(wide, size=[rows, columns], mode="bicubic", antialias=self.antialias)
            weight = torch.cat((weight[: self.front], self.to_sequence(resized)[0].to(weight.dtype)), dim=0)
        return x + weight


class SinusoidalGrid(nn.Module):
    """x [b, t, m] plus sines and cosines of the columns and of the rows of a grid; nothing for class tokens."""

    def __init__(self, front: int, grid: tuple[int, int], width: int) -> None:
        super().__init__()
        self.front = front
        self.rows = grid[0]
        self.columns = grid[1]
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        patches = torch.arange(self.rows * self.columns, device=x.device)
        positions = torch.stack((patches % self.columns, patches // self.columns), dim=1).float()
        channels = torch.arange(self.width // 4, device=x.device)
        angles = positions[:, :, None] * torch.exp(channels * (-4 * math.log(10000.0) / self.width))
        added = torch.cat((angles.sin(), angles.cos()), dim=2).flatten(1).to(x.dtype)
        return torch.cat((x[:, : self.front], x[:, self.front :] + added), dim=1)
