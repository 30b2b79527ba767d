"""Tokenize texts once, into a file of token ids that runs map into memory."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import click

from tfkit.commands import Reader, command, json_option, output_option, print_json, print_tables, progress_bar, table
from tfkit.errors import Diagnostic, Invalid, SpecError, quoted

if TYPE_CHECKING:
    from tfkit.run.contract import Tokenizer, TokenizerConfig

CHUNK = 2**18
"""Characters that a process tokenizes at once."""
MAX_TEXT = 64 * CHUNK
"""Characters after which a text without a line end is cut anywhere."""
HEADER = 128
"""Bytes of the header of the output."""


@command(
    "tokens",
    section="Training",
    order=260,
    sets=False,
    notes="""
    FILE is a text in UTF-8; or jsonl, csv, tsv, parquet, arrow or a folder that
    datasets wrote, with a text in each row. A text is tokenized in chunks that end
    at the end of a line. A run reads the result: data: {kind: tokens, files:
    corpus.npy}. Memory does not depend on the size of the texts.
    """,
    examples="""
    tfkit tokens book.txt --tokenizer tokenizer.json -o corpus.npy
    tfkit tokens *.jsonl --tokenizer FOLDER --separator '<|end|>' -o corpus.npy
    """,
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@output_option("FILE", "The file to write.", required=True, dir_okay=False)
@click.option("--tokenizer", required=True, metavar="PATH", help="A tokenizer file, a folder with one, or `bytes`.")
@click.option("--column", metavar="NAME", help="Column of the text in rows.  [default: text]")
@click.option("--separator", metavar="TOKEN", help="The token after each text; required for rows.")
@click.option("--processes", type=click.IntRange(1, 1024), metavar="N", help="Processes.  [default: one per core]")
@json_option
def tokens(
    reader: Reader,
    files: tuple[Path, ...],
    output: Path,
    tokenizer: str,
    column: str | None,
    separator: str | None,
    processes: int | None,
    json: bool,
) -> None:
    from tfkit.commands import check_file, fresh_file, writing

    if output.suffix != ".npy":
        raise click.BadParameter(f"`{output.name}` must end in .npy", param_hint="--output")
    rows = [path for path in files if _has_rows(path)]
    if rows and separator is None:
        raise click.BadParameter(
            f"it is missing: the texts in `{rows[0]}` need a token between them", param_hint="--separator"
        )
    if column is not None and not rows:
        raise click.BadParameter("it has no effect: no file has rows", param_hint="--column")
    check_file(output)
    built = _named_tokenizer(reader, tokenizer)
    end = None if separator is None else _id_of(separator, built)
    start = time.perf_counter()
    count = processes or os.cpu_count() or 1
    with progress_bar() as bar, writing(output), fresh_file(output) as path, path.open("wb") as file:
        written = write_tokens(file, files, built, end=end, column=column or "text", processes=count, on_chunk=bar)
    size, number = written
    seconds = time.perf_counter() - start
    if json:
        print_json({"file": str(output), "bytes": size, "tokens": number, "seconds": seconds})
        return
    lines = [
        ("bytes", f"{size:,}"),
        ("tokens", f"{number:,}"),
        ("bytes per token", f"{size / number:.2f}"),
        ("MB per second", f"{size / 1e6 / seconds:.1f}"),
    ]
    print_tables(table([str(output), ""], lines, right=[""]))


def _has_rows(path: Path) -> bool:
    from tfkit.run.read_rows import SUFFIXES

    return os.path.isdir(path) or path.suffix in SUFFIXES


def _named_tokenizer(reader: Reader, name: str) -> Tokenizer:
    """Build the tokenizer that the option names; raise SpecError if it cannot be read."""
    from tfkit.decoding.text import ByteTokenizer, load_tokenizer

    if name == "bytes":
        return cast("Tokenizer", ByteTokenizer())
    if not os.path.isdir(name):
        return cast("Tokenizer", load_tokenizer(Path(name)))
    kind = reader.plugins.registry.kinds("tokenizer")["pretrained"]
    try:
        return cast("TokenizerConfig", kind.config.model_validate({"path": name})).build("")
    except Invalid as error:
        raise SpecError(Diagnostic(error.message, notes=error.notes, help=error.help)) from error


def _id_of(separator: str, tokenizer: Tokenizer) -> int:
    from tfkit.run.contract import bare_ids

    try:
        ids = bare_ids(tokenizer, separator)
    except ValueError:
        ids = []
    if len(ids) != 1:
        raise SpecError(Diagnostic(f"{quoted(separator)} is not a token of the tokenizer"))
    return ids[0]


# ---- from texts to ids ----


@dataclass(frozen=True)
class TextChunk:
    """Texts of a file, in order."""

    path: Path
    texts: tuple[str, ...]
    complete: bool
    """True if the last text ends here."""


def write_tokens(
    file: BinaryIO,
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    end: int | None,
    column: str,
    processes: int,
    on_chunk: Callable[[int, int, str], None] = lambda done, of, words: None,
) -> tuple[int, int]:
    """Write the ids of all texts in the format of `numpy.save`; return the bytes of the texts, and the number of ids.

    Args:
        file: an empty file.
        paths: texts, and files with rows.
        tokenizer: text to ids; with several processes, it can be pickled.
        end: the id behind each text.
        column: the column of the text in rows.
        processes: the number of processes. The result does not depend on it.
        on_chunk: called with the bytes done, the bytes of all files, and a description.

    Raises:
        SpecError: a file cannot be read or tokenized, or there is no text.
    """
    dtype, itemsize = ("<u2", 2) if max(tokenizer.vocab_size, (end or 0) + 1) <= 2**16 else ("<u4", 4)
    file.write(b" " * HEADER)
    total, size, count = sum(path.stat().st_size for path in paths if os.path.isfile(path)), 0, 0
    with ExitStack() as stack:
        pool = stack.enter_context(_process_pool(processes, tokenizer, end, itemsize)) if processes > 1 else None
        encode = _Encoder(tokenizer, end, itemsize)
        for chunk, ids in _in_order(pool, processes, _file_chunks(paths, column), encode):
            file.write(ids)
            size += sum(len(text.encode()) for text in chunk.texts)
            count += len(ids) // itemsize
            on_chunk(size, max(total, size), f"{count:,} tokens")
    if not count:
        raise SpecError(Diagnostic("there is nothing to tokenize: the text is empty"))
    _write_header(file, dtype, count)
    return size, count


def _write_header(file: BinaryIO, dtype: str, count: int) -> None:
    import numpy as np

    file.seek(0)
    header: dict[str, Any] = {"descr": dtype, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)
    assert file.tell() == HEADER


class _Encoder:
    """Chunks to the bytes of their ids."""

    def __init__(self, tokenizer: Tokenizer, end: int | None, size: int) -> None:
        from tfkit.run.contract import bare_ids

        self._encode, self._end = partial(bare_ids, tokenizer), [] if end is None else [end]
        self._type = {2: "H", 4: "I"}[size]

    def __call__(self, chunk: TextChunk) -> bytes:
        ids: list[int] = []
        try:
            for number, text in enumerate(chunk.texts, 1):
                ids += self._encode(text)
                ids += self._end if chunk.complete or number < len(chunk.texts) else []
        except SpecError:  # names the tokenizer
            raise
        except ValueError as error:
            raise SpecError(Diagnostic(f"cannot tokenize {quoted(str(chunk.path))}: {error}")) from error
        numbers = array(self._type, ids)
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers.tobytes()


def _in_order(
    pool: Executor | None, processes: int, chunks: Iterator[TextChunk], encode: _Encoder
) -> Iterator[tuple[TextChunk, bytes]]:
    """Yield all chunks with their ids. With a pool, only a few chunks are in memory."""
    pending: deque[tuple[TextChunk, Future[bytes]]] = deque()
    for chunk in chunks:
        if pool is None:
            yield chunk, encode(chunk)
            continue
        pending.append((chunk, pool.submit(_encode_in_process, chunk)))
        if len(pending) > 2 * processes:
            first, future = pending.popleft()
            yield first, future.result()
    for chunk, future in pending:
        yield chunk, future.result()


def _process_pool(processes: int, *arguments: Any) -> ProcessPoolExecutor:
    from multiprocessing import get_context

    return ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=_start_process, initargs=(os.getpid(), *arguments)
    )


_encoders: list[_Encoder] = []
"""The encoder of this process, one of several."""


def _start_process(parent: int, *arguments: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoders.append(_Encoder(*arguments))
    threading.Thread(target=_end_with, args=[parent], daemon=True).start()


def _end_with(parent: int) -> None:
    # A killed parent does not end its pool.
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def _encode_in_process(chunk: TextChunk) -> bytes:
    return _encoders[0](chunk)


# ---- from files to texts ----


def _file_chunks(paths: Sequence[Path], column: str) -> Iterator[TextChunk]:
    for path in paths:
        try:
            yield from _row_chunks(path, column) if _has_rows(path) else _text_chunks(path)
        except Invalid as error:
            raise SpecError(Diagnostic(error.message, notes=error.notes, help=error.help)) from error
        except OSError as error:
            raise SpecError(Diagnostic(f"cannot read {quoted(str(path))}: {error.strerror}")) from error
        except UnicodeDecodeError as error:
            raise SpecError(Diagnostic(f"{quoted(str(path))} is not UTF-8")) from error


def _row_chunks(path: Path, column: str) -> Iterator[TextChunk]:
    from tfkit.run.read_rows import read_rows

    texts, size = [], 0
    for row in read_rows(path):
        texts.append(row.text(column))
        size += len(texts[-1])
        if size >= CHUNK:
            yield TextChunk(path, tuple(texts), complete=True)
            texts, size = [], 0
    if texts:
        yield TextChunk(path, tuple(texts), complete=True)


def _text_chunks(path: Path) -> Iterator[TextChunk]:
    from tfkit.run.read_rows import open_data

    text = ""
    with open_data(path) as data, TextIOWrapper(data, encoding="utf-8", newline="") as file:
        while block := file.read(CHUNK):
            text += block
            end = _line_end(text) or (len(text) if len(text) >= MAX_TEXT else 0)
            if end:
                yield TextChunk(path, (text[:end],), complete=False)
                text = text[end:]
    yield TextChunk(path, (text,), complete=True)


def _line_end(text: str) -> int:
    """Return the last start of a line at which tokens can begin; 0 if there is none.

    Tokenizers join white space, so a line end counts only between characters that are none.
    """
    location = text.rfind("\n", 1, -1)
    while location > 0 and (text[location - 1].isspace() or text[location + 1].isspace()):
        location = text.rfind("\n", 1, location)
    return location + 1 if location > 0 else 0
