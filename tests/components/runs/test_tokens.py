"""Token ids in files: the same windows as of the array in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tfkit.component import IGNORED

from .small import refused, small_run

IDS = np.random.default_rng(0).integers(1, 90, size=1000)


def write(folder: Path) -> None:
    """Three files of several types."""
    for name, part, kind in (("a", IDS[:130], "<u2"), ("b", IDS[130:137], "int64"), ("c", IDS[137:], "u1")):
        np.save(folder / f"{name}.npy", part.astype(kind))


@pytest.mark.parametrize("order", ["sampled", "sequential"])
def test_files_are_one_row_of_tokens(order: str, tmp_path: Path) -> None:
    write(tmp_path)
    data = small_run(tmp_path, f"{{kind: tokens, files: [a.npy, b.npy, c.npy], order: {order}}}", length=20).data
    assert data.vocab_size == IDS.max() + 1
    for split, part in (("train", IDS[:900]), ("val", IDS[900:])):
        examples = data.examples(split, "sampled" if order == "sampled" else "sequential")
        stride = 1 if order == "sampled" else 20
        assert len(examples) == (len(part) - 20 if order == "sampled" else -(-(len(part) - 1) // 20))
        batch = examples.batch(np.arange(len(examples)))
        for row, (tokens, targets) in enumerate(zip(batch.inputs["tokens"], batch.targets, strict=True)):
            wanted = part[row * stride + 1 : row * stride + 21]
            assert (targets[: len(wanted)] == wanted).all()
            assert (targets[len(wanted) :] == IGNORED).all()
            assert (tokens[: len(wanted)] == part[row * stride : row * stride + len(wanted)]).all()


def test_no_document_is_in_two_splits(tmp_path: Path) -> None:
    ids = np.tile([5, 6, 7, 8, 9, 0, 1, 2, 3, 0], 50)  # documents end with 0
    np.save(tmp_path / "ids.npy", ids)
    split = "split: {train: 0.502, val: 0.2, test: 0.297}"
    data = small_run(tmp_path, f"{{kind: tokens, files: ids.npy, separator: 0, {split}}}", length=5).data
    found = []
    for name in data.splits:
        examples = data.examples(name, "sequential")
        batch = examples.batch(np.arange(len(examples)))
        row = [int(batch.inputs["tokens"][0, 0]), *batch.targets[batch.targets != IGNORED].tolist()]
        assert row[-1] == 0
        found += row
    assert found == ids[: len(found)].tolist()
    assert len(found) == 500


def test_the_fingerprint_is_of_every_token_and_not_of_the_type(tmp_path: Path) -> None:
    write(tmp_path)
    np.save(tmp_path / "same.npy", IDS)
    changed = IDS.copy()
    changed[777] = 1 + changed[777] % 80
    np.save(tmp_path / "changed.npy", changed)
    files = ("[a.npy, b.npy, c.npy]", "same.npy", "changed.npy")
    one, same, other = (
        small_run(tmp_path, f"{{kind: tokens, vocab_size: 90, files: {name}}}", length=20) for name in files
    )
    assert one.digest == same.digest != other.digest


def test_errors(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    write(tmp_path)
    np.save(tmp_path / "real.npy", np.zeros(50))
    np.save(tmp_path / "square.npy", np.zeros((50, 2), dtype=np.int64))
    np.save(tmp_path / "negative.npy", np.full(50, -1))
    np.save(tmp_path / "empty.npy", np.zeros(0, dtype=np.int64))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "several.npy.npz", IDS)
    (tmp_path / "text.npy").write_text("1 2 3")
    names = ["absent.npy", "real.npy", "square.npy", "negative.npy", "empty.npy", "objects.npy", "text.npy"]
    data = [f"{{kind: tokens, files: {name}}}" for name in [*names, "several.npy.npz"]]
    data += ["{kind: tokens, files: b.npy}", "{kind: tokens, files: a.npy, vocab_size: 50}"]
    golden("runs/tokens_errors", "\n\n".join(refused(tmp_path, one, length=20) for one in data))
