"""From the text of a spec to a tree in which every value has a location.

The text is a file (`read`), a string (`parse`), or a `--set` argument (`parse_value`).
"""

from __future__ import annotations

import codecs
import errno
import os
import re
import stat
from functools import lru_cache
from pathlib import Path
from typing import Any

from tfkit.errors import Diagnostic, Source, SpecError, closest_name, quoted
from tfkit.spec import syntax
from tfkit.spec.tree import Mapping, Node, Scalar, Sequence, compose_tree

__all__ = [
    "MAX_BYTES",
    "Mapping",
    "Node",
    "Scalar",
    "Sequence",
    "file_bytes",
    "parse",
    "parse_value",
    "plain_data",
    "read",
]

MAX_BYTES = 1 << 20

# Characters that YAML forbids, line breaks that editors do not count as line breaks, and byte order marks.
UNWELCOME = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


def read(path: str | os.PathLike[str], *, name: str | None = None) -> Mapping:
    """Read the tree of a spec file. Errors call the file `name`, by default its path.

    Raises SpecError with every error in the spec, and for a file that cannot be read.
    """
    name = os.fspath(path) if name is None else name
    try:
        data = file_bytes(path, MAX_BYTES)
    except (OSError, ValueError) as error:  # ValueError: the path contains a zero byte
        raise SpecError(_read_error(path, name, error)) from None
    return parse(_decoded_text(data, name), name)


@lru_cache(maxsize=1024)  # all shipped specs and families: many share their bases
def parse(text: str, name: str) -> Mapping:
    """Parse the text of a spec. Raises SpecError with every error in it."""
    source = Source(name, text.removeprefix("\ufeff"))
    node = _compose_printable(source, 0)
    if isinstance(node, Mapping):
        return node
    if node is None or (isinstance(node, Scalar) and node.value is None):
        raise SpecError(Diagnostic("the file is empty", source.span(0), help="start it with `tfkit: 1`"))
    word = str(node.value) if isinstance(node, Scalar) else ""
    message = "the file must be a mapping: lines of `key: value`"
    note = f"found {quoted(word)}" if isinstance(node, Scalar) else "found a list"
    raise SpecError(Diagnostic(message, node.span, notes=(note,), help=syntax.missing_space(word)))


def parse_value(source: Source, start: int) -> Node:
    """Parse the single value in `source.text[start:]`, which follows `=` in a `--set` argument.

    Locations refer to the full source. Empty text is null, as after a key in a file. Raises SpecError.
    """
    node = _compose_printable(source, start)
    if node is None and source.text[start:].strip():
        comment = source.span(start, len(source.text))
        raise SpecError(Diagnostic("this is only a comment", comment, help="quote text that starts with `#`"))
    return Scalar(None, source.span(start)) if node is None else node


def plain_data(node: Node) -> Any:
    """Convert a tree to plain Python data: dict, list, str, int, float, bool, None."""
    if isinstance(node, Mapping):
        return {key: plain_data(value) for key, value in node.items.items()}
    if isinstance(node, Sequence):
        return [plain_data(item) for item in node.items]
    return node.value


def _compose_printable(source: Source, start: int) -> Node | None:
    unwelcome = UNWELCOME.search(source.text)
    if unwelcome:
        char = f"U+{ord(unwelcome[0]):04X}"
        raise SpecError(
            Diagnostic(
                f"an unprintable character: {char}",
                source.span(unwelcome.start()),
                help='remove it, or write it in double quotes as an escape, such as "\\u0007"',
            )
        )
    return compose_tree(source, start)


def file_bytes(path: str | os.PathLike[str], limit: int | None = None) -> bytes:
    """Return the bytes of a file or a pipe. A pipe without a writer is empty.

    Raises:
        OSError: the file cannot be read, or has more than `limit` bytes; or it is a device, which may be endless, and
            there is no limit.
        ValueError: the path contains a zero byte.
    """
    # Without O_NONBLOCK, opening a pipe blocks until it has a writer.
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        info = os.fstat(number)
        if stat.S_ISDIR(info.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if limit is None and not (stat.S_ISREG(info.st_mode) or stat.S_ISFIFO(info.st_mode)):
            raise OSError(errno.EINVAL, "it is a device, not a file")
        if limit is not None and info.st_size > limit:
            raise _too_large(limit)
        if hasattr(os, "O_NONBLOCK"):
            os.set_blocking(number, True)  # reading must wait for the writer
        with open(number, "rb", closefd=False) as file:
            data = file.read() if limit is None else file.read(limit + 1)  # a pipe has no size to check in advance
    except MemoryError:
        raise OSError(errno.ENOMEM, f"it does not fit in memory: it has {info.st_size:,} bytes") from None
    finally:
        os.close(number)
    if limit is not None and len(data) > limit:
        raise _too_large(limit)
    return data


def _too_large(limit: int) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than {limit >> 20} MiB; no spec is that large")


def _read_error(path: str | os.PathLike[str], name: str, error: OSError | ValueError) -> Diagnostic:
    if isinstance(error, FileNotFoundError):
        return Diagnostic(f"cannot read `{name}`: there is no such file", help=_sibling_help(Path(path)))
    if isinstance(error, IsADirectoryError):
        return Diagnostic(f"cannot read `{name}`: it is a directory")
    if isinstance(error, PermissionError):
        return Diagnostic(f"cannot read `{name}`: permission denied")
    return Diagnostic(f"cannot read `{name}`: {getattr(error, 'strerror', None) or error}")


def _sibling_help(path: Path) -> str | None:
    try:
        near = closest_name(path.name, sorted(file.name for file in path.parent.iterdir()))
    except OSError:
        return None
    return f"a file with a similar name exists: `{path.parent / near}`" if near else None


def _decoded_text(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        source = Source(name, data.decode(errors="backslashreplace"))
        start = len(data[: error.start].decode())
        diagnostic = Diagnostic(
            f"the file is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}",
            source.span(start, start + len(r"\xff")),
            notes=("it begins like UTF-16",) if wide else (),
            help="save it as UTF-8",
        )
    raise SpecError(diagnostic)
