"""Token ids in `.npy` and `.bin` files, which are mapped into memory.

The digest of the files is stored in a file next to them, so later runs do not need to read the full files first.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field

from tfkit.component import Dim, Immaterial
from tfkit.errors import Diagnostic, Invalid, SpecError, listing, quoted
from tfkit.run.contract import Data, DataConfig, Ids
from tfkit.run.kinds.examples import StreamData
from tfkit.run.kinds.text import displayed_path
from tfkit.run.read_rows import open_data

MAX_DIGEST = 2**24
"""Maximum number of bytes of a file with a digest."""
CHUNK = 2**22
"""Number of tokens that are read at a time."""


class TokensConfig(DataConfig):
    """Windows of `length` token ids from `.npy` or `.bin` files; the target of each token is the next token.

    The files are joined in the order of the list, and mapped into memory. The first run computes their digest and their
    largest id, and stores both next to the first file, in `NAME.digest`. Later runs use that file if the sizes and
    modification times of all files are unchanged. Splits are consecutive ranges of the tokens. A run ends with an error
    if one of its files changes.
    """

    kind: Literal["tokens"] = "tokens"

    files: Immaterial[str | tuple[str, ...]]
    """The path of a file with one axis of integers, as `numpy.save` and `tfkit tokens` write it; or of a `.bin` file
    with 16-bit ids and no header, as nanoGPT writes it; or a list of paths."""
    vocab_size: Dim | None = None
    """The size of the vocabulary; by default one more than the largest id."""
    separator: Annotated[int, Field(ge=0)] | None = None
    """The id that ends a document. With a separator, every split ends after a document, so no document is in two
    splits."""

    @property
    def takes_length(self) -> bool:
        return True

    @property
    def windows(self) -> bool:
        return True

    def located(self, folder: Path) -> Self:
        return self.model_copy(update={"files": tuple(str((folder / name).absolute()) for name in self._names())})

    def build(self, length: int | None) -> Data:
        assert length is not None
        files = Joined(list(map(_mapped_file, self._names())))
        digest, largest = _read_stored_digest(files.parts) or _read_through(files.parts)
        if self.vocab_size is not None and largest >= self.vocab_size:
            names = listing(quoted(displayed_path(file.name)) for file in files.parts)
            message = f"{names}: the largest id is {largest:,}, beyond the vocabulary of {self.vocab_size:,}"
            raise Invalid("vocab_size", message)
        vocab_size = largest + 1 if self.vocab_size is None else self.vocab_size
        ends = {name: self._moved(files, end) for name, (_, end) in self.ends(len(files)).items()}
        starts = dict(zip(ends, [0, *ends.values()], strict=False))
        parts = {name: Joined(files.parts, starts[name], end, vocab_size) for name, end in ends.items()}
        return StreamData(parts, length, vocab_size, None, digest)

    def _names(self) -> tuple[str, ...]:
        return (self.files,) if isinstance(self.files, str) else self.files

    def _moved(self, files: Joined, end: int) -> int:
        """Return the end of a split, moved to the end of the document that contains it."""
        if self.separator is None or end == 0:
            return end
        for start in range(end - 1, len(files), CHUNK):
            locations = np.flatnonzero(files[np.arange(start, min(start + CHUNK, len(files)))] == self.separator)
            if len(locations):
                return int(start + locations[0] + 1)
        return len(files)


@dataclass(frozen=True)
class TokenFile:
    """A file that is mapped into memory, with the size and modification time that it had when it was mapped."""

    name: str
    size: int
    written: int
    ids: Ids

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, indices: Ids, vocab_size: int | None) -> Ids:
        """Return the ids at these indices.

        Raises SpecError if the file has changed, or has ids beyond the vocabulary. Reading a mapped file that has
        been truncated would end the process without a message.
        """
        try:
            status = os.stat(self.name)
        except OSError as error:
            raise self._error(f"can no longer be read: {error.strerror}") from error
        if (status.st_size, status.st_mtime_ns) != (self.size, self.written):
            raise self._error("was changed while it was in use")
        ids = self.ids[indices]
        if vocab_size is not None and len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            beyond = int(ids.max() if ids.min() >= 0 else ids.min())
            raise self._error(f"has the id {beyond:,}, beyond the vocabulary of {vocab_size:,}")
        return ids

    def _error(self, problem: str) -> SpecError:
        help = "restore the file, and continue from the last checkpoint with the same command"
        return SpecError(Diagnostic(f"{quoted(displayed_path(self.name))} {problem}", help=help))


class Joined:
    """A range of the ids of several files, joined one after the other; see `Stream`."""

    def __init__(
        self, parts: list[TokenFile], start: int = 0, end: int | None = None, vocab_size: int | None = None
    ) -> None:
        self.parts = parts
        self._ends = np.cumsum([len(part) for part in parts])
        self._start, self._end = start, int(self._ends[-1]) if end is None else end
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return self._end - self._start

    def __getitem__(self, indices: Ids) -> Ids:
        indices = indices + self._start
        owners = np.searchsorted(self._ends, indices, side="right")
        ids = np.empty(indices.shape, dtype=np.int64)
        for owner in np.unique(owners).tolist():
            here, part = owners == owner, self.parts[owner]
            ids[here] = part.at(indices[here] - self._ends[owner] + len(part), self._vocab_size)
        return ids


def _mapped_file(name: str) -> TokenFile:
    """Map the ids of a file into memory."""
    with open_data(name) as file:
        status = os.fstat(file.fileno())
    try:
        ids: object = np.memmap(name, "<u2", "r") if name.endswith(".bin") else np.load(name, "r", allow_pickle=False)
    except OSError as error:
        raise Invalid("files", f"cannot read {quoted(displayed_path(name))}: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:
        expected = "16-bit ids" if name.endswith(".bin") else "an array of numbers that `numpy.save` wrote"
        raise Invalid("files", f"{quoted(displayed_path(name))} must contain {expected}") from error
    if not isinstance(ids, np.ndarray):
        raise Invalid(
            "files", f"{quoted(displayed_path(name))} must have a single array of token ids; got several arrays"
        )
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        message = f"{quoted(displayed_path(name))} must have integers on one axis; got {ids.dtype} {list(ids.shape)}"
        raise Invalid("files", message)
    if not len(ids):
        raise Invalid("files", f"{quoted(displayed_path(name))} is empty")
    return TokenFile(name, status.st_size, status.st_mtime_ns, ids)


def _read_stored_digest(files: list[TokenFile]) -> tuple[str, int] | None:
    """Return the digest and the largest id stored next to the first file; None if the files have changed."""
    try:
        with open_data(_digest_file(files), follow=False) as file:
            stored = json.loads(file.read(MAX_DIGEST))
        if stored["files"] == _file_states(files) and re.fullmatch("[0-9a-f]{64}", stored["digest"]):
            return str(stored["digest"]), int(stored["largest"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def _store_digest(files: list[TokenFile], digest: str, largest: int) -> None:
    """Store the digest and the largest id next to the first file, if its folder is writable."""
    path = _digest_file(files)
    text = json.dumps({"files": _file_states(files), "digest": digest, "largest": largest})
    try:
        staged = path.with_name(f".{path.name}.{os.getpid()}")  # a process that is killed leaves no incomplete file
        with staged.open("x", encoding="utf-8") as file:  # not through a link of that name
            file.write(text)
        os.replace(staged, path)
    except OSError:
        pass


def _digest_file(files: list[TokenFile]) -> Path:
    return Path(f"{files[0].name}.digest")


def _file_states(files: list[TokenFile]) -> list[list[str | int]]:
    return [[os.path.basename(file.name), file.size, file.written] for file in files]


def _read_through(files: list[TokenFile]) -> tuple[str, int]:
    """Read all files, and return the digest and the largest of their ids; raise `Invalid` for an id below 0."""
    digest, largest = hashlib.blake2b(digest_size=32), 0
    for file in files:
        for start in range(0, len(file), CHUNK):
            ids = file.ids[start : start + CHUNK]
            if ids.min() < 0:
                raise Invalid(
                    "files", f"{quoted(displayed_path(file.name))} must not have an id below 0; got {ids.min()}"
                )
            largest = max(largest, int(ids.max()))
            digest.update(ids.astype("<i8").tobytes())
    _store_digest(files, digest.hexdigest(), largest)
    return digest.hexdigest(), largest
