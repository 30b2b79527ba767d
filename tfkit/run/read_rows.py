"""Rows of data files, read one after the other: jsonl, csv, tsv, parquet, arrow, and folders that `datasets` wrote.

Rows that have been yielded are not kept in memory. Parquet and arrow need the library pyarrow, the extra `data`.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, AnyStr, BinaryIO

from tfkit.errors import Invalid, SpecError, closest_name, listing, quoted
from tfkit.spec.extending import short_path
from tfkit.spec.header import Malformed, open_regular, parse_object

MAX_LINE = 2**26
"""Maximum number of characters of a line. A longer line is read in full before it can be rejected."""
MAGIC = b"ARROW1"
"""The first bytes of an arrow file that is not a stream."""


@dataclass(frozen=True)
class Row:
    """A row of a file.

    Attributes:
        path: the file.
        number: the line of the row, from 1; in a parquet or arrow file, and in a folder, the number of the row.
        values: the values by column.
    """

    path: Path
    number: int
    values: Mapping[str, Any]

    def __getitem__(self, column: str) -> Any:
        """Return the value of a column; raise `Invalid` if the row has no such column."""
        if column not in self.values:
            near = closest_name(column, self.values)
            help = f"a column with a similar name exists: `{near}`" if near else None
            columns = f"columns: {listing(map(str, self.values))}"
            raise Invalid("files", f"{self.location} must have the column `{column}`", notes=(columns,), help=help)
        return self.values[column]

    def text(self, column: str) -> str:
        """Return the text in a column; raise `Invalid` if the value is not text."""
        value = self[column]
        if not isinstance(value, str):
            raise self.error(column, "text")
        return value

    def error(self, column: str, expected: str, help: str = "correct the row, or name a different column") -> Invalid:
        """Build the error for an unexpected value, with file, row, column and value."""
        value = json.dumps(self.values[column], default=str, ensure_ascii=False)
        message = f"{self.location}: column `{column}` must be {expected}; got {quoted(value)}"
        return Invalid("files", message, help=help)

    @property
    def location(self) -> str:
        """The file and the row, for errors."""
        return _row_location(self.path, self.number)


def open_data(path: str | os.PathLike[str], *, follow: bool = True) -> BinaryIO:
    """Open a file of data for reading; raise `Invalid` unless it is a regular file, because a pipe could block.

    Without `follow`, the file must not be a link, as for files whose names tfkit chose.
    """
    try:
        return open_regular(Path(short_path(Path(path))), follow=follow)
    except SpecError as error:
        raise Invalid("files", error.diagnostics[0].message) from error


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file, or of a folder that `Dataset.save_to_disk` of the library `datasets` wrote.

    Raises:
        Invalid: the file has an unknown type, cannot be read or is damaged; or pyarrow is not installed.
    """
    if path.is_dir():
        read = _folder_rows
    elif path.suffix in _READERS:
        read = _READERS[path.suffix]
    else:
        help = f"use one of {', '.join(_READERS)}, or a folder that `datasets` wrote"
        raise Invalid(
            "files", f"{_quoted_path(path)} must be a file with rows; got the suffix `{path.suffix}`", help=help
        )
    number = 0
    try:
        for number, values in read(path):
            yield Row(path, number, values)
    except Invalid:
        raise
    except OSError as error:
        raise Invalid("files", f"cannot read {_quoted_path(path)}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, RuntimeError, csv.Error) as error:  # of the three libraries
        cause = f"the key {error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
        cause = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else cause
        raise Invalid("files", f"{_quoted_path(path)} is damaged after row {number:,}: {cause}") from error


def _row_location(path: Path, number: int) -> str:
    unit = "line" if path.suffix in (".jsonl", ".csv", ".tsv") else "row"
    return f"{_quoted_path(path)}, {unit} {number:,}"


def _quoted_path(path: Path) -> str:
    return quoted(str(short_path(path)))


def _json_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with open_data(path) as file:
        for number, line in enumerate(_checked_lines(file), 1):
            if not line.strip():
                continue
            try:
                yield number, parse_object(line, max_values=None)
            except Malformed as error:
                raise Invalid("files", f"{_row_location(path, number)} cannot be read: {error}") from error


def _checked_lines(file: IO[AnyStr]) -> Iterator[AnyStr]:
    """Yield the lines of a file; raise ValueError for a line that is too long to be a row."""
    while line := file.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE:
            raise ValueError(f"the next line has more than {MAX_LINE:,} characters")
        yield line


def _check_once(columns: Sequence[str]) -> None:
    if len(set(columns)) < len(columns):
        name = next(name for index, name in enumerate(columns) if name in columns[:index])
        raise ValueError(f"the column {quoted(name)} must be unique")


def _csv_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    csv.field_size_limit(sys.maxsize)  # a document may be longer than 128 KB
    with open_data(path) as file, TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        reader = csv.DictReader(_checked_lines(text), delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
        _check_once(reader.fieldnames or ())
        for values in reader:
            if None in values or None in values.values():
                columns = f"columns: {listing(reader.fieldnames or ())}"
                message = f"{_row_location(path, reader.line_num)} must have {len(reader.fieldnames or ())} columns"
                raise Invalid("files", message, notes=(columns,))
            yield reader.line_num, values


def _parquet_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    _check_pyarrow(path)
    from pyarrow import parquet  # type: ignore[import-untyped,unused-ignore]

    with open_data(path) as opened, parquet.ParquetFile(opened) as file:
        _check_once(file.schema_arrow.names)
        number = 0
        for batch in file.iter_batches(batch_size=1000):
            yield from enumerate(batch.to_pylist(), number + 1)
            number += batch.num_rows


def _arrow_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    _check_pyarrow(path)
    from pyarrow import ipc, memory_map

    with open_data(path) as file:
        is_stream = file.read(len(MAGIC)) != MAGIC
    with memory_map(str(path)) as source:
        number = 0
        reader = ipc.open_stream(source) if is_stream else ipc.open_file(source)
        _check_once(reader.schema.names)
        batches = reader if is_stream else (reader.get_batch(index) for index in range(reader.num_record_batches))
        for batch in batches:
            yield from enumerate(batch.to_pylist(), number + 1)
            number += batch.num_rows


def _folder_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    state = path / "state.json"
    if not state.is_file():
        splits = sorted(file.parent.name for file in path.glob("*/state.json"))
        help = f"name the folder of a split: `{short_path(path / splits[0])}`" if splits else "name a file with rows"
        raise Invalid(
            "files", f"{_quoted_path(path)} must be a folder that `datasets` wrote for a single split", help=help
        )
    with open_data(state) as text:
        names = [entry["filename"] for entry in parse_object(text.read(MAX_LINE))["_data_files"]]
    if outside := next((name for name in names if name != Path(name).name), None):
        raise ValueError(f"`state.json` must name files of the folder; got {quoted(outside)}")
    yield from enumerate((values for name in names for _, values in _arrow_rows(path / name)), 1)


def _check_pyarrow(path: Path) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        message = f"{_quoted_path(path)} cannot be read without pyarrow"
        raise Invalid("files", message, help='install it: pip install "tfkit[data]"') from error


_READERS = {
    ".jsonl": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
}
SUFFIXES = tuple(_READERS)
"""The suffixes of files with rows."""
