"""The content of safetensors as a digest: equal for equal tensors, however they lie in files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.spec.extending import shortest
from tfkit.spec.folder import INDEX, WEIGHTS, model_folder

CHUNK = 2**20
DESCRIPTION = "__metadata__"


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
