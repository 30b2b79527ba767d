"""The header of a safetensors file, read without trust: files that could harm their reader are rejected here.

A file consists of eight bytes with the length of the header, the header, and the data. The header is a JSON object that
maps each name to `dtype`, `shape` and `data_offsets`, and `__metadata__` to strings. The tensors fill the data without
gaps.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
import shlex
import stat
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tfkit.errors import Diagnostic, SpecError, listing, quoted

ITEM_SIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
}
"""Size of one element of each dtype, in bytes."""
MAX_HEADER = 100_000_000
"""Limit of the format, in bytes; tfkit also applies it to index files."""
MAX_PARTS = 1_000_000
"""Maximum number of values in a JSON text, which bounds memory use: enough for 100,000 tensors in a file."""
MAX_DIMS = 16
MAX_BYTES = 2**63 - 1
AGAIN = "the file is damaged or was made to look like a checkpoint: fetch it again from its source"


class Malformed(ValueError):  # noqa: N818 - the name describes the file
    """An error in a file or a tensor. Its message continues a sentence that begins with the name of the file."""


class Entry(NamedTuple):
    """Dtype and shape of a tensor, and the range of its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Stamp(NamedTuple):
    """Identity of a file: device, inode, size in bytes, and modification time in ns."""

    device: int
    inode: int
    size: int
    written: int


class FileHeader(NamedTuple):
    """A parsed header: tensors in the order of their data, metadata, and the stamp of the file."""

    tensors: dict[str, Entry]
    metadata: dict[str, str]
    stamp: Stamp


def quoted_path(path: Path) -> str:
    """Return a path as errors print it."""
    return quoted(str(path), 200)


def read_error(path: Path, error: Exception) -> SpecError:
    """Build the error for a file that the system cannot read."""
    cause = (getattr(error, "strerror", None) or " ".join(str(error).split())).removesuffix(".")
    return SpecError(Diagnostic(f"cannot read {quoted_path(path)}: {cause}"))


def file_stamp(path: Path) -> Stamp:
    """Return the stamp of a file. Raise OSError if the file does not exist."""
    return _status_stamp(os.stat(path))


def read_header(path: Path) -> FileHeader:
    """Read and check the header of a safetensors file, without reading its data.

    Raises:
        SpecError: the file cannot be read, has a different format, or its header does not describe its data exactly.
    """
    with open_regular(path) as file:
        stamp_read = _status_stamp(os.fstat(file.fileno()))
        try:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            _reject_foreign(path, start if length > MAX_HEADER else b"")
            raw = file.read(_checked_length(length, stamp_read.size))
            header = parse_object(raw)
            metadata = _pop_metadata(header)
            entries = _tensor_entries(header, 8 + length, stamp_read.size - 8 - length)
        except OSError as error:
            raise read_error(path, error) from error
        except Malformed as error:
            raise SpecError(
                Diagnostic(f"{quoted_path(path)} is not a valid safetensors file: {error}", help=AGAIN)
            ) from error
    return FileHeader(entries, metadata, stamp_read)


def open_regular(path: Path, *, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading. Folders, pipes and devices are rejected: reading them could block or never end.

    Without `follow`, a link is rejected, too.

    Raises:
        SpecError: the file does not exist, cannot be read, or is not a regular file.
    """
    links = 0 if follow else getattr(os, "O_NOFOLLOW", 0)
    try:  # without O_NONBLOCK, opening a pipe waits for a writer
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | links)
    except (OSError, ValueError) as error:  # ValueError: the name has a zero byte
        raise read_error(path, error) from error
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise SpecError(Diagnostic(f"cannot read {quoted_path(path)}: it is a folder, a pipe or a device, not a file"))
    return open(number, "rb")


def read_object(
    path: Path, *, max_bytes: int = MAX_HEADER, max_values: int | None = MAX_PARTS, help: str | None = None
) -> dict[str, Any]:
    """Read a file that contains a JSON object. Errors in the contents have `help`; see `parse_object` for `max_values`.

    Raises:
        SpecError: the file cannot be read, is not a regular file, has more than `max_bytes` bytes, or contains
            something else.
    """
    with open_regular(path) as file:
        try:
            raw = file.read(max_bytes + 1)
        except OSError as error:
            raise read_error(path, error) from error
    try:
        if len(raw) > max_bytes:
            raise Malformed(f"it has more than {max_bytes:,} bytes")
        return parse_object(raw, max_values=max_values)
    except Malformed as error:
        raise SpecError(Diagnostic(f"cannot read {quoted_path(path)}: {error}", help=help)) from error


def parse_object(raw: bytes, *, max_values: int | None = MAX_PARTS) -> dict[str, Any]:
    """Parse a JSON object. `max_values` bounds the memory that this takes; None: no bound.

    Raises:
        Malformed: the text is not a JSON object, or has a duplicate key, too many values, or too many levels.
    """
    if max_values is not None and sum(raw.count(mark) for mark in (b",", b"[", b"{")) > max_values:
        raise Malformed(f"its JSON has more than {max_values:,} values")
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_object_of_pairs)
    except UnicodeDecodeError as error:
        where = _line_and_column(error.object[: error.start].decode())
        raise Malformed(f"its JSON is not UTF-8: byte 0x{raw[error.start]:02x} at {where}") from None
    except json.JSONDecodeError as error:
        raise Malformed(f"its JSON is broken at {_line_and_column(error.doc[: error.pos])}: {error.msg}") from None
    except RecursionError:
        raise Malformed("its JSON is nested too deeply") from None
    except Malformed:
        raise
    except ValueError:  # Python limits the number of digits of an integer
        raise Malformed("its JSON has a number that is too long") from None
    if not isinstance(value, dict):
        raise Malformed("its JSON is not an object")
    return value


def _line_and_column(before: str) -> str:
    """Return the line and the column of the character after a text; only the column if the text has no second line."""
    lines = before.split("\n")
    column = f"column {len(lines[-1]) + 1:,}"
    return f"line {len(lines):,}, {column}" if lines[1:] else column


def _status_stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _checked_length(length: int, size: int) -> int:
    if size < 8:
        raise Malformed(f"it has {size} bytes" if size else "it is empty")
    if length > MAX_HEADER:
        raise Malformed(f"its header would have {length:,} bytes; at most {MAX_HEADER:,} are allowed")
    if length > size - 8:
        raise Malformed(f"its header would have {length:,} bytes, but only {size - 8:,} follow")
    return length


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise Malformed(f"its JSON has the key {quoted(key)} twice")
        values[key] = value
    return values


def _pop_metadata(header: dict[str, Any]) -> dict[str, str]:
    """Remove `__metadata__` from a header and return it."""
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise Malformed("its `__metadata__` is not an object of texts")
    return metadata


def _tensor_entries(header: dict[str, Any], begin: int, size: int) -> dict[str, Entry]:
    """Return the tensors in the order of their data. The data begins at byte `begin` and has `size` bytes."""
    entries: dict[str, Entry] = {}
    for name, fields in header.items():
        try:
            entries[name] = _tensor_entry(fields, begin, size)
        except Malformed as error:
            raise Malformed(f"tensor {quoted(name)} {error}") from None
    ordered = sorted(entries, key=lambda name: (entries[name].start, entries[name].end))
    if ordered and entries[ordered[0]].start > begin:
        raise Malformed(f"the first {entries[ordered[0]].start - begin:,} bytes of its data belong to no tensor")
    for name, following in pairwise(ordered):
        gap = entries[following].start - entries[name].end
        if gap < 0:
            raise Malformed(f"tensors {quoted(name)} and {quoted(following)} overlap")
        if gap > 0:
            raise Malformed(f"{gap:,} bytes after tensor {quoted(name)} belong to no tensor")
    trailing = begin + size - (entries[ordered[-1]].end if ordered else begin)
    if trailing:
        raise Malformed(f"the last {trailing:,} bytes of its data belong to no tensor")
    return {name: entries[name] for name in ordered}


def _tensor_entry(fields: Any, begin: int, size: int) -> Entry:
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise Malformed("is not described by `dtype`, `shape` and `data_offsets`")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        kind = quoted(dtype) if isinstance(dtype, str) else "that is not a text"
        raise Malformed(f"has a type {kind}; supported types are {listing(ITEM_SIZES, len(ITEM_SIZES))}")
    if not _is_count_list(shape) or len(shape) > MAX_DIMS:
        raise Malformed(f"has a shape that is not at most {MAX_DIMS} integers from 0")
    # A dimension of 0 makes the tensor empty, but its strides must still be numbers that torch can hold.
    if math.prod(max(dim, 1) for dim in shape) * ITEM_SIZES[dtype] > MAX_BYTES:
        raise Malformed(f"has a shape of more than {MAX_BYTES:,} bytes")
    if not _is_count_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise Malformed("has `data_offsets` that are not a start and an end")
    start, end = offsets
    if end > size:
        raise Malformed(f"ends at byte {end:,} of the data, which has {size:,}: the file is truncated")
    expected = math.prod(shape) * ITEM_SIZES[dtype]
    if end - start != expected:
        raise Malformed(f"has {end - start:,} bytes, but {shape} of {dtype} takes {expected:,}")
    return Entry(dtype, tuple(shape), begin + start, begin + end)


def _is_count_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number <= MAX_BYTES for number in value)


# ---- files that are not safetensors, recognized by their first bytes or their names ----


PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
PUBLISHED_PICKLES = ("pytorch_model*.bin", "consolidated.*.pth", "lit_model.pth", "ckpt.pt")
"""Patterns of the names of pickles with the weights of a model, in the layouts that `tfkit convert` supports."""
_PICKLE = ("is a pickle, which can run any code when it is read", None)
_GGUF = (
    "is a GGUF file, made for llama.cpp",
    "take the safetensors files of the same model; `AutoModel.from_pretrained(DIR, gguf_file=FILE)` in transformers "
    "reads some and can save them",
)
_KERAS = ("is an HDF5 file, made for Keras", "take the safetensors files of the same model")
_NUMPY = ("is a NumPy array", "`safetensors.numpy.save_file({'name': array}, FILE)` makes a safetensors file of it")
_PACKED = ("is compressed", "unpack it first")
_POINTER = ("is a pointer of Git LFS instead of the file", "run `git lfs pull` in its repository to fetch the file")
_PAGE = ("is a web page", "the download failed: fetch the file again")
_JSON = ("is a JSON text", "give the weights themselves, their folder, or their index (`*.index.json`)")

_STARTS = {
    b"PK\x03\x04": _PICKLE,  # torch.save writes a zip archive that contains a pickle
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


def _reject_foreign(path: Path, start: bytes) -> None:
    """Raise SpecError if a file is recognized as a format other than safetensors.

    Args:
        path: its path. A name that only pickles have is rejected, whatever the contents.
        start: its first eight bytes, unless they can be the length of a header: 640 begins with the bytes of a pickle.
    """
    match = next((kind for prefix, kind in _STARTS.items() if start.startswith(prefix)), None)
    suffix = path.suffix.lower()
    if match is None and suffix in PICKLES:
        match = (f"has the name of a pickle (`{suffix}`), which can run any code when it is read", None)
    if match is not None:
        raise SpecError(Diagnostic(f"{quoted_path(path)} {match[0]}", help=match[1] or how_to_convert(path)))


def how_to_convert(pickle: Path) -> str:
    """Return the help with the command that converts a pickle, or the folder with all files of its model."""
    # Checkpoints of nanoGPT need no other file, and may be next to the checkpoints of other programs.
    in_folder = any(fnmatchcase(pickle.name, pattern) for pattern in PUBLISHED_PICKLES[:-1])
    source = pickle.parent if in_folder else pickle
    name = source.absolute().name if in_folder else source.stem
    target = source.parent / f"{name}-safetensors"
    if os.path.lexists(target):
        return f"name the folder with its tensors as safetensors: {quoted_path(target)}"
    return f"convert it: `{shlex.join(['tfkit', 'convert', str(source), '-o', str(target)])}`"
