"""Checkpoints on disk: valid files are read bit by bit, and every invalid file raises a clear error."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tfkit.checkpoint import files
from tfkit.checkpoint.files import DTYPES, TensorFiles, TensorInfo
from tfkit.errors import SpecError
from tfkit.spec.folder import INDEX, WEIGHTS
from tfkit.spec.header import MAX_HEADER

from .safetensors_files import AGAIN, TENSORS, assert_holds, refused

pytestmark = pytest.mark.usefixtures("here")

ZERO_BYTE = r"error: cannot read `a\\x00b`: .*null (byte|character).*"
"""The reason is Python's, whose words depend on its version."""

TYPES = """
    float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 bool
    int64 int32 int16 int8 uint64 uint32 uint16 uint8
""".split()  # noqa: SIM905


def write_shards(folder: Path = Path(), shards: dict[str, dict[str, torch.Tensor]] | None = None) -> dict[str, str]:
    """Two files and their index; the `weight_map` of the index."""
    shards = shards or {"1.safetensors": {"up": TENSORS["up"]}, "2.safetensors": {"down": TENSORS["down"]}}
    folder.mkdir(exist_ok=True, parents=True)
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    write_index(weight_map, folder)
    return weight_map


def write_index(weight_map: Any, folder: Path = Path()) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": weight_map}))


@pytest.mark.parametrize("path", ["folder", f"folder/{WEIGHTS}", "./folder/../folder"])
def test_one_file(path: str) -> None:
    Path("folder").mkdir()
    save_file(TENSORS, f"folder/{WEIGHTS}", metadata={"format": "pt"})
    with TensorFiles.open(path) as checkpoint:
        assert_holds(checkpoint)


@pytest.mark.parametrize("path", ["folder", f"folder/{INDEX}"])
def test_shards_in_the_order_of_the_index(path: str) -> None:
    write_shards(Path("folder"))
    with TensorFiles.open(Path(path)) as checkpoint:
        assert checkpoint.names == {
            "up": TensorInfo(torch.float32, (2, 3), Path("folder/1.safetensors")),
            "down": TensorInfo(torch.bfloat16, (4,), Path("folder/2.safetensors")),
        }
        assert_holds(checkpoint)
        assert_holds(checkpoint)


def test_shards_may_have_more_than_the_index_names_and_be_named_in_two_ways() -> None:
    write_shards(shards={"1.safetensors": TENSORS | {"norm": torch.ones(3)}})
    write_index({"up": "1.safetensors", "down": "./1.safetensors"})
    with TensorFiles.open(".") as checkpoint:
        assert_holds(checkpoint, TENSORS | {"norm": torch.ones(3)})


@pytest.mark.parametrize("name", TYPES)
def test_every_type(name: str) -> None:
    dtype = getattr(torch, name)
    assert len(DTYPES) == len(TYPES)
    tensors = {
        "a": torch.tensor([[0, 1, 1]]).to(dtype),
        "empty": torch.empty(0, 3, dtype=dtype),
        "one": torch.ones((), dtype=dtype),
    }
    save_file(tensors, WEIGHTS)
    with TensorFiles.open(".") as checkpoint:
        assert_holds(checkpoint, tensors)


def test_tensors_are_views_that_outlive_the_checkpoint_and_leave_the_file_alone() -> None:
    save_file(TENSORS, WEIGHTS)
    before = Path(WEIGHTS).read_bytes()
    with TensorFiles.open(".") as checkpoint:
        up, down = checkpoint.read("up"), checkpoint.read("down")
        assert down.data_ptr() - up.data_ptr() in (24, -8)
    up.fill_(7.0)
    assert up.tolist() == [[7.0] * 3] * 2
    assert Path(WEIGHTS).read_bytes() == before
    with pytest.raises(KeyError, match="gate"):
        checkpoint.read("gate")


def test_only_what_is_held_stays_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"w{i}": torch.full((1000,), i) for i in range(8)}
    save_file(tensors, WEIGHTS)
    opened: list[str] = []

    def counted(path: str, **options: Any) -> Any:
        opened.append(path)
        return safe_open(path, **options)

    safe_open = files.safe_open
    monkeypatch.setattr(files, "safe_open", counted)
    monkeypatch.setattr(files, "REMAP_BYTES", 20_000)
    with TensorFiles.open(".") as checkpoint:
        stored = {name: checkpoint.read(name) for name in tensors}
    assert len(opened) == 1 + 3
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())


def test_folders_without_weights() -> None:
    Path("f").mkdir()
    neither = f"error: `f` has neither `{WEIGHTS}` nor `{INDEX}`\n"
    assert refused("f") == f"{neither}   = it is empty"
    Path("f/config.json").write_text("{}")
    Path("f/training_args.bin").write_bytes(b"")
    assert refused("f") == (
        "error: `f` has only pickles, which can run any code when they are loaded\n"
        "   = it has `training_args.bin`\n   = help: fetch the safetensors files of the same model"
    )
    Path("f/training_args.bin").unlink()
    assert refused("f") == f"{neither}   = it has `config.json`"
    Path("f/lora.safetensors").write_bytes(b"")
    assert refused("f") == (
        f"{neither}   = it has `config.json`, `lora.safetensors`\n   = help: name the file: f/lora.safetensors"
    )


def test_paths_that_are_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(f"folder/{WEIGHTS}").mkdir(parents=True)
    os.mkfifo("pipe.safetensors")
    Path("loop").symlink_to("loop")
    special = "it is a folder, a pipe or a device, not a file"
    assert refused("no.safetensors") == "error: cannot read `no.safetensors`: No such file or directory"
    assert refused("folder") == f"error: cannot read `folder/{WEIGHTS}`: {special}"
    assert refused("pipe.safetensors") == f"error: cannot read `pipe.safetensors`: {special}"
    assert refused("/dev/zero") == f"error: cannot read `/dev/zero`: {special}"
    assert refused("loop") == "error: cannot read `loop`: Too many levels of symbolic links"
    assert re.fullmatch(ZERO_BYTE, refused("a\0b"))

    def denied(*_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    assert refused("w.safetensors") == "error: cannot read `w.safetensors`: Permission denied"


def test_a_name_that_is_not_utf8() -> None:
    name = os.fsdecode(b"\xff.safetensors")
    save_file(TENSORS, "w.safetensors")
    Path("w.safetensors").rename(name)
    assert refused(name).startswith("error: cannot read `\\udcff.safetensors`: ")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "its JSON is broken at column 1: Expecting value"),
        (b'{"metadata": {},\n "weight_map": }\n', "its JSON is broken at line 2, column 16: Expecting value"),
        (b'{\n"a": "\xff"}', "its JSON is not UTF-8: byte 0xff at line 2, column 7"),
        (b"[]", "its JSON is not an object"),
        (b"{}", "it has no `weight_map` from the names of tensors to files"),
        (b'{"weight_map": ["w"]}', "it has no `weight_map` from the names of tensors to files"),
        (b'{"weight_map": {}}', "it has no `weight_map` from the names of tensors to files"),
        (b'{"weight_map": {"w": 1}}', "its `weight_map` has no file for tensor `w`"),
        (b'{"weight_map": {"w": ""}}', "its `weight_map` has no file for tensor `w`"),
        (b'{"weight_map": {"w": "a", "w": "b"}}', "its JSON has the key `w` twice"),
    ],
)
def test_what_is_no_sound_index(content: bytes, reason: str) -> None:
    Path(INDEX).write_bytes(content)
    assert refused(INDEX) == f"error: cannot read `{INDEX}`: {reason}\n{AGAIN}"


def test_an_index_of_absurd_size() -> None:
    with Path(INDEX).open("wb") as file:
        file.truncate(MAX_HEADER + 1)
    assert refused(".") == f"error: cannot read `{INDEX}`: it has more than 100,000,000 bytes\n{AGAIN}"


@pytest.mark.parametrize(
    "way", ["../out.safetensors", "sub/../../out.safetensors", "absolute", "link", "linked_folder"]
)
def test_an_index_that_leaves_its_folder(way: str, tmp_path: Path) -> None:
    save_file(TENSORS, "out.safetensors")
    Path("f/sub").mkdir(parents=True)
    Path("f/link").symlink_to("../out.safetensors")
    Path("f/linked_folder").symlink_to("..")
    name = {"absolute": f"{tmp_path}/out.safetensors", "linked_folder": "linked_folder/out.safetensors"}.get(way, way)
    write_index({"up": name}, Path("f"))
    first, second = refused("f").split("\n")
    assert first.startswith(f"error: `f/{INDEX}` names a file outside its folder: `{name[:50]}")
    assert second == "   = help: put the files of a checkpoint next to their index"


def test_the_links_of_a_hub_cache_are_followed() -> None:
    """Every file of a snapshot is a link to ../../blobs; links to anywhere else are not followed there either."""
    write_shards(Path("models--a--b/blobs"))
    snapshot = Path("models--a--b/snapshots/0123")
    snapshot.mkdir(parents=True)
    for name in ("1.safetensors", "2.safetensors", INDEX):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    with TensorFiles.open(snapshot) as checkpoint:
        assert_holds(checkpoint)
    save_file({"up": TENSORS["up"]}, "models--a--b/1.safetensors")
    (snapshot / "1.safetensors").unlink()
    (snapshot / "1.safetensors").symlink_to("../../1.safetensors")
    assert "names a file outside its folder: `1.safetensors`" in refused(str(snapshot))


def test_an_index_that_its_files_contradict() -> None:
    weight_map = write_shards()
    write_index(weight_map | {"gate": "3.safetensors"})
    assert refused(".") == (
        f"error: `{INDEX}` names `3.safetensors`, which is not in its folder\n"
        "   = missing files: 1 of 3\n   = help: fetch the missing files of the checkpoint"
    )
    write_index(weight_map | {"gate": "a\0b"})
    assert refused(".").startswith(f"error: `{INDEX}` names `a\\x00b`, which is not in its folder")
    write_index(weight_map | {"upp": "1.safetensors", "gate": "1.safetensors"})
    assert refused(".") == (
        f"error: `{INDEX}` assigns tensor `upp` to `1.safetensors`, which does not have it\n"
        "   = and 1 more\n   = help: a tensor with a similar name exists: `up`"
    )
    save_file(TENSORS, "2.safetensors")
    write_index(weight_map)
    assert refused(".") == "error: tensor `up` is in two files: `1.safetensors` and `2.safetensors`"
    torch.save(TENSORS, "2.safetensors")
    assert refused(".").startswith("error: `2.safetensors` is a pickle, ")


def test_files_that_change_or_vanish() -> None:
    changed = "error: `2.safetensors` was changed while it was in use\n   = help: load the file again"
    write_shards()
    with TensorFiles.open(".") as checkpoint:
        checkpoint.read("up")
        content = Path("2.safetensors").read_bytes()
        Path("2.safetensors").write_bytes(content[:-1])
        with pytest.raises(SpecError) as error:
            checkpoint.read("down")
        assert str(error.value) == changed
        Path("2.safetensors").unlink()
        with pytest.raises(SpecError) as error:
            checkpoint.read("down")
        assert str(error.value) == "error: cannot read `2.safetensors`: No such file or directory"
        Path("2.safetensors").write_bytes(content)
        with pytest.raises(SpecError) as error:
            checkpoint.read("down")
        assert str(error.value) == changed
