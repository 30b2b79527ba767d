"""The content of files as a digest. Safetensors with equal tensors are equal, however the tensors lie in files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from tfkit.component import Config, ContentMarker, marker
from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.spec.extending import shortest
from tfkit.spec.folder import INDEX, WEIGHTS, model_folder
from tfkit.spec.parts import parts

CHUNK = 2**20
DESCRIPTION = "__metadata__"


def content_paths(start: tuple[str, ...], root: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each path whose content counts in a config, with its place below `start`."""
    for place, part in parts(start, root):
        for name, field in type(part).model_fields.items() if isinstance(part, Config) else ():
            if marker(field, ContentMarker) is not None:
                inside = parts((*place, name), getattr(part, name))
                yield from ((path, value) for path, value in inside if isinstance(value, str))


def files_content(path: Path) -> str:
    """Return 64 hexadecimal digits for the content of a file, or of all files in a folder; raise SpecError.

    The folder of a run stands for its latest checkpoint.
    """
    root = model_folder(path)
    try:
        files = [root] if root.is_file() else sorted(one for one in root.rglob("*") if one.is_file())
        if not files:
            raise FileNotFoundError(0, "the folder has no files" if root.is_dir() else "there is no such file")
        names = [(str(file.relative_to(root)), file, file.stat()) for file in files]
        digests = [(name, _file_content(file, stat.st_size, stat.st_mtime_ns)) for name, file, stat in names]
    except OSError as error:
        raise SpecError(Diagnostic(f"cannot read {quoted(str(shortest(path)))}: {error.strerror}")) from error
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


@cache  # a sweep has many runs with one teacher
def _file_content(path: Path, size: int, modified: int) -> str:
    """Return the digest of a file; its size and time of modification are keys of the cache."""
    if path.suffix == ".safetensors":
        return content_of(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_of(path: Path) -> str:
    """64 hexadecimal digits for the tensors of a file, a folder, or a run's latest checkpoint; raises SpecError."""
    digest = hashlib.sha256()
    try:
        found = {name: (file, about) for file in _files(path) for name, about in _header(file).items()}
        for name, (file, about) in sorted(found.items()):
            digest.update(json.dumps([name, about["dtype"], about["shape"]]).encode())
            with file.open("rb") as opened:
                for chunk in _data(opened, *about["data_offsets"]):
                    digest.update(chunk)
    except (OSError, ValueError, TypeError, KeyError) as error:
        cause = getattr(error, "strerror", None) or "it is not safetensors"
        raise SpecError(Diagnostic(f"cannot read the weights {quoted(str(shortest(path)))}: {cause}")) from error
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    path = model_folder(path)
    if path.is_dir():
        path /= WEIGHTS if (path / WEIGHTS).exists() or not (path / INDEX).exists() else INDEX
    if not path.name.endswith(".index.json"):
        return [path]
    places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    return [path.parent / name for name in sorted(set(places.values()))]


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError("the header is longer than the file")
        tensors: dict[str, Any] = json.loads(opened.read(length))
    return {name: about for name, about in tensors.items() if name != DESCRIPTION}


def _data(opened: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """The bytes of a tensor; its offsets count from the end of the header."""
    length = int.from_bytes(opened.read(8), "little")
    opened.seek(8 + length + start)
    left = end - start
    while left > 0:
        chunk = opened.read(min(left, CHUNK))
        if not chunk:
            raise ValueError("the file ends too early")
        left -= len(chunk)
        yield chunk
