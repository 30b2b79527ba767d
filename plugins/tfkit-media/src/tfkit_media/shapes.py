"""Draw a small data set of shapes: `python -m tfkit_media.shapes FOLDER`.

The folder then contains images.npy, images of 16 x 16 pixels; labels.npy, the shape in each image; and captions.npy,
the tokens of each caption: a first token, a brightness, a size and a shape. Equal arguments give equal files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SHAPES = ("disc", "ring", "square", "frame", "plus", "cross", "triangle", "bars")
PIXELS = 16
START, BRIGHTNESS, SIZE, SHAPE = 0, 1, 3, 5
"""The first token id of each component of a caption. There are two brightnesses and two sizes."""


def mask_of(shape: str, x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return the pixels of a shape; x and y are 0 in its middle and 1 at its edge."""
    edge = np.maximum(abs(x), abs(y))
    inside = edge <= 1
    masks = {
        "disc": x**2 + y**2 <= 1,
        "ring": (x**2 + y**2 <= 1) & (x**2 + y**2 > 0.35),
        "square": inside,
        "frame": inside & (edge > 0.6),
        "plus": inside & (np.minimum(abs(x), abs(y)) < 0.3),
        "cross": inside & (abs(abs(x) - abs(y)) < 0.35),
        "triangle": inside & (abs(x) <= (y + 1) / 2),
        "bars": inside & (abs(abs(y) - 0.7) < 0.3),
    }
    return masks[shape]


def draw(count: int, seed: int = 0) -> dict[str, NDArray[np.integer]]:
    """Return images, labels and captions by the names of their files."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(len(SHAPES), size=count)
    bright, large = rng.integers(2, size=(2, count))
    rows, columns = np.mgrid[:PIXELS, :PIXELS].astype(np.float64)
    images = rng.normal(20, 12, (count, PIXELS, PIXELS))
    for image, label, light, wide in zip(images, labels, bright, large, strict=True):
        radius = rng.uniform(5.2, 6.5) if wide else rng.uniform(3.4, 4.5)
        x, y = rng.uniform(radius, PIXELS - 1 - radius, size=2)
        image[mask_of(SHAPES[label], (columns - x) / radius, (rows - y) / radius)] += 180 if light else 90
    captions = np.stack([np.full(count, START), BRIGHTNESS + bright, SIZE + large, SHAPE + labels], axis=1)
    return {"images": images.clip(0, 255).astype(np.uint8), "labels": labels, "captions": captions}


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, array in draw(arguments.count, arguments.seed).items():
        np.save(arguments.folder / f"{name}.npy", array)


if __name__ == "__main__":
    main()
