"""Files and folders that are written completely or not at all, however the process ends."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.tools.common.workshop import NEW, drop_extras, put, put_extras, sweep, workshop


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all; raises SpecError if it cannot be written."""
    data = content.encode() if isinstance(content, str) else content
    check_file(path)
    with writing(path):
        if _is_device(path):  # a device or a pipe is written to, not replaced
            path.write_bytes(data)
            return
        with fresh_file(path) as new:
            new.write_bytes(data)


@contextmanager
def writing(path: Path, other: type[Exception] = OSError) -> Iterator[None]:
    """Raise an error of the system, or `other`, in a block as a SpecError of the path that it writes to."""
    try:
        yield
    except (OSError, other) as error:
        raise _cannot_write(path, error) from error


@contextmanager
def fresh_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to. Its file replaces `path` on success; otherwise `path` is unchanged. Raises OSError.

    The target of a link is replaced, not the link. Additional files go to the folder `extras_of` the yielded path:
    the file must contain the folder's name, and the folder is removed once another file replaces this file.
    """
    place = _place(path)
    with workshop(place) as folder:
        yield folder / NEW / place.name
        _flush(folder / NEW)
        put_extras(folder, place)
        put(folder, place)
        drop_extras(folder, place)


@contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder that replaces `path` on success; otherwise `path` is unchanged. Raises OSError."""
    place = _place(path)
    missing = [parent for parent in place.parents if not parent.exists()]
    done = False
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with workshop(place) as folder:
            new = folder / NEW / place.name
            new.mkdir()
            yield new
            _flush(folder / NEW)
            put(folder, place)
            done = True
    finally:
        for parent in [] if done else missing:
            with suppress(OSError):
                parent.rmdir()


@contextmanager
def written_folder(path: Path, other: type[Exception] = OSError) -> Iterator[Path]:
    """Yield a new folder like `fresh_folder`, but raise SpecError as `writing` does."""
    with writing(path, other), fresh_folder(path) as new:
        yield new


def check_file(path: Path, *, device: bool = True) -> None:
    """Raise SpecError if a file cannot be written, before work is done for it; `device` allows pipes and devices."""
    place, shown = _place(path), quoted(str(path))
    if place.is_dir():
        raise SpecError(Diagnostic(f"{shown} is a folder", help="name a file in it"))
    if _is_device(path):
        if device:
            return
        raise SpecError(Diagnostic(f"{shown} is not a file, but a device or a pipe", help="name a file"))
    if not place.parent.is_dir():
        raise SpecError(Diagnostic(f"cannot write {shown}: its folder does not exist"))
    if not os.access(place.parent, os.W_OK | os.X_OK):
        raise _cannot_write(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def names_in(path: Path) -> list[str] | None:
    """Return the sorted names in a folder that is to be replaced; None if the folder does not exist yet.

    Raises SpecError for a file, and for a folder that cannot be read.
    """
    place = _place(path)
    with writing(path):
        sweep(place)
        if not place.exists():
            return None
        if not place.is_dir():
            raise SpecError(Diagnostic(f"{quoted(str(path))} is a file"))
        return sorted(os.listdir(place))


def _place(path: Path) -> Path:
    """Return the target of a path after all links. Raise SpecError if it cannot be resolved."""
    try:
        os.stat(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # a loop of links, a name that is too long or has a zero byte
        raise _cannot_write(path, error) from error
    return Path(os.path.realpath(path))


def _is_device(path: Path) -> bool:
    """Return True for a pipe or a device."""
    return path.exists() and not stat.S_ISREG(path.stat().st_mode) and not path.is_dir()


def _flush(folder: Path) -> None:
    """Write all files and folders to the disk: a rename must not precede the data that it renames."""
    for path in [folder, *folder.rglob("*")]:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _cannot_write(path: Path, error: Exception) -> SpecError:
    cause = getattr(error, "strerror", None) or str(error)
    return SpecError(Diagnostic(f"cannot write {quoted(str(path))}: {cause}"))
