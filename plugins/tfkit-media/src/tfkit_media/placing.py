"""Images in a language model: squares of patches as vectors, and vectors at the positions of placeholder tokens.

transformers' processors write a placeholder token for each vector of an image into a text. The k-th placeholder of a
row takes the k-th vector of its images.

LLaVA: https://arxiv.org/abs/2304.08485. Squares of patches, by pixel shuffle: https://arxiv.org/abs/2404.16821.
Positions of several axes, M-RoPE: https://arxiv.org/abs/2409.12191.

b batch, t positions, n images of a row, p positions of an image, v vectors of all images of a row, m width; i and j
rows and columns of a grid of squares, r and s rows and columns of patches in a square.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit import Invalid
from tfkit.nn import Rearrange


class MergePatchesConfig(tfkit.BlockConfig):
    """Squares of neighbouring patches of an image, each as one vector: fewer vectors of an image."""

    block: Literal["merge_patches"] = "merge_patches"
    input: tfkit.Wire | None = None
    """The vectors of the patches, without a class token."""
    size: tfkit.Dim
    """Rows and columns of patches in a square."""
    by: Literal["concat", "mean", "unfold"] = "concat"
    """The vectors of a square are concatenated, row by row; averaged; or concatenated and ordered by channels, as by
    `torch.nn.functional.unfold`."""

    def output(self, inputs: tfkit.Signals) -> tfkit.Signal:
        patches = tfkit.expect(inputs, "input", "sequence")
        if patches.rows is None or patches.length is None:
            message = f"`input` must be the patches of an image, without further tokens; got {patches.in_words()}"
            raise Invalid("input", message)
        for noun, number in (("rows", patches.rows), ("columns", patches.length // patches.rows)):
            if number % self.size:
                raise Invalid("size", f"`size` must divide {number}, the {noun} of patches; got {self.size}")
        width = (patches.width or 0) * (1 if self.by == "mean" else self.size**2)
        return replace(patches, width=width, length=patches.length // self.size**2, rows=patches.rows // self.size)

    def build(self, make: tfkit.Make, inputs: tfkit.Signals) -> nn.Module:
        rows = inputs["input"].rows
        return MergePatches(self.size, rows, inputs["input"].length // rows, by=self.by)


class MergePatches(nn.Module):
    """[b, (i r) (j s), m] -> [b, i j, r s m], or [b, i j, m r s], or [b, i j, m] by their mean."""

    def __init__(self, size: int, rows: int, columns: int, *, by: str) -> None:
        super().__init__()
        self.mean = by == "mean"
        to = {"mean": "b (i j) (r s) m", "concat": "b (i j) (r s m)", "unfold": "b (i j) (m r s)"}[by]
        self.to_squares = Rearrange(f"b (i r j s) m -> {to}", i=rows // size, r=size, j=columns // size, s=size)

    def forward(self, x: Tensor) -> Tensor:
        squares = self.to_squares(x)
        if self.mean:
            return squares.mean(dim=2)
        return squares


class JoinImagesConfig(tfkit.BlockConfig):
    """The vectors of all images of a row, one image after the other."""

    joins_images = True
    block: Literal["join_images"] = "join_images"
    input: tfkit.Wire | None = None
    """The vectors of each image."""
    images: tfkit.Wire
    """The images."""
    skip: tfkit.Extent = 0
    """Number of first vectors of each image that are omitted, such as a class token."""

    def output(self, inputs: tfkit.Signals) -> tfkit.Signal:
        sequence = tfkit.expect(inputs, "input", "sequence")
        tfkit.expect(inputs, "images", "images")
        if not sequence.per_image or sequence.length is None:
            message = f"`input` must be the vectors of images; got {sequence.in_words()} for each row"
            raise Invalid("input", message, help="compute it from an input of `type: images`")
        if self.skip >= sequence.length:
            message = f"`skip` must be less than {sequence.length}, the vectors of an image; got {self.skip}"
            raise Invalid("skip", message)
        return replace(sequence, length=None, image_length=sequence.length - self.skip)

    def build(self, make: tfkit.Make, inputs: tfkit.Signals) -> nn.Module:
        return JoinImages(self.skip)


class JoinImages(nn.Module):
    """[b * n, p, m] and images [b, n, ...] -> [b, n * (p - skip), m]."""

    def __init__(self, skip: int) -> None:
        super().__init__()
        self.skip = skip

    def forward(self, x: Tensor, images: Tensor) -> Tensor:
        x = x[:, self.skip :]
        return x.reshape(images.size(0), images.size(1) * x.size(1), x.size(2))


class ImageBlocksConfig(tfkit.BlockConfig):
    """The number of the block of each token, for a decoder: 1 at the placeholder tokens of images, and 0 in text."""

    block: Literal["image_blocks"] = "image_blocks"
    input: tfkit.Wire | None = None
    """The tokens."""
    token: tfkit.Extent
    """The id of the placeholder token."""

    def output(self, inputs: tfkit.Signals) -> tfkit.Signal:
        return tfkit.Signal("positions", length=tfkit.expect(inputs, "input", "tokens").length)

    def placeholders(self) -> Mapping[str, int]:
        return {"input": self.token}

    def decoding(self, inputs: tfkit.Signals) -> tfkit.Decoding:
        return tfkit.Decoding()

    def build(self, make: tfkit.Make, inputs: tfkit.Signals) -> nn.Module:
        return ImageBlocks(self.token)


class ImageBlocks(nn.Module):
    """Tokens [b, t] -> 1 at placeholders, 0 elsewhere, int [b, t]."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token = token

    def forward(self, tokens: Tensor) -> Tensor:
        return (tokens == self.token).long()


class ImagePositionsConfig(tfkit.BlockConfig):
    """Positions on three axes, time, row and column, for the `positions` of a decoder: M-RoPE.

    A text counts on all axes. The vectors of an image have the time of its first vector, to which their row and their
    column are added. The text after an image continues after its largest position.
    """

    block: Literal["image_positions"] = "image_positions"
    input: tfkit.MaskedWire | None = None
    """The tokens."""
    images: tfkit.MemoryWire
    """The vectors of the images of each row."""
    token: tfkit.Extent
    """The id of the placeholder token."""

    def output(self, inputs: tfkit.Signals) -> tfkit.Signal:
        tokens, images = tfkit.expect(inputs, "input", "tokens"), tfkit.expect(inputs, "images", "sequence")
        if images.rows is None or images.image_length is None:
            message = f"`images` must be the patches of images without further tokens; got {images.in_words()}"
            raise Invalid("images", message, help="name the output of `join_images`")
        return tfkit.Signal("positions", width=3, length=tokens.length)

    def placeholders(self) -> Mapping[str, int]:
        return {"input": self.token}

    def decoding(self, inputs: tfkit.Signals) -> tfkit.Decoding:
        return tfkit.Decoding(past=True, caches=((tfkit.Cached(1, 1),),))

    def build(self, make: tfkit.Make, inputs: tfkit.Signals) -> nn.Module:
        rows = inputs["images"].rows
        return ImagePositions(self.token, rows, inputs["images"].image_length // rows)


class ImagePositions(nn.Module):
    """Tokens [b, t] -> positions [b, t, 3]. Decoding caches of each token whether it is a placeholder."""

    def __init__(self, token: int, rows: int, columns: int) -> None:
        super().__init__()
        self.token = token
        self.rows = rows
        self.columns = columns

    def forward(
        self,
        tokens: Tensor,
        images: Tensor | None = None,
        mask: Tensor | None = None,
        images_mask: Tensor | None = None,
        caches: list[list[Tensor]] | None = None,
        past: tfkit.Past | None = None,
    ) -> Tensor:
        placeholders = tokens == self.token
        if mask is not None:
            real = mask.to(torch.bool)
            placeholders = placeholders & real
            numbers = (real.long().cumsum(dim=1) - 1).clamp(min=0)
        else:
            numbers = torch.arange(tokens.size(1), device=tokens.device)[None]
        ordinals = placeholders.long().cumsum(dim=1) - placeholders.long()
        if caches is not None and past is not None:
            earlier = earlier_placeholders(caches[0][0], placeholders, mask, past)
            ordinals = ordinals + earlier
            lengths = past.lengths
            numbers = numbers + past.start if lengths is None else numbers + lengths[:, None]
        vectors = self.rows * self.columns
        inside = torch.where(placeholders, ordinals % vectors, torch.zeros_like(ordinals))
        # An image of n vectors takes as many positions as its longer side.
        saved = ordinals // vectors * (vectors - max(self.rows, self.columns))
        first = numbers - saved - inside
        return torch.stack((first, first + inside // self.columns, first + inside % self.columns), dim=-1)


class PlaceImagesConfig(tfkit.BlockConfig):
    """The vectors of a text, with the vectors of images at its placeholder tokens, in order."""

    block: Literal["place_images"] = "place_images"
    input: tfkit.MaskedWire | None = None
    """The vectors of the tokens."""
    tokens: tfkit.Wire
    """The tokens."""
    images: tfkit.MemoryWire
    """The vectors of the images of each row."""
    token: tfkit.Extent
    """The id of the placeholder token."""

    def output(self, inputs: tfkit.Signals) -> tfkit.Signal:
        text = tfkit.expect(inputs, "input", "sequence")
        tfkit.expect(inputs, "tokens", "tokens")
        images = tfkit.expect(inputs, "images", "sequence", width=text.width)
        if images.mask is not None:
            raise Invalid("images", "`images` cannot have padding: all images have the same number of vectors")
        return text

    def placeholders(self) -> Mapping[str, int]:
        return {"tokens": self.token}

    def decoding(self, inputs: tfkit.Signals) -> tfkit.Decoding:
        vectors = tfkit.Cached(1, inputs["images"].width)
        return tfkit.Decoding(past=True, caches=((tfkit.Cached(1, 1),),), memory_caches=((vectors,),))

    def build(self, make: tfkit.Make, inputs: tfkit.Signals) -> nn.Module:
        return PlaceImages(self.token)


class PlaceImages(nn.Module):
    """Vectors [b, t, m], tokens [b, t] and images [b, v, m] -> [b, t, m].

    Decoding caches the vectors of the images, and of each token whether it is a placeholder, in the slot of its number
    without padding; padding has the last slot.
    """

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token = token

    def forward(
        self,
        x: Tensor,
        tokens: Tensor,
        images: Tensor | None = None,
        mask: Tensor | None = None,
        images_mask: Tensor | None = None,
        caches: list[list[Tensor]] | None = None,
        memory_caches: list[list[Tensor]] | None = None,
        past: tfkit.Past | None = None,
    ) -> Tensor:
        placeholders = tokens == self.token
        if mask is not None:
            placeholders = placeholders & mask.to(torch.bool)
        ordinals = placeholders.long().cumsum(dim=1)
        if caches is not None and past is not None:
            ordinals = ordinals + earlier_placeholders(caches[0][0], placeholders, mask, past)
        if memory_caches is not None:
            cached = memory_caches[0][0]
            if images is not None:
                cached.copy_(images[:, None])
            images = cached[:, 0]
        assert images is not None
        # Row 0 stands for all other tokens. A placeholder without a vector is an index out of range.
        rows = F.pad(images, (0, 0, 1, 0))
        index = torch.where(placeholders, ordinals, torch.zeros_like(ordinals))
        placed = rows.gather(1, index[:, :, None].expand(-1, -1, rows.size(2)))
        return torch.where(placeholders[:, :, None], placed.to(x.dtype), x)


def earlier_placeholders(cache: Tensor, placeholders: Tensor, mask: Tensor | None, past: tfkit.Past) -> Tensor:
    """Return the number of placeholders that each row has read before, [b, 1], and cache the new ones."""
    lengths = past.lengths
    if lengths is None:
        lengths = torch.full((placeholders.size(0),), past.start, device=placeholders.device)
    slots = torch.arange(cache.size(2), device=placeholders.device)
    earlier = (cache[:, 0, :, 0] > 0) & (slots < lengths[:, None])
    if mask is None:
        numbers = lengths[:, None] + torch.arange(placeholders.size(1), device=placeholders.device)
    else:
        real = mask.to(torch.bool)
        numbers = torch.where(real, lengths[:, None] + real.long().cumsum(dim=1) - 1, cache.size(2) - 1)
    cache[:, 0, :, 0].scatter_(1, numbers, placeholders.to(cache.dtype))
    return earlier.long().sum(dim=1, keepdim=True)
