"""Invalid safetensors files: a clear error for each, with little memory, whatever bytes they contain."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from tfkit.checkpoint.files import TensorFiles
from tfkit.errors import SpecError
from tfkit.spec.folder import WEIGHTS
from tfkit.spec.header import MAX_HEADER

from .safetensors_files import AGAIN, TENSORS, assert_holds, assert_same, convert, entry, raw, refused

pytestmark = pytest.mark.usefixtures("here")

SHAPE = "tensor `w` has a shape that is not at most 16 integers from 0"
OFFSETS = "tensor `w` has `data_offsets` that are not a start and an end"
KNOWN = "supported types are F64, F32, F16, BF16, F8_E4M3, F8_E5M2, I64, I32, I16, I8, U64, U32, U16, U8, BOOL, C64"


GOOD = json.dumps({"w": entry()}).encode()
BROKEN = {
    "empty": (b"", "it is empty"),
    "short": (b"abc", "it has 3 bytes"),
    "length_only": (bytes(8), "its JSON is broken at column 1: Expecting value"),
    "header_cut": (raw(GOOD[:-9], length=len(GOOD)), "its header would have 61 bytes, but only 52 follow"),
    "header_too_long": (raw(b"{}", length=99_999_999), "its header would have 99,999,999 bytes, but only 2 follow"),
    "header_of_absurd_size": (
        raw(b"{}", length=2**63),
        "its header would have 9,223,372,036,854,775,808 bytes; at most 100,000,000 are allowed",
    ),
    "not_utf8": (raw(b'{"\xff": 1}'), "its JSON is not UTF-8: byte 0xff at column 3"),
    "not_json": (raw(b'{"w" 1}'), "its JSON is broken at column 6: Expecting ':' delimiter"),
    "two_objects": (raw(b"{}{}"), "its JSON is broken at column 3: Extra data"),
    "list": (raw([GOOD.decode()]), "its JSON is not an object"),
    "deep": (raw(b'{"w":' * 50_000), "its JSON is nested too deeply"),
    "long_number": (raw(b'{"w":' + b"9" * 5000 + b"}"), "its JSON has a number that is too long"),
    "many_values": (raw(b'{"w":[' + b"0," * 1_000_000), "its JSON has more than 1,000,000 values"),
    "twice": (raw(b'{"w": 1, "w": 2}'), "its JSON has the key `w` twice"),
    "twice_inside": (raw(b'{"w": {"dtype": 1, "dtype": 1}}'), "its JSON has the key `dtype` twice"),
    "metadata_list": (raw({"__metadata__": []}), "its `__metadata__` is not an object of texts"),
    "metadata_number": (raw({"__metadata__": {"a": 1}}), "its `__metadata__` is not an object of texts"),
    "entry_number": (raw({"w": 1}), "tensor `w` is not described by `dtype`, `shape` and `data_offsets`"),
    "entry_lacks": (raw({"w": {"dtype": "F32"}}), "tensor `w` is not described by `dtype`, `shape` and `data_offsets`"),
    "entry_more": (raw({"w": entry(zip="z")}), "tensor `w` is not described by `dtype`, `shape` and `data_offsets`"),
    "dtype_unknown": (raw({"w": entry(dtype="F31")}, bytes(8)), f"tensor `w` has a type `F31`; {KNOWN}"),
    "dtype_of_half_bytes": (raw({"w": entry(dtype="F4")}, bytes(8)), f"tensor `w` has a type `F4`; {KNOWN}"),
    "dtype_list": (raw({"w": entry(dtype=["F32"])}, bytes(8)), f"tensor `w` has a type that is not a text; {KNOWN}"),
    "dtype_other": (raw({"w": entry(dtype="F64")}, bytes(8)), "tensor `w` has 8 bytes, but [2] of F64 takes 16"),
    "shape_negative": (
        raw({"w": entry(shape=[-1, -2])}, bytes(8)),
        SHAPE,
    ),
    "shape_text": (raw({"w": entry(shape="2")}), SHAPE),
    "shape_true": (raw({"w": entry(shape=[True])}), SHAPE),
    "shape_float": (raw({"w": entry(shape=[2.0])}), SHAPE),
    "shape_long": (raw({"w": entry(shape=[1] * 17)}), SHAPE),
    "shape_huge": (
        raw({"w": entry(shape=[2**32, 2**32])}),
        "tensor `w` has a shape of more than 9,223,372,036,854,775,807 bytes",
    ),
    "shape_huge_and_empty": (
        raw({"w": entry(0, 0, shape=[0, 2**62])}),
        "tensor `w` has a shape of more than 9,223,372,036,854,775,807 bytes",
    ),
    "shape_smaller": (raw({"w": entry(shape=[1])}, bytes(8)), "tensor `w` has 8 bytes, but [1] of F32 takes 4"),
    "shape_other": (raw({"w": entry(shape=[3])}, bytes(8)), "tensor `w` has 8 bytes, but [3] of F32 takes 12"),
    "offsets_number": (raw({"w": entry() | {"data_offsets": 8}}), OFFSETS),
    "offsets_three": (
        raw({"w": entry() | {"data_offsets": [0, 8, 8]}}, bytes(8)),
        OFFSETS,
    ),
    "offsets_backwards": (raw({"w": entry(8, 0)}, bytes(8)), OFFSETS),
    "offsets_negative": (raw({"w": entry(-8, 0)}, bytes(8)), OFFSETS),
    "data_cut": (
        raw({"w": entry()}, bytes(7)),
        "tensor `w` ends at byte 8 of the data, which has 7: the file is truncated",
    ),
    "overlap": (raw({"v": entry(), "w": entry(4, 12)}, bytes(12)), "tensors `v` and `w` overlap"),
    "same_place": (raw({"v": entry(), "w": entry()}, bytes(8)), "tensors `v` and `w` overlap"),
    "hole": (raw({"v": entry(), "w": entry(9, 17)}, bytes(17)), "1 bytes after tensor `v` belong to no tensor"),
    "hole_before": (raw({"w": entry(8, 16)}, bytes(16)), "the first 8 bytes of its data belong to no tensor"),
    "rest": (raw({"w": entry()}, bytes(9)), "the last 1 bytes of its data belong to no tensor"),
    "only_data": (raw({}, bytes(9)), "the last 9 bytes of its data belong to no tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_sound_file(name: str) -> None:
    content, reason = BROKEN[name]
    Path("w.safetensors").write_bytes(content)
    assert refused("w.safetensors") == f"error: `w.safetensors` is not a valid safetensors file: {reason}\n{AGAIN}"


def test_the_library_has_the_last_word() -> None:
    Path("w.safetensors").write_bytes(raw({"\ud800": entry()}, bytes(8)))  # half of a surrogate pair
    assert refused("w.safetensors").startswith("error: cannot read `w.safetensors`: Error while deserializing header: ")


def test_a_name_that_could_garble_a_terminal_is_escaped() -> None:
    Path("w.safetensors").write_bytes(raw({"\x1b[2J" + "w" * 99: 1}))
    assert "tensor `\\x1b[2J" in refused("w.safetensors")


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "w"])
@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_by_content(name: str, zipped: bool) -> None:
    torch.save(TENSORS, name, _use_new_zipfile_serialization=zipped)
    assert refused(name) == f"error: `{name}` is a pickle, which can run any code when it is read\n{convert(name)}"


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".PT"])
def test_pickles_by_name(suffix: str) -> None:
    for content in (b"", save(TENSORS), b"(dp0\n."):
        Path(f"w{suffix}").write_bytes(content)
        message = f"has the name of a pickle (`{suffix.lower()}`), which can run any code when it is read"
        assert refused(f"w{suffix}") == f"error: `w{suffix}` {message}\n{convert(f'w{suffix}')}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGUF\3\0\0\0", "is a GGUF file, made for llama.cpp"),
        (b"\x89HDF\r\n\x1a\n", "is an HDF5 file, made for Keras"),
        (b"\x93NUMPY\1\0", "is a NumPy array"),
        (b"\x1f\x8b\x08\0\1\2\3\4", "is compressed"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS instead of the file"),
        (b"<!DOCTYPE html>", "is a web page"),
        (b'{"d_model": 3}', "is a JSON text"),
    ],
)
def test_files_of_other_kinds(content: bytes, message: str) -> None:
    Path("w.safetensors").write_bytes(content)
    first, second = refused("w.safetensors").split("\n")[:2]
    assert first == f"error: `w.safetensors` {message}"
    assert second.startswith("   = help: ")


@pytest.mark.parametrize("length", [0x0280, 0x0380, 0x0480, 0x0580])
def test_the_length_of_a_header_may_begin_as_a_pickle_does(length: int) -> None:
    content = raw(json.dumps({"w": entry()}).encode().ljust(length), bytes(8))
    assert content[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
    Path(WEIGHTS).write_bytes(content)
    with TensorFiles.open(".") as checkpoint:
        assert_holds(checkpoint, {"w": torch.zeros(2)})


SOUND = save(TENSORS | {"norm": torch.ones(2)}, metadata={"format": "pt"})
FRAGMENTS = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"0",
    b"9",
    b"-",
    b"1e9",
    b"2.0",
    b"null",
    b"F32",
    b"I8",
    b"\\u00e9",
    b"\xff",
    b" ",
]


def read_all(content: bytes) -> dict[str, torch.Tensor] | None:
    Path("w.safetensors").write_bytes(content)
    try:
        with TensorFiles.open("w.safetensors") as checkpoint:
            return {name: checkpoint.read(name) for name in checkpoint.names}
    except SpecError:
        return None


@settings(max_examples=100, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_bytes_that_were_changed_at_random(data: st.DataObject) -> None:
    """Either the file is refused, or its tensors are those that the library finds."""
    content = SOUND
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content)))
        end = start + data.draw(st.sampled_from([0, 1, 1, 1, 2, 5, 1000]))
        piece = data.draw(st.sampled_from(FRAGMENTS) | st.binary(max_size=3))
        content = content[:start] + piece + content[end:]
    if data.draw(st.booleans()):  # the length is that of the changed header: what follows is looked at, too
        length = max(0, len(content) - 8 - 40)
        content = length.to_bytes(8, "little") + content[8:]
    actual = read_all(content)
    if actual is not None:
        assert_same(actual, load(content))


ODD = st.sampled_from(
    [0, 1, 2, 3, 4, 6, 8, 24, 32, 40, -1, 2**31, 2**63, 2**64, True, None, 1.5, "", "F16", "BF16", "F4", [], {}]
)
VALUES = ODD | st.lists(ODD, max_size=3)


@settings(max_examples=100, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    odd=st.fixed_dictionaries({}, optional={"dtype": ODD, "shape": VALUES, "data_offsets": VALUES, "more": ODD}) | ODD,
    size=st.sampled_from([0, 4, 8, 32]),
)
def test_headers_of_odd_values(odd: object, size: int) -> None:
    described = entry(8, 8 + size, [size // 4]) | odd if isinstance(odd, dict) else odd
    content = raw({"up": entry(0, 8, [2]), "w": described}, bytes(8 + size))
    actual = read_all(content)
    if actual is not None:
        assert_same(actual, load(content))


MEMORY = """
import resource, sys, time
from tfkit.checkpoint.files import TensorFiles
from tfkit.spec.folder import WEIGHTS
from tfkit.errors import SpecError

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 768 * 2**20,) * 2)
for path in sys.argv[1:]:
    start = time.process_time()
    try:
        TensorFiles.open(path)
    except SpecError as error:
        print(str(error).split(chr(10))[0])
    assert time.process_time() - start < 10, path
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the limit is set from /proc")
@pytest.mark.slow
def test_memory_is_bounded() -> None:
    """Headers of the largest size that is allowed, made to cost the most, and a file larger than the memory."""
    hostile = {
        "zeros": b"",
        "lists": b'{"w":[' + b"[]," * 12_000_000,
        "objects": b'{"w":[' + b'{"":1},' * 499_990 + b"0]}",
        "names": b"{" + b",".join(b'"%d":1' % i for i in range(999_000)) + b"}",
        "large": json.dumps({"w": entry(0, 2**40, [2**38])}).encode(),
    }
    for name, header in hostile.items():
        length = len(header) or MAX_HEADER
        with Path(name).open("wb") as file:
            file.write(raw(header, length=length))
            file.truncate(8 + length + (2**40 if name == "large" else 0))  # the rest is a hole, and takes no disk
    run = subprocess.run([sys.executable, "-c", MEMORY, *hostile], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    unsound = "error: `{}` is not a valid safetensors file: {}"
    assert run.stdout.split("\n")[:-1] == [
        unsound.format("zeros", "its JSON is broken at column 1: Expecting value"),
        unsound.format("lists", "its JSON has more than 1,000,000 values"),
        unsound.format("objects", "tensor `w` is not described by `dtype`, `shape` and `data_offsets`"),
        unsound.format("names", "tensor `0` is not described by `dtype`, `shape` and `data_offsets`"),
        "error: cannot read `large`: Cannot allocate memory (os error 12)",
    ]


def test_an_empty_tensor_may_begin_where_another_tensor_begins() -> None:
    """In any order of the header; the library accepts it as well."""
    empty, tensor, end = entry(0, 0, [0]), entry(0, 8, [2]), entry(8, 8, [3, 0])
    for header in ({"w": tensor, "a": empty, "z": end}, {"z": end, "a": empty, "w": tensor}):
        content = raw(header, bytes(range(8)))
        actual = read_all(content)
        assert actual is not None
        assert_same(actual, load(content))
