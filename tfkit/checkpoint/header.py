"""The header of a safetensors file, read without trust: files that could harm the process are rejected here.

Files of other formats are recognized by their first bytes or their names, with advice about each.

A safetensors file is eight bytes with the length of the header, the header, and the data. The header is a JSON object:
from each name to `dtype`, `shape` and `data_offsets`, and `__metadata__` with texts. The tensors fill the data without
gaps. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from tfkit.errors import Diagnostic, SpecError, listing, quoted

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
MAX_HEADER = 100_000_000
"""The limit of the format, in bytes; it also applies to indices."""
MAX_PARTS = 1_000_000
"""The maximum number of values in a JSON text, since each takes memory: enough for 100,000 tensors in a file."""
MAX_DIMS = 16
MAX_BYTES = 2**63 - 1
AGAIN = "the file is damaged or was made to look like a checkpoint: fetch it again from its source"

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
HOW_TO_CONVERT = (
    "write its tensors to a safetensors file: `AutoModel.from_pretrained(OLD).save_pretrained(NEW)` in transformers, "
    "or `safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')`"
)
_PICKLE = ("is a pickle, which can run any code when it is read", HOW_TO_CONVERT)
_GGUF = (
    "is a GGUF file, made for llama.cpp",
    "use the safetensors files of the same model; `AutoModel.from_pretrained(DIR, gguf_file=FILE)` in transformers "
    "reads some and can save them",
)
_KERAS = ("is an HDF5 file, made for Keras", "use the safetensors files of the same model")
_NUMPY = ("is a NumPy array", "`safetensors.numpy.save_file({'name': array}, FILE)` makes a safetensors file of it")
_PACKED = ("is compressed", "unpack it first")
_POINTER = ("is a pointer of Git LFS, not the file", "`git lfs pull` in its repository fetches the file")
_PAGE = ("is a web page", "download the file again: the server sent a page instead")
_JSON = ("is a JSON text", "pass the weights, their folder, or their index (`*.index.json`)")

_STARTS = {
    b"PK\x03\x04": _PICKLE,  # torch.save writes a zip archive with a pickle in it
    b"\x80\x02": _PICKLE,
    b"\x80\x03": _PICKLE,
    b"\x80\x04": _PICKLE,
    b"\x80\x05": _PICKLE,
    b"GGUF": _GGUF,
    b"lmgg": _GGUF,
    b"tjgg": _GGUF,
    b"\x89HDF": _KERAS,
    b"\x93NUMPY": _NUMPY,
    b"\x1f\x8b": _PACKED,
    b"\x28\xb5\x2f\xfd": _PACKED,
    b"version ": _POINTER,
    b"<!": _PAGE,
    b"<html": _PAGE,
    b"{": _JSON,
}


class Malformed(ValueError):  # noqa: N818 - a description of the file
    """An error in a text or a tensor, worded to follow the name of the file."""


class TensorInfo(NamedTuple):
    """The description of a tensor in a header: its type, its shape, and its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path


class Stamp(NamedTuple):
    """The identity of a file: device, inode, size in bytes, and the time of its last change, in ns."""

    device: int
    inode: int
    size: int
    written: int


class Header(NamedTuple):
    """The contents of a file: tensors in the order of their data, and texts; with the file's stamp."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    stamp: Stamp


class _Place(NamedTuple):
    start: int
    end: int
    name: str
    info: TensorInfo


def shown(path: Path) -> str:
    """Return a path as errors name it."""
    return quoted(str(path), 200)


def unreadable(path: Path, error: Exception) -> SpecError:
    """Return the error for a file that the system cannot read."""
    cause = (getattr(error, "strerror", None) or " ".join(str(error).split())).removesuffix(".")
    return SpecError(Diagnostic(f"cannot read {shown(path)}: {cause}"))


def stamp(path: Path) -> Stamp:
    """Return the current stamp of a file. Raise OSError if it does not exist."""
    return _stamp(os.stat(path))


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file; its data are not touched.

    Raises:
        SpecError: the file cannot be read, has another format, or its header does not describe its data exactly.
    """
    with open_regular(path) as file:
        identity = _stamp(os.fstat(file.fileno()))
        try:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            _reject_foreign(path, start if length > MAX_HEADER else b"")
            raw = file.read(_checked_length(length, identity.size))
            header = parse_object(raw)
            metadata = _metadata(header)
            places = _places(header, path, identity.size - 8 - length)
        except OSError as error:
            raise unreadable(path, error) from error
        except Malformed as error:
            raise SpecError(
                Diagnostic(f"{shown(path)} is not a valid safetensors file: {error}", help=AGAIN)
            ) from error
    return Header({place.name: place.info for place in places}, metadata, identity)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, unless it is a folder, a pipe or a device: those could hang or never end.

    Raises:
        SpecError: there is no such file, it may not be read, or it is not a regular file.
    """
    try:  # without O_NONBLOCK, opening a pipe waits for a writer
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:  # ValueError: the name has a zero byte
        raise unreadable(path, error) from error
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise SpecError(Diagnostic(f"cannot read {shown(path)}: it is a folder, a pipe or a device, not a file"))
    return open(number, "rb")


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in a text, parsed in memory bounded by its limits.

    Raises:
        Malformed: it is not an object; or it has a duplicate key, too many values, or too deep nesting.
    """
    if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > MAX_PARTS:
        raise Malformed(f"its JSON has more than {MAX_PARTS:,} values")
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_distinct)
    except UnicodeDecodeError as error:
        raise Malformed(f"its JSON is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise Malformed(f"its JSON is broken at character {error.pos}: {error.msg}") from None
    except RecursionError:
        raise Malformed("its JSON is nested too deeply") from None
    except Malformed:
        raise
    except ValueError:  # Python reads only numbers of up to some thousand digits
        raise Malformed("its JSON has a number that is too long") from None
    if not isinstance(value, dict):
        raise Malformed("its JSON is not an object")
    return value


def _reject_foreign(path: Path, start: bytes) -> None:
    """Raise SpecError if a file has a known format other than safetensors.

    Args:
        path: its path; the name of a pickle is rejected whatever the file begins with.
        start: its first eight bytes, if they cannot be the length of a header: 640 begins as a pickle does.
    """
    format = next((kind for mark, kind in _STARTS.items() if start.startswith(mark)), None)
    suffix = path.suffix.lower()
    if format is None and suffix in PICKLES:
        format = (f"has the name of a pickle (`{suffix}`), which can run any code when it is read", HOW_TO_CONVERT)
    if format is not None:
        raise SpecError(Diagnostic(f"{shown(path)} {format[0]}", help=format[1]))


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _checked_length(length: int, size: int) -> int:
    if size < 8:
        raise Malformed(f"it has {size} bytes" if size else "it is empty")
    if length > MAX_HEADER:
        raise Malformed(f"its header would have {length:,} bytes; at most {MAX_HEADER:,} are allowed")
    if length > size - 8:
        raise Malformed(f"its header would have {length:,} bytes, but only {size - 8:,} follow")
    return length


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise Malformed(f"its JSON has the key {quoted(key)} twice")
        result[key] = value
    return result


def _metadata(header: dict[str, Any]) -> dict[str, str]:
    """Remove the texts of a header from it, and return them."""
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise Malformed("its `__metadata__` is not an object of texts")
    return metadata


def _places(header: dict[str, Any], path: Path, size: int) -> list[_Place]:
    """Return the tensors in the order of their data, which has `size` bytes."""
    places = []
    for name, entry in header.items():
        try:
            places.append(_place(name, entry, path, size))
        except Malformed as error:
            raise Malformed(f"tensor {quoted(name)} {error}") from None
    places.sort(key=lambda place: (place.start, place.end))
    if places and places[0].start:
        raise Malformed(f"the first {places[0].start:,} bytes of its data belong to no tensor")
    for place, next in pairwise(places):
        if next.start < place.end:
            raise Malformed(f"tensors {quoted(place.name)} and {quoted(next.name)} overlap")
        if next.start > place.end:
            raise Malformed(f"{next.start - place.end:,} bytes after tensor {quoted(place.name)} belong to no tensor")
    rest = size - (places[-1].end if places else 0)
    if rest:
        raise Malformed(f"the last {rest:,} bytes of its data belong to no tensor")
    return places


def _place(name: str, entry: Any, path: Path, size: int) -> _Place:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise Malformed("is not described by `dtype`, `shape` and `data_offsets`")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        kind = quoted(dtype) if isinstance(dtype, str) else "that is not a text"
        raise Malformed(f"has a type {kind}; supported types are {listing(DTYPES, len(DTYPES))}")
    if not _counts(shape) or len(shape) > MAX_DIMS:
        raise Malformed(f"has a shape that is not at most {MAX_DIMS} integers from 0")
    itemsize = DTYPES[dtype].itemsize
    # A dimension of 0 makes the tensor empty, but its strides must still be numbers that torch can hold.
    if math.prod(max(dim, 1) for dim in shape) * itemsize > MAX_BYTES:
        raise Malformed(f"has a shape of more than {MAX_BYTES:,} bytes")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise Malformed("has `data_offsets` that are not a start and an end")
    start, end = offsets
    if end > size:
        raise Malformed(f"ends at byte {end:,} of the data, which has {size:,}: the file is truncated")
    needed = math.prod(shape) * itemsize
    if end - start != needed:
        raise Malformed(f"has {end - start:,} bytes, but {shape} of {dtype} takes {needed:,}")
    return _Place(start, end, name, TensorInfo(DTYPES[dtype], tuple(shape), path))


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number <= MAX_BYTES for number in value)
