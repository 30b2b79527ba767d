"""Token ids in files: the windows equal the windows of the array in memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.run.training.runs import Memory
from tfkit.errors import SpecError
from tfkit.run.contract import IGNORE_INDEX, Callback, Training
from tfkit.run.training.loop import Trainer

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
            expected = part[row * stride + 1 : row * stride + 21]
            assert (targets[: len(expected)] == expected).all()
            assert (targets[len(expected) :] == IGNORE_INDEX).all()
            assert (tokens[: len(expected)] == part[row * stride : row * stride + len(expected)]).all()


def test_no_document_is_in_two_splits(tmp_path: Path) -> None:
    ids = np.tile([5, 6, 7, 8, 9, 0, 1, 2, 3, 0], 50)  # documents end with 0
    np.save(tmp_path / "ids.npy", ids)
    split = "split: {train: 0.502, val: 0.2, test: 0.297}"
    data = small_run(tmp_path, f"{{kind: tokens, files: ids.npy, separator: 0, {split}}}", length=5).data
    result = []
    for name in data.splits:
        examples = data.examples(name, "sequential")
        batch = examples.batch(np.arange(len(examples)))
        row = [int(batch.inputs["tokens"][0, 0]), *batch.targets[batch.targets != IGNORE_INDEX].tolist()]
        assert row[-1] == 0
        result += row
    assert result == ids[: len(result)].tolist()
    assert len(result) == 500


def test_the_fingerprint_is_of_every_token_and_not_of_the_type(tmp_path: Path) -> None:
    write(tmp_path)
    np.save(tmp_path / "same.npy", IDS)
    changed = IDS.copy()
    changed[777] = 1 + changed[777] % 80
    np.save(tmp_path / "changed.npy", changed)
    files = ("[a.npy, b.npy, c.npy]", "same.npy", "changed.npy")
    first, same, other = (
        small_run(tmp_path, f"{{kind: tokens, vocab_size: 90, files: {name}}}", length=20) for name in files
    )
    assert first.digest == same.digest != other.digest


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
    golden("runs/tokens_errors", "\n\n".join(refused(tmp_path, fields, length=20) for fields in data))


def trained_while(folder: Path, change: Callable[[Path], object], *sets: str) -> str:
    """The error of a run on `a.npy` and `b.npy`, if `b.npy` changes after the first step."""
    for name in "ab":
        np.save(folder / f"{name}.npy", IDS)
    run = small_run(folder, "{kind: tokens, files: [a.npy, b.npy], vocab_size: 90}", "steps=40", *sets, length=20)

    class Change(Callback):
        def on_step(self, training: Training, numbers: object) -> None:
            if training.step == 1:
                change(folder / "b.npy")

    memory = Memory()
    with contextlib.chdir(folder), pytest.raises(SpecError) as error:
        Trainer(run, memory, watchers=[Change()]).train()
    assert len(memory.losses) >= 1
    return str(error.value)


def rewritten(path: Path) -> None:
    """Write other ids, of the same number and size, into the same file."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write((3).to_bytes(8, "little"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def of_another_vocabulary(path: Path) -> None:
    """Change every id, as a write through a mapping does that has not reached the time of change yet."""
    status = path.stat()
    np.load(path, mmap_mode="r+")[:] = 95
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda path: os.truncate(path, 200), "error: `b.npy` was changed while it was in use"),
        (rewritten, "error: `b.npy` was changed while it was in use"),
        (os.unlink, "error: `b.npy` can no longer be read: No such file or directory"),
        (of_another_vocabulary, "error: `b.npy` has the id 95, beyond the vocabulary of 90"),
    ],
)
def test_a_file_that_changes_while_it_is_read_is_named(
    change: Callable[[Path], object], error: str, tmp_path: Path
) -> None:
    assert trained_while(tmp_path, change).startswith(f"{error}\n   = help: restore the file")


def test_a_file_that_changes_before_an_evaluation_is_named(tmp_path: Path) -> None:
    sets = ("data.split={train: 0.5, val: 0.5}", "eval={every: 3, splits: {val: all}}")
    changed = trained_while(tmp_path, lambda path: os.truncate(path, 200), *sets)
    assert changed.startswith("error: `b.npy` was changed while it was in use")
