"""The files of a checkpoint: opened only for reading, memory-mapped, and checked before use."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tfkit.arguments import name_of
from tfkit.errors import ChangedWeightsWarning, Diagnostic, SpecError, listing, quoted
from tfkit.spec.folder import ADAPTER_WEIGHTS, model_folder
from tfkit.spec.header import FileHeader, file_stamp, quoted_path, read_error
from tfkit.spec.weight_files import changed_weights, read_headers

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
REMAP_BYTES = 2**25
"""Number of read bytes after which a file is remapped, which releases the memory of data no longer in use."""
FAILURES = (OSError, SafetensorError, RuntimeError, MemoryError)
"""Errors that safetensors and torch raise if a file cannot be mapped."""
CHUNK = 2**20
"""Number of values that are checked at a time if torch has no kernel that avoids a copy."""
BROKEN = "values that are infinite or NaN"
MAX_NAMES = 4
"""The maximum number of listed names."""


class TensorInfo(NamedTuple):
    """Dtype, shape and file of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path


class TensorFiles:
    """The tensors of a file or of a sharded checkpoint, by name.

    Attributes:
        names: information on every tensor, file by file and in the order of their data. Reading in this order maps
            only one file at a time.
        metadata: the metadata of each file.
        adapters: the files of the adapters that change these tensors, in the order in which they apply.
    """

    def __init__(self, headers: dict[Path, FileHeader]) -> None:
        self.names: dict[str, TensorInfo] = {}
        self.metadata = {file: header.metadata for file, header in headers.items()}
        self.adapters: tuple[TensorFiles, ...] = ()
        self._headers = headers
        self._file: Any = None
        self._path: Path | None = None
        self._read = 0
        self._compared = False
        for file, header in headers.items():
            for name, entry in header.tensors.items():
                self.names[name] = TensorInfo(DTYPES[entry.dtype], entry.shape, file)

    @classmethod
    def open(cls, path: Path | str, *, compared: bool = False) -> TensorFiles:
        """Open a checkpoint: read and check the headers of its files, but no tensors.

        Args:
            path: a safetensors file; a folder with `model.safetensors`, or with `model.safetensors.index.json` and its
                shards; the index itself; or a run folder, whose latest checkpoint is opened.
            compared: True if the caller compares the tensors with the digests of their run.

        Raises:
            SpecError: a file is missing, unreadable, damaged, a pickle or of another foreign format; or the index names
                files outside its folder, or tensors that its files do not have.
        """
        headers = read_headers(model_folder(Path(path)))
        of_adapters = [file for file in headers if file.name == ADAPTER_WEIGHTS]
        checkpoint = cls({file: header for file, header in headers.items() if file not in of_adapters})
        checkpoint._compared = compared
        checkpoint.adapters = tuple(cls({file: headers[file]}) for file in of_adapters)
        for files in (checkpoint, *checkpoint.adapters):
            for file in files._headers:  # checks that safetensors accepts each file before any tensor is loaded
                files._map(file)
            files.close()
        return checkpoint

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, name: str) -> Tensor:
        """Return a tensor as a view of its file. Its bytes are read when they are used.

        Writing to the tensor does not change the file. The tensor stays valid after the checkpoint is closed, but not
        if the file is truncated. Copy tensors that must outlive the file.

        Raises:
            KeyError: the checkpoint has no such tensor.
            SpecError: its file was changed or removed since the checkpoint was opened, or cannot be mapped.
        """
        info = self.names[name]
        if not self._compared:
            self._compared = True
            self._warn_of_changes()
        self._check_unchanged(info.file)
        if info.file != self._path or self._read > REMAP_BYTES:
            self._map(info.file)
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except FAILURES as error:
            raise read_error(info.file, error) from error
        self._read += tensor.nbytes
        return tensor

    def close(self) -> None:
        """Release the mapping. Tensors that were read stay valid."""
        self._file = self._path = None
        for adapter in self.adapters:
            adapter.close()

    def _map(self, path: Path) -> None:
        self.close()
        try:
            self._file = safe_open(str(path), framework="pt")
        except FAILURES as error:
            self._check_unchanged(path)
            raise read_error(path, error) from error
        self._check_unchanged(path)
        self._path, self._read = path, 0

    def _warn_of_changes(self) -> None:
        """Issue a warning if the files belong to a run and have other tensors than the run wrote."""
        for file in self._headers:
            if (problem := changed_weights(file)) is not None:
                warnings.warn(problem.warning(), ChangedWeightsWarning, stacklevel=5)

    def _check_unchanged(self, path: Path) -> None:
        try:
            now = file_stamp(path)
        except OSError as error:
            raise read_error(path, error) from error
        if now != self._headers[path].stamp:
            raise SpecError(
                Diagnostic(f"{quoted_path(path)} was changed while it was in use", help="load the file again")
            )


# ---- finite values, as stored in a file and after conversion to the model's dtype ----


def is_finite(tensor: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return True if all values are finite, also after conversion to `dtype`. No copy is made."""
    values = _real_values(tensor)
    if not values.numel() or not values.is_floating_point():
        return True
    if values.itemsize == 1:
        return all(bool(chunk.float().isfinite().all()) for chunk in values.flatten().split(CHUNK))
    return all(bool(bound.to(dtype or bound.dtype).isfinite()) for bound in values.aminmax())


def check_finite(name: str, tensor: Tensor, file: Path, dtype: torch.dtype | None = None) -> None:
    """Raise SpecError with the index of the first value that is infinite or NaN, or out of range for `dtype`."""
    if is_finite(tensor, dtype):
        return
    values = _real_values(tensor)
    kind, problem, help = values.dtype, BROKEN, None
    if dtype is not None and is_finite(values):
        kind, problem = dtype, f"values beyond {name_of(dtype)}"
        help = f"use {name_of(values.dtype)}, the type of the file"
    bad, first = _count_not_finite(values, kind)
    location = [int(index) for index in np.unravel_index(first, values.shape)][: tensor.dim()]
    message = f"tensor {quoted(name)} of {quoted_path(file)} has {problem}"
    note = f"{bad:,} in total; the first is {values.flatten()[first].item()} at {location}"
    raise SpecError(Diagnostic(message, notes=(note,), help=help))


def not_finite(state: Mapping[str, Any]) -> str | None:
    """Describe the tensors that have infinite or NaN values. Return None if all values are finite.

    The state of a quantized module may contain objects that are no tensors.
    """
    names = [quoted(name) for name, tensor in state.items() if isinstance(tensor, Tensor) and not is_finite(tensor)]
    return f"in {listing(names, MAX_NAMES)}" if names else None


def _real_values(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _count_not_finite(values: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Return the number of values that are not finite after conversion to `dtype`, and the index of the first."""
    bad, first = 0, 0
    for index, chunk in enumerate(values.flatten().split(CHUNK)):
        broken = ~chunk.to(dtype).double().isfinite()
        if not bad and broken.any():
            first = index * CHUNK + int(broken.int().argmax())
        bad += int(broken.sum())
    return bad, first
