"""Images as the data of a run: with a class for each image, or with the tokens of a caption.

b examples, t positions, c channels, p and q rows and columns of a patch, i and j rows and columns of the grid.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

import tfkit
from tfkit import Batch, Examples, Invalid
from tfkit_media.shapes import SHAPES, draw

IGNORE_INDEX = -100
"""The target of positions that do not count."""
Array = NDArray[Any]
Ids = NDArray[np.int64]


class PixelsConfig(tfkit.DataConfig):
    """Fields of data with images. Each split has random images, the same for every run."""

    mean: float | tuple[float, ...] = 0.5
    """Number to subtract from pixels, or a number for each channel. Integers from 0 to 255 become 0 to 1 first."""
    std: tfkit.PositiveFloat | tuple[tfkit.PositiveFloat, ...] = 0.5
    """Number to divide the result by, or a number for each channel."""
    patch: tfkit.Dim | None = None
    """Rows and columns of a patch. Images then become sequences of patches, features [b, t, c * patch * patch], row by
    row; by default, they stay images."""

    def checked_pixels(self, pixels: Array) -> Array:
        """Return images with an axis for channels; raise `Invalid` for other arrays, and for other channels."""
        if pixels.ndim not in (3, 4) or pixels.dtype.kind not in "uf":
            message = "images must be [n, height, width] or [n, channels, height, width], real or unsigned"
            raise Invalid("images", f"{message}; got {pixels.dtype} {list(pixels.shape)}")
        pixels = pixels[:, None] if pixels.ndim == 3 else pixels
        if self.patch is not None and any(size % self.patch for size in pixels.shape[2:]):
            words = " x ".join(map(str, pixels.shape[2:]))
            message = f"`patch` must divide the rows and columns of the images, {words}; got {self.patch}"
            raise Invalid("patch", message)
        for name in ("mean", "std"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != pixels.shape[1]:
                message = f"`{name}` must have a number for each of {pixels.shape[1]} channels; got {len(value)}"
                raise Invalid(name, message)
        return pixels

    def data(
        self,
        pixels: Array,
        arrays: Mapping[str, Array],
        vocab_size: int,
        n_classes: int | None = None,
        classes: Sequence[str] | None = None,
    ) -> ImageData:
        """Divide images, and arrays of equal length, into the splits."""
        drawn = self.drawn(len(pixels))
        if empty := next((name for name, indices in drawn.items() if not len(indices)), None):
            raise Invalid("split", f"split `{empty}` must have an image; there are {len(pixels)} images")
        parts = {name: ImageExamples(self, pixels, arrays, indices) for name, indices in drawn.items()}
        digest = hashlib.sha256()
        for array in (pixels, *arrays.values()):
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        t = 1 if self.patch is None else pixels[0, 0].size // self.patch**2
        scale = None
        if pixels.dtype.kind == "u" and self.patch is None:
            scale = tuple(np.broadcast_to(value, pixels.shape[1]).tolist() for value in (self.mean, self.std))
        digest_text = digest.hexdigest()
        return ImageData(parts, vocab_size, digest_text, t, n_classes=n_classes, classes=classes, pixel_scale=scale)


class ShapesConfig(PixelsConfig):
    """Drawn images [1, 16, 16], each with the number of its shape: disc, ring, square, frame, plus, cross, ..."""

    kind: Literal["shapes"] = "shapes"
    count: Annotated[int, Field(ge=1, le=10**6)] = 4000
    """The number of images."""
    seed: tfkit.Extent = 0
    """The seed of the drawings."""

    def build(self, length: int | None) -> ImageData:
        arrays = draw(self.count, self.seed)
        return self.data(self.checked_pixels(arrays["images"]), {"targets": arrays["labels"]}, len(SHAPES))


class ImageFilesConfig(PixelsConfig):
    """Fields of data with images on disk."""

    images: str
    """A file `.npy` with images [n, height, width] or [n, channels, height, width]."""

    def located(self, folder: Path) -> Self:
        return self.model_copy(update={name: str((folder / getattr(self, name)).absolute()) for name in self.paths})

    @property
    def paths(self) -> tuple[str, ...]:
        """Names of the fields that are paths."""
        return ("images",)

    def read_pixels(self) -> Array:
        """Read the images as [n, c, height, width]."""
        return self.checked_pixels(_array("images", Path(self.images)))


class ImagesConfig(ImageFilesConfig):
    """Images, each with the number of its class."""

    kind: Literal["images"] = "images"
    images: str
    """A file `.npy` with images [n, height, width] or [n, channels, height, width]; or a folder that contains a folder
    of images for each class, in alphabetical order."""
    labels: str | None = None
    """A file `.npy` with the number of the class of each image, [n]."""

    @property
    def paths(self) -> tuple[str, ...]:
        return ("images",) if self.labels is None else ("images", "labels")

    def build(self, length: int | None) -> ImageData:
        classes = None
        if Path(self.images).is_dir():
            if self.labels is not None:
                raise Invalid("labels", "`labels` has no effect: the folders of `images` are the classes")
            pixels, labels, classes = _folders(Path(self.images))
            pixels = self.checked_pixels(pixels)
        elif self.labels is None:
            raise Invalid("labels", "`labels` is missing", help="name a file `.npy` with the class of each image")
        else:
            pixels, labels = self.read_pixels(), _array("labels", Path(self.labels))
            if labels.shape != (len(pixels),) or labels.dtype.kind not in "iu" or labels.min(initial=0) < 0:
                message = f"`labels` must have a number from 0 for each of {len(pixels)} images"
                raise Invalid("labels", f"{message}; got {labels.dtype} {list(labels.shape)}")
        targets = {"targets": labels.astype(np.int64)}
        count = int(labels.max(initial=0)) + 1
        return self.data(pixels, targets, count, classes=None if classes is None else classes[:count])


class ImagePairsConfig(ImageFilesConfig):
    """Images and the tokens of a caption for each; the target is the number of the image."""

    kind: Literal["image_pairs"] = "image_pairs"
    tokens: str
    """A file `.npy` with the tokens of each caption, [n, t]."""

    @property
    def paths(self) -> tuple[str, ...]:
        return ("images", "tokens")

    def build(self, length: int | None) -> ImageData:
        pixels, tokens = self.read_pixels(), _array("tokens", Path(self.tokens))
        if tokens.ndim != 2 or len(tokens) != len(pixels) or tokens.dtype.kind not in "iu":
            message = f"`tokens` must be ids [n, t] for {len(pixels)} images"
            raise Invalid("tokens", f"{message}; got {tokens.dtype} {list(tokens.shape)}")
        arrays = {"tokens": tokens.astype(np.int64), "targets": np.arange(len(tokens))}
        return self.data(pixels, arrays, int(tokens.max(initial=0)) + 1, n_classes=len(tokens))


class ImageTextsConfig(ImageFilesConfig):
    """An image and the tokens of a text for it, which follow the placeholders of the image; each token is predicted."""

    kind: Literal["image_texts"] = "image_texts"
    tokens: str
    """A file `.npy` with the tokens of each text, [n, t]."""
    vectors: tfkit.Dim
    """Number of vectors of an image, each with a placeholder. The placeholder is the id after the last token."""

    @property
    def paths(self) -> tuple[str, ...]:
        return ("images", "tokens")

    def build(self, length: int | None) -> ImageData:
        pixels, tokens = self.read_pixels(), _array("tokens", Path(self.tokens))
        if tokens.ndim != 2 or len(tokens) != len(pixels) or not tokens.size or tokens.dtype.kind not in "iu":
            message = f"`tokens` must be ids [n, t] for {len(pixels)} images"
            raise Invalid("tokens", f"{message}; got {tokens.dtype} {list(tokens.shape)}")
        if self.patch is not None:
            raise Invalid("patch", "`patch` has no effect: the model reads images", help="remove it")
        placeholder = int(tokens.max()) + 1
        front = np.full((len(tokens), self.vectors), placeholder)
        inputs = np.concatenate([front, tokens[:, :-1]], axis=1).astype(np.int64)
        ignored = np.full((len(tokens), self.vectors - 1), IGNORE_INDEX)
        arrays = {"tokens": inputs, "targets": np.concatenate([ignored, tokens], axis=1).astype(np.int64)}
        data = self.data(pixels, arrays, placeholder + 1)
        return replace(data, length=inputs.shape[1])


@dataclass(frozen=True)
class ImageData:
    """The examples of each split."""

    parts: Mapping[str, ImageExamples]
    vocab_size: int
    fingerprint: str
    length: int = 1
    tokenizer: None = None
    n_classes: int | None = None
    classes: Sequence[str] | None = None
    pixel_scale: tuple[Sequence[float], ...] | None = None

    @property
    def splits(self) -> list[str]:
        """The names of the splits."""
        return list(self.parts)

    def examples(self, split: str, order: str) -> Examples:
        return self.parts[split]


@dataclass(frozen=True)
class ImageExamples:
    """The examples of a split; `numbers` are their indices in the arrays."""

    config: PixelsConfig
    pixels: Array
    arrays: Mapping[str, Array]
    numbers: Ids

    def __len__(self) -> int:
        return len(self.numbers)

    def batch(self, indices: Ids) -> Batch:
        """Return images or their patches in float32, and their labels or tokens."""
        numbers = self.numbers[indices]
        pixels = self.pixels[numbers]
        image = pixels.astype(np.float32) / (255 if pixels.dtype.kind == "u" else 1)
        mean, std = (np.asarray(value, np.float32)[..., None, None] for value in (self.config.mean, self.config.std))
        inputs = {name: array[numbers] for name, array in self.arrays.items() if name != "targets"}
        image = ((image - mean) / std).astype(np.float32)
        images = {"image": image} if self.config.patch is None else {"patches": _patches(image, self.config.patch)}
        if isinstance(self.config, ImageTextsConfig):
            images = {"images": image[:, None]}
        return Batch({**images, **inputs}, self.arrays["targets"][numbers])


def _patches(images: Array, size: int) -> Array:
    """Return the patches of images [b, c, height, width] as [b, t, c * size * size]."""
    import torch

    cut = tfkit.Rearrange("b c (i p) (j q) -> b (i j) (c p q)", p=size, q=size)
    patches: Array = cut(torch.from_numpy(images)).numpy()
    return patches


def _array(field: str, path: Path) -> Array:
    if path.exists() and not path.is_file():  # reading a pipe could block
        raise Invalid(field, f"`{field}` must be a file that `np.save` wrote; got {path.name}")
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise Invalid(field, f"`{field}` cannot be read: {error}", help="name a file that `np.save` wrote") from error
    if not isinstance(array, np.ndarray) or not len(array):
        raise Invalid(field, f"`{field}` must be an array with at least one row; got {path.name}")
    return array


def _folders(folder: Path) -> tuple[Array, Array, list[str]]:
    """Read a folder of images for each class with Pillow; return pixels, labels and the names of the classes."""
    try:
        from PIL import Image
    except ImportError as error:
        help = 'pip install "tfkit-media[folders]", or name a file `.npy`'
        raise Invalid("images", "Pillow must be installed to read a folder of images", help=help) from error
    images, labels = [], []
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    for number, path in enumerate(classes):
        for file in sorted(path.iterdir()):
            if not file.is_file():
                raise Invalid("images", f"`{path.name}/{file.name}` must be an image")
            try:
                with Image.open(file) as image:
                    pixels = np.asarray(image.convert("L" if image.mode in ("1", "L") else "RGB"))
            except OSError as error:
                raise Invalid("images", f"`{path.name}/{file.name}` must be an image: {error}") from error
            images.append(pixels if pixels.ndim == 2 else np.moveaxis(pixels, 2, 0))
            labels.append(number)
    if not images:
        message = f"the folder must have a folder of images for each class; got {folder.name}"
        raise Invalid("images", message)
    if len(sizes := {image.shape for image in images}) > 1:
        sizes_text = " and ".join(str(list(size)) for size in sorted(sizes, key=str)[:2])
        raise Invalid(
            "images", f"all images must have the same size and channels; got {sizes_text}", help="resize them"
        )
    return np.stack(images), np.array(labels), [path.name for path in classes]
