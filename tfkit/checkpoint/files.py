"""The files of a checkpoint: opened only for reading, mapped into memory, and checked before anything is used."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tfkit.checkpoint.header import (
    AGAIN,
    HOW_TO_CONVERT,
    MAX_HEADER,
    PICKLES,
    Header,
    Malformed,
    TensorInfo,
    open_regular,
    parse_object,
    read_header,
    shown,
    stamp,
    unreadable,
)
from tfkit.errors import Diagnostic, SpecError, closest, listing, quoted
from tfkit.spec.folder import INDEX, WEIGHTS, model_folder

MAPPED = 2**25
"""A file is remapped after this many bytes, so that data which was read and is no longer in use leaves memory."""
FAILURES = (OSError, SafetensorError, RuntimeError, MemoryError)
"""The errors that safetensors and torch raise if a file cannot be mapped."""


class Checkpoint:
    """The tensors of a file or of a sharded checkpoint, by name.

    Attributes:
        names: type, shape and file of every tensor, file by file and in the order of their data: read in this
            order, a single file is mapped at a time.
        metadata: the texts that each file has in addition to its tensors.
    """

    def __init__(self, headers: dict[Path, Header]) -> None:
        self.names: dict[str, TensorInfo] = {}
        self.metadata = {file: header.metadata for file, header in headers.items()}
        self._headers = headers
        self._file: Any = None
        self._path: Path | None = None
        self._read = 0
        for header in headers.values():
            for name, info in header.tensors.items():
                if name in self.names:
                    raise _twice(name, self.names[name].file, info.file)
                self.names[name] = info

    @classmethod
    def open(cls, path: Path | str) -> Checkpoint:
        """Open a checkpoint: the headers of its files are read and checked, no tensor is.

        Args:
            path: a safetensors file; a folder with `model.safetensors`, or with `model.safetensors.index.json` and its
                shards; the index itself; or the folder of a run, whose latest checkpoint is opened.

        Raises:
            SpecError: a file is missing, unreadable, damaged, a pickle or of another foreign format; or the index names
                files outside its folder, or tensors that its files do not have.
        """
        path = Path(path)
        path = _in_folder(model_folder(path)) if os.path.isdir(path) else path
        headers: dict[Path, Header] = {}
        if path.name.endswith(".index.json"):
            for shard, names in _shards(path).items():
                file = _inside(path, shard)
                headers[file] = headers.get(file) or read_header(file)
                _check_listed(path, file, names, headers[file])
        else:
            headers[path] = read_header(path)
        checkpoint = cls(headers)
        for file in headers:  # safetensors must accept each file before any tensor is loaded
            checkpoint._map(file)
        checkpoint.close()
        return checkpoint

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, name: str) -> Tensor:
        """Return a tensor, as a view of its file: its bytes enter memory when they are used.

        Writing to it does not change the file. It stays valid after the checkpoint is closed, but not if the file is
        truncated: copy tensors that must outlive the file.

        Raises:
            KeyError: there is no such tensor.
            SpecError: its file was changed or removed since the checkpoint was opened, or cannot be mapped.
        """
        info = self.names[name]
        self._check_unchanged(info.file)
        if info.file != self._path or self._read > MAPPED:
            self._map(info.file)
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except FAILURES as error:
            raise unreadable(info.file, error) from error
        self._read += tensor.nbytes
        return tensor

    def close(self) -> None:
        """Release the mapping; tensors that were read stay valid."""
        self._file = self._path = None

    def _map(self, path: Path) -> None:
        self.close()
        try:
            self._file = safe_open(str(path), framework="pt")
        except FAILURES as error:
            self._check_unchanged(path)
            raise unreadable(path, error) from error
        self._check_unchanged(path)
        self._path, self._read = path, 0

    def _check_unchanged(self, path: Path) -> None:
        try:
            now = stamp(path)
        except OSError as error:
            raise unreadable(path, error) from error
        if now != self._headers[path].stamp:
            raise SpecError(Diagnostic(f"{shown(path)} was changed while it was in use", help="load the file again"))


def _in_folder(folder: Path) -> Path:
    """Return the file that holds, or lists, the weights of a folder."""
    for name in (WEIGHTS, INDEX):
        if os.path.lexists(folder / name):
            return folder / name
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise unreadable(folder, error) from error
    weights = [name for name in names if name.endswith((".safetensors", ".safetensors.index.json"))]
    pickles = [name for name in names if name.lower().removesuffix(".index.json").endswith(PICKLES)]
    if pickles and not weights:
        message = f"{shown(folder)} has only pickles, which can run any code when they are read"
        raise SpecError(Diagnostic(message, notes=(f"it has {listing(map(quoted, pickles))}",), help=HOW_TO_CONVERT))
    raise SpecError(
        Diagnostic(
            f"{shown(folder)} has neither `{WEIGHTS}` nor `{INDEX}`",
            notes=(f"it has {listing(map(quoted, names))}" if names else "it is empty",),
            help=f"name the file: {listing(str(folder / name) for name in weights)}" if weights else None,
        )
    )


def _shards(index: Path) -> dict[str, list[str]]:
    """Read the files that an index lists, and the names of the tensors in each."""
    with open_regular(index) as file:
        try:
            raw = file.read(MAX_HEADER + 1)
            if len(raw) > MAX_HEADER:
                raise Malformed(f"it has more than {MAX_HEADER:,} bytes")
            files = parse_object(raw).get("weight_map")
            if not isinstance(files, dict) or not files:
                raise Malformed("it has no `weight_map` from the names of tensors to files")
            shards: dict[str, list[str]] = {}
            for name, shard in files.items():
                if not isinstance(shard, str) or not shard:
                    raise Malformed(f"its `weight_map` has no file for tensor {quoted(name)}")
                shards.setdefault(shard, []).append(name)
        except OSError as error:
            raise unreadable(index, error) from error
        except Malformed as error:
            raise SpecError(Diagnostic(f"{shown(index)} is not a valid index: {error}", help=AGAIN)) from error
    return shards


def _inside(index: Path, shard: str) -> Path:
    """Return the path of a shard. Raise SpecError if it is outside the index's folder, also through a link.

    In a cache of the Hugging Face hub every file of a snapshot is a link to the blobs of the same repository.
    """
    folder = index.parent
    allowed = [folder]
    if folder.absolute().parent.name == "snapshots":
        allowed.append(folder.absolute().parent.parent / "blobs")
    if "\0" not in shard:  # no system allows such a name: opening the file fails
        real = Path(os.path.realpath(folder / shard))
        if not any(real.is_relative_to(os.path.realpath(parent)) for parent in allowed):
            message = f"{shown(index)} names a file outside its folder: {quoted(shard)}"
            raise SpecError(Diagnostic(message, help="put the files of a checkpoint next to their index"))
    return folder / shard


def _check_listed(index: Path, file: Path, names: Iterable[str], header: Header) -> None:
    missing = [name for name in names if name not in header.tensors]
    if missing:
        near = closest(missing[0], header.tensors)
        message = f"{shown(index)} assigns tensor {quoted(missing[0])} to {quoted(file.name)}, which does not have it"
        more = (f"and {len(missing) - 1:,} more",) if missing[1:] else ()
        raise SpecError(Diagnostic(message, notes=more, help=f"it has {quoted(near)}" if near else None))


def _twice(name: str, first: Path, second: Path) -> SpecError:
    return SpecError(Diagnostic(f"tensor {quoted(name)} is in two files: {shown(first)} and {shown(second)}"))
