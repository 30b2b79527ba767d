"""Files and folders that are written as a whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tfkit.errors import Diagnostic, SpecError, quoted


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file, all of it or nothing; raises SpecError when it cannot be written."""
    data = content.encode() if isinstance(content, str) else content
    place = path.resolve()
    new = place.with_name(f".{place.name}.{secrets.token_hex(4)}.new")
    try:
        if place.exists() and not place.is_file():  # a pipe or a device takes it and stays what it is
            place.write_bytes(data)
        else:
            new.write_bytes(data)
            new.replace(place)
    except OSError as error:
        raise SpecError(Diagnostic(f"cannot write {quoted(str(path))}: {error.strerror or error}")) from error
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def fresh_folder(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, which takes its place when all went well; otherwise `folder` is as it was."""
    folder = folder.resolve()
    mark = secrets.token_hex(4)
    new, old = (folder.parent / f".{folder.name}.{mark}.{end}" for end in ("new", "old"))
    missing = [parent for parent in folder.parents if not parent.exists()]
    done = False
    try:
        new.mkdir(parents=True)
        yield new
        _flush(new)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        done = True
    finally:
        if not done and old.exists():
            old.rename(folder)
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
        for parent in [] if done else missing:
            if parent.exists():
                parent.rmdir()


def _flush(folder: Path) -> None:
    """Wait until the files are on the disk: a rename must not come before what it renames."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
