"""Data with images: what is read from files, and what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tfkit_media import ImagePairsConfig, ImagesConfig, ImageTextsConfig, ShapesConfig
from tfkit_media.shapes import draw

from tfkit import Invalid

N = 20
PIXELS = np.random.default_rng(0).integers(0, 256, (N, 3, 4, 5)).astype(np.uint8)
LABELS = np.arange(N) % 4


def saved(folder: Path, **arrays: Any) -> dict[str, str]:
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return {name: str(folder / f"{name}.npy") for name in arrays}


def test_every_image_has_its_label(tmp_path: Path) -> None:
    data = ImagesConfig(**saved(tmp_path, images=PIXELS, labels=LABELS), mean=0.25, std=2.0).build(None)
    numbers = []
    for split, count in {"train": 18, "val": 2}.items():
        examples = data.examples(split, "sequential")
        batch = examples.batch(np.arange(len(examples)))
        assert len(examples) == count
        images = (batch.inputs["image"] * 2 + 0.25) * 255
        numbers += [int(np.abs(PIXELS - image).sum((1, 2, 3)).argmin()) for image in images]
        assert batch.targets.tolist() == [LABELS[number] for number in numbers[-count:]]
    assert sorted(numbers) == list(range(N))
    assert data.vocab_size == 4


def test_patches_are_cut_row_by_row(tmp_path: Path) -> None:
    pixels = PIXELS[..., :4]
    files = saved(tmp_path, images=pixels, labels=LABELS)
    data = ImagesConfig(**files, mean=0.25, std=2.0, patch=2).build(None)
    (patches,) = data.examples("train", "sequential").batch(np.arange(5)).inputs.values()
    examples = ImagesConfig(**files, mean=0.25, std=2.0).build(None).examples("train", "sequential")
    images = examples.batch(np.arange(5)).inputs["image"]
    assert patches.shape == (5, data.length, 12)
    for number, (row, column) in enumerate([(0, 0), (0, 2), (2, 0), (2, 2)]):
        expected = images[:, :, row : row + 2, column : column + 2]
        np.testing.assert_array_equal(patches[:, number], expected.reshape(5, 12))
    with pytest.raises(Invalid, match="`patch` must divide the rows and columns of the images, 4 x 5; got 2"):
        ImagesConfig(**saved(tmp_path, images=PIXELS), labels=files["labels"], patch=2).build(None)


def test_shapes_are_drawn(tmp_path: Path) -> None:
    arrays = draw(30, 4)
    files = saved(tmp_path, images=arrays["images"], labels=arrays["labels"])
    drawn, read = ShapesConfig(count=30, seed=4).build(None), ImagesConfig(**files).build(None)
    batches = [data.examples("train", "shuffled").batch(np.arange(27)) for data in (drawn, read)]
    np.testing.assert_array_equal(batches[0].inputs["image"], batches[1].inputs["image"])
    np.testing.assert_array_equal(batches[0].ids, batches[1].ids)
    assert drawn.vocab_size == 8
    assert ShapesConfig(count=30).build(None).fingerprint != drawn.fingerprint


def test_other_files_have_another_fingerprint(tmp_path: Path) -> None:
    first = ImagesConfig(**saved(tmp_path, images=PIXELS, labels=LABELS)).build(None)
    again = ImagesConfig(**saved(tmp_path, images=PIXELS, labels=LABELS)).build(None)
    other = ImagesConfig(**saved(tmp_path, images=PIXELS, labels=LABELS[::-1].copy())).build(None)
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for number, name in enumerate(["b", "a"]):
        (tmp_path / "images" / name).mkdir(parents=True)
        for file in range(5):
            pixels = np.full((4, 5), 50 * number + file, np.uint8)
            image.fromarray(pixels).save(tmp_path / "images" / name / f"{file}.png")
    data = ImagesConfig(images=str(tmp_path / "images"), mean=0.0, std=1.0).build(None)
    batch = data.examples("train", "shuffled").batch(np.arange(9))
    assert batch.inputs["image"].shape == (9, 1, 4, 5)
    assert ((batch.inputs["image"][:, 0, 0, 0] > 0.1) == (batch.targets == 0)).all()
    assert data.classes == ["a", "b"]


def test_the_target_of_a_pair_is_the_number_of_its_image(tmp_path: Path) -> None:
    tokens = np.arange(2 * N).reshape(N, 2)
    data = ImagePairsConfig(**saved(tmp_path, images=PIXELS, tokens=tokens)).build(None)
    batch = data.examples("train", "shuffled").batch(np.array([3, 1, 7]))
    assert batch.inputs["tokens"].shape == (3, 2)
    assert batch.targets.tolist() == (batch.inputs["tokens"][:, 0] // 2).tolist()
    assert data.n_classes == N


def test_placeholders_precede_the_text_that_is_predicted(tmp_path: Path) -> None:
    tokens = np.arange(2 * N).reshape(N, 2) % 7
    data = ImageTextsConfig(**saved(tmp_path, images=PIXELS, tokens=tokens), vectors=3).build(None)
    batch = data.examples("train", "shuffled").batch(np.array([3, 1, 5]))
    assert batch.inputs["images"].shape == (3, 1, 3, 4, 5)
    assert batch.inputs["tokens"][:, :3].tolist() == [[7] * 3] * 3
    assert batch.targets[:, :2].tolist() == [[-100] * 2] * 3
    assert batch.targets[:, 2].tolist() == batch.inputs["tokens"][:, 3].tolist()
    assert ((batch.targets[:, 3] - batch.targets[:, 2]) % 7 == 1).all()
    assert (data.vocab_size, data.length) == (8, 4)
    with pytest.raises(Invalid, match="`patch` has no effect"):
        ImageTextsConfig(**saved(tmp_path, images=PIXELS, tokens=tokens), vectors=3, patch=1).build(None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"labels": None}, "`labels` is missing"),
        ({"labels": LABELS[:-1]}, "a number from 0 for each of 20 images"),
        ({"labels": LABELS - 1}, "a number from 0 for each of 20 images"),
        ({"images": PIXELS[0, 0]}, r"got uint8 \[4, 5\]"),
        ({"images": PIXELS.astype(np.int64)}, "real or unsigned; got int64"),
        ({"mean": (0.5, 0.5)}, "`mean` must have a number for each of 3 channels; got 2"),
        ({"images": PIXELS[:1], "labels": LABELS[:1]}, "split `train` must have an image"),
    ],
)
def test_files_that_cannot_be(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    values = {"images": PIXELS, "labels": LABELS} | fields
    arrays = {name: values.pop(name) for name in ("images", "labels") if values.get(name) is not None}
    values.pop("labels", None)
    with pytest.raises(Invalid, match=message):
        ImagesConfig(**saved(tmp_path, **arrays), **values).build(None)
