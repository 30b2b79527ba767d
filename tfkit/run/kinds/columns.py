"""Data in files with rows and columns; and texts in one column, joined to windows of equal length."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self

import numpy as np
from pydantic import Field

from tfkit.component import Immaterial, slot
from tfkit.errors import Invalid, SpecError, quoted
from tfkit.run.contract import Data, DataConfig, Ids, Tokenizer, TokenizerConfig, bare_ids
from tfkit.run.kinds.examples import StreamData, split_ranges
from tfkit.run.kinds.text import files_of, id_of, tokenizer_for
from tfkit.run.read_rows import Row, read_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

Names = str | tuple[str, ...]
Token = str | Annotated[int, Field(ge=0)]
"""A token: its text, or its id."""
Long = Literal["error", "skip", "cut"]


class ColumnsConfig(DataConfig):
    """Rows of files: jsonl, csv, tsv, parquet, arrow, and folders that `datasets` wrote."""

    files: Immaterial[Names | dict[str, Names]]
    """A path, a pattern such as `data/*.jsonl`, or a list of both, whose rows are divided by `split`; or a mapping from
    each split to its files. Relative paths start at the folder of the run's file."""
    divide: Literal["random", "stored"] = "random"
    """The rows of each split: random rows, the same for every seed; or with `stored`, consecutive rows in the order of
    the files, for data such as time series."""

    def check(self) -> None:
        """Raise `Invalid` if the split `train` is missing, or if two fields define the splits."""
        super().check()
        if not isinstance(self.files, dict):
            return
        if "train" not in self.files:
            raise Invalid("files", "`files` must have a split `train`", help="write `files: {train: ..., val: ...}`")
        if "split" in self.model_fields_set:
            raise Invalid("split", "`split` has no effect: `files` names the files of each split", help="remove it")
        if "divide" in self.model_fields_set:
            raise Invalid("divide", "`divide` has no effect: `files` names the files of each split", help="remove it")

    @property
    def split_names(self) -> tuple[str, ...]:
        return tuple(self.files if isinstance(self.files, dict) else self.split)

    def located(self, folder: Path) -> Self:
        def absolute(names: Names) -> tuple[str, ...]:
            return tuple(str((folder / name).absolute()) for name in ((names,) if isinstance(names, str) else names))

        files = self.files
        located = {name: absolute(part) for name, part in files.items()} if isinstance(files, dict) else absolute(files)
        tokenizer: TokenizerConfig | None = getattr(self, "tokenizer", None)
        update = {} if tokenizer is None else {"tokenizer": tokenizer.located(folder)}
        return self.model_copy(update={"files": located, **update})

    @property
    def takes_length(self) -> bool:
        return True

    def read(self) -> dict[str, list[Row]]:
        """Return all rows by split. Raise `Invalid` for a row that cannot be read, or an empty split."""
        if isinstance(self.files, dict):
            parts = {name: list(_rows_of_files(files)) for name, files in self.files.items()}
            empty = next((name for name, rows in parts.items() if not rows), None)
            if empty is not None:
                raise Invalid("files", f"the files of the split `{empty}` must have at least one row")
            return parts
        rows = list(_rows_of_files(self.files))
        ranges = split_ranges(self, len(rows))
        if self.divide == "stored":
            return {name: rows[start:end] for name, (start, end) in ranges.items()}
        return {name: [rows[index] for index in indices] for name, indices in self.drawn(len(rows)).items()}


def _rows_of_files(names: Names) -> Iterator[Row]:
    for name in (names,) if isinstance(names, str) else names:
        for path in files_of(name, folders=True):
            yield from read_rows(Path(path))


class Ragged:
    """Sequences of unequal length in one array. Their items are ids or vectors."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        values, ends = array("i"), array("q")
        for sequence in sequences:
            values.extend(sequence)
            ends.append(len(values))
        self.values: NDArray[Any] = np.frombuffer(values, dtype=np.int32)
        self.ends = np.frombuffer(ends, dtype=np.int64)
        self.sizes = np.diff(self.ends, prepend=0)

    @classmethod
    def of_vectors(cls, sequences: Sequence[NDArray[np.float32]]) -> Ragged:
        """Return sequences of vectors, [n, width] each."""
        ragged = cls([()] * len(sequences))
        ragged.values = np.concatenate(sequences)
        ragged.sizes = np.array([len(sequence) for sequence in sequences])
        ragged.ends = ragged.sizes.cumsum()
        return ragged

    def __len__(self) -> int:
        return len(self.ends)

    def padded(self, indices: Ids, fill: float = 0) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return sequences as a batch, [b, t] or [b, t, width], padded with `fill` at the end; and its mask, [b, t]."""
        ends, sizes = self.ends[indices], self.sizes[indices]
        mask = np.arange(sizes.max()) < sizes[:, None]
        dtype = np.int64 if self.values.dtype == np.int32 else np.float32
        rows = np.full(mask.shape + self.values.shape[1:], fill, dtype=dtype)
        parts = zip((ends - sizes).tolist(), ends.tolist(), strict=True)
        rows[mask] = np.concatenate([self.values[start:end] for start, end in parts])
        return rows, mask

    def digest(self) -> bytes:
        """Return a digest of all sequences."""
        return hashlib.blake2b(self.sizes.astype("<i8").tobytes() + self.values.tobytes()).digest()


def masks_of(masks: Mapping[str, NDArray[np.bool_]]) -> dict[str, NDArray[np.bool_]]:
    """Return only the masks that have padding."""
    return {name: mask for name, mask in masks.items() if not mask.all()}


def fitting_indices(rows: Sequence[Row], sizes: Sequence[int], length: int, long: Long) -> list[int]:
    """Return the indices of the rows to use; `sizes` are their numbers of positions.

    Raise `Invalid` if no row fits `length` or, with `long: error`, if a row does not.
    """
    too_long = [number for number, size in enumerate(sizes) if size > length]
    if too_long and long == "error":
        row, size = rows[too_long[0]], sizes[too_long[0]]
        message = f"{row.location} has {size:,} positions, but `batch.length` is {length:,}"
        notes = (f"{len(too_long):,} of {len(rows):,} rows are too long",)
        raise Invalid("files", message, notes=notes, help="increase `batch.length`, or choose `long: skip`")
    numbers = [number for number, size in enumerate(sizes) if long == "cut" or size <= length]
    if not numbers:
        message = f"no row of a split has at most {length:,} positions; the first row is {rows[0].location}"
        raise Invalid("long", message, help="increase `batch.length`")
    return numbers


class Digested(Protocol):
    """Examples that provide a digest of their content."""

    def digest(self) -> bytes:
        """Return a digest of all ids."""


def data_fingerprint(texts: Iterable[str], examples: Mapping[str, Digested]) -> str:
    """Return a digest of texts and of the examples of each split."""
    digest = hashlib.blake2b(digest_size=32)
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text.encode("utf-8", "surrogatepass"))
    for name, part in examples.items():
        digest.update(f"{name} ".encode() + part.digest())
    return digest.hexdigest()


def encoded_text(row: Row, text: str, encode: Callable[[str], Sequence[int]]) -> Sequence[int]:
    """Return the ids of a text in a row; raise `Invalid` if it has no ids, or if the tokenizer cannot express it."""
    try:
        ids = encode(text)
    except SpecError as error:
        raise Invalid("files", f"{row.location}: {error.diagnostics[0].message}") from error
    except ValueError as error:
        message = f"{row.location}: the tokenizer cannot express {quoted(text)}"
        raise Invalid("files", message, help=str(error)) from error
    if not ids:
        raise Invalid("files", f"{row.location}: a text must have at least one token; got {quoted(text)}")
    return ids


class DocumentsConfig(ColumnsConfig):
    """The texts in a column, each followed by a separator, in windows of `length` tokens.

    The target of each token is the next token. No text is in two splits. `{kind: packed}` separates the texts of a row.
    """

    kind: Literal["documents"] = "documents"

    text: str = "text"
    """The column of the text."""
    separator: Token | None = None
    """The token after each text; by default a new token with the highest id."""
    tokenizer: TokenizerConfig = slot("characters")
    """Text to tokens."""

    def build(self, length: int | None) -> Data:
        assert length is not None
        parts = self.read()
        texts = [row.text(self.text) for rows in parts.values() for row in rows]
        tokenizer = tokenizer_for(self.tokenizer, "".join(texts))
        separator, vocab_size = new_token(self.separator, tokenizer, tokenizer.vocab_size, "separator")
        ids = {name: Ragged(self._document(row, tokenizer, separator) for row in rows) for name, rows in parts.items()}
        streams = {name: ragged.values.astype(np.int64) for name, ragged in ids.items()}
        return StreamData(streams, length, vocab_size, tokenizer, data_fingerprint(texts, ids))

    def _document(self, row: Row, tokenizer: Tokenizer, separator: int) -> list[int]:
        return [*encoded_text(row, row.text(self.text), lambda text: [*bare_ids(tokenizer, text), separator])]


def new_token(token: Token | None, tokenizer: Tokenizer, vocab_size: int, field: str) -> tuple[int, int]:
    """Return the id of a token, by default a new one, and the size of the vocabulary with it."""
    number = vocab_size if token is None else id_of(token, tokenizer, field)
    return number, max(vocab_size, number + 1)
