"""The content of the files that a run depends on, as digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tfkit.component import Config, ContentMarker, marker
from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.spec.document import parts
from tfkit.spec.extending import shortest
from tfkit.spec.folder import model_folder
from tfkit.spec.weight_files import content_of


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
        files = [root] if root.is_file() else sorted(file for file in root.rglob("*") if file.is_file())
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
