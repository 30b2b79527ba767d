"""Files and folders that are written completely or not at all, however the process ends.

New contents are written to a hidden staging folder next to the target, `.NAME.MARK.new`. Its file `lock` is locked
while the process lives; the system releases the lock however the process ends. Its folder `new` holds the new contents
under their final name, and its folder `old` the former contents of the target. The next process that writes to the same
target removes the leftover files of a killed process.

A path that a user names is resolved: the target of a link is replaced, not the link. Names that tfkit chooses, in the
folder `inside` of a run or a sweep, must not be links: the folder may come from a stranger, whose links would lead
outside.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tfkit.errors import Diagnostic, SpecError, quoted


def write_file(path: Path, content: str | bytes, *, inside: Path | None = None) -> None:
    """Write a file completely or not at all; raises SpecError if it cannot be written.

    With `inside`, the names of the path below that folder must not be links.
    """
    data = content.encode() if isinstance(content, str) else content
    if inside is not None:
        check_inside(path, inside)
    check_file(path)
    with writing(path):
        if _is_device(path):  # a device or a pipe is written to, not replaced
            path.write_bytes(data)
            return
        with fresh_file(path) as new:
            new.write_bytes(data)


@contextmanager
def writing(path: Path, other: type[Exception] = OSError) -> Iterator[None]:
    """Convert an OSError, or the exceptions `other`, to a SpecError that names the path."""
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
    location = _resolved_target(path)
    with staging_folder(location) as folder:
        yield folder / NEW_NAME / location.name
        _flush_folder(folder / NEW_NAME)
        put_extras(folder, location)
        move_to_target(folder, location)
        drop_extras(folder, location)


@contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder that replaces `path` on success; otherwise `path` is unchanged. Raises OSError."""
    location = _resolved_target(path)
    missing = [parent for parent in location.parents if not parent.exists()]
    done = False
    try:
        location.parent.mkdir(parents=True, exist_ok=True)
        with staging_folder(location) as folder:
            new = folder / NEW_NAME / location.name
            new.mkdir()
            yield new
            _flush_folder(folder / NEW_NAME)
            move_to_target(folder, location)
            done = True
    finally:
        for parent in [] if done else missing:
            with suppress(OSError):
                parent.rmdir()


@contextmanager
def written_folder(path: Path, other: type[Exception] = OSError, *, inside: Path | None = None) -> Iterator[Path]:
    """Yield a new folder like `fresh_folder`, but raise SpecError as `writing` does.

    With `inside`, the names of the path below that folder must not be links.
    """
    if inside is not None:
        check_inside(path, inside)
    with writing(path, other), fresh_folder(path) as new:
        yield new


def create_folder(path: Path, *, inside: Path) -> None:
    """Create a folder and its missing parents. Raise SpecError if a name below the folder `inside` is a link."""
    check_inside(path, inside)
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def check_inside(path: Path, inside: Path) -> None:
    """Raise SpecError if one of the names of a path below the folder `inside` is a link, a device or a pipe."""
    names = path.relative_to(inside).parts
    for number in range(len(names)):
        part = inside.joinpath(*names[: number + 1])
        with writing(part), suppress(FileNotFoundError):
            _check_plain(part, os.lstat(part).st_mode)


def check_entries(folder: Path) -> None:
    """Raise SpecError if a folder that tfkit wrote has a device, a pipe, or a link to anything outside the folder.

    Names that begin with a dot are ignored: editors create links with such names.
    """
    with writing(folder):
        root = os.path.realpath(folder)
        for path in sorted(folder.iterdir()):
            if path.name.startswith(".") or (path.is_symlink() and _resolved_target(path).is_relative_to(root)):
                continue
            _check_plain(path, os.lstat(path).st_mode)


def _check_plain(path: Path, mode: int) -> None:
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return
    kind = f"a link to {quoted(os.readlink(path))}" if stat.S_ISLNK(mode) else "a device or a pipe"
    message = f"{quoted(str(path))} must be a file or a folder that tfkit wrote; got {kind}"
    raise SpecError(Diagnostic(message, help="remove it, or name a different folder with -o"))


def check_file(path: Path, *, device: bool = True) -> None:
    """Raise SpecError if a file cannot be written, before its contents are computed; `device` allows devices."""
    location, path_text = _resolved_target(path), quoted(str(path))
    if location.is_dir():
        raise SpecError(Diagnostic(f"{path_text} is a folder", help="name a file in it"))
    if _is_device(path):
        if device:
            return
        raise SpecError(Diagnostic(f"{path_text} is not a file, but a device or a pipe", help="name a file"))
    if not location.parent.is_dir():
        raise SpecError(Diagnostic(f"cannot write {path_text}: its folder does not exist"))
    if not os.access(location.parent, os.W_OK | os.X_OK):
        raise _cannot_write(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def names_in(path: Path) -> list[str] | None:
    """Return the sorted names in a folder that is to be replaced; None if the folder does not exist yet.

    Raise SpecError for a file, and for a folder that cannot be read.
    """
    location = _resolved_target(path)
    with writing(path):
        remove_leftover_folders(location)
        if not location.exists():
            return None
        if not location.is_dir():
            raise SpecError(Diagnostic(f"{quoted(str(path))} is a file"))
        return sorted(os.listdir(location))


def _resolved_target(path: Path) -> Path:
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


def _flush_folder(folder: Path) -> None:
    """Write all files and folders to the disk, because a rename must not be stored before the data."""
    for path in [folder, *folder.rglob("*")]:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _cannot_write(path: Path, error: Exception) -> SpecError:
    cause = getattr(error, "strerror", None) or str(error)
    return SpecError(Diagnostic(f"cannot write {quoted(str(path))}: {cause}"))


# ---- a target and its staging folder ----


LOCK_NAME, NEW_NAME, OLD_NAME = "lock", "new", "old"
MARK = "[0-9a-f]{8}"
MAX_NAME = 56
"""Maximum characters of a target's name in the name of its staging folder, which must fit the system's limit."""


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """Create a staging folder for the contents of `target`, with an empty folder `new`; remove it afterwards.

    Raise OSError if it cannot be created.
    """
    remove_leftover_folders(target)
    folder, lock = _create_locked_folder(target)
    try:
        (folder / NEW_NAME).mkdir()
        yield folder
    finally:
        _finish_staging(folder, lock)


def remove_leftover_folders(target: Path) -> None:
    """Remove the staging folders of dead processes. Contents that they had moved away are first moved back."""
    for folder in _sibling_folders(target, rf"\.{re.escape(target.name[:MAX_NAME])}\.{MARK}\.new"):
        if (lock := _lock_dead_folder(folder)) is not None:
            with suppress(OSError):
                _finish_staging(folder, lock)


def move_to_target(folder: Path, target: Path) -> None:
    """Move the contents of a staging folder to their target, which always has complete contents, old or new.

    If the system cannot exchange folders in one step, the target is missing for a moment: its old folder is then in the
    staging folder.
    """
    new = folder / NEW_NAME / target.name
    try:
        new.replace(target)
        return
    except OSError:  # a folder cannot replace a folder with contents
        if not new.is_dir() or not target.is_dir():
            raise
    if not exchange_paths(new, target):
        (folder / OLD_NAME).mkdir()
        target.rename(folder / OLD_NAME / target.name)
        new.rename(target)


# ---- additional files of a target: a folder `NAME.parts-MARK`, whose name the file NAME contains ----


def extras_of(new: Path) -> Path:
    """Return a folder, with a new unique name, for the additional files of a target that is written at `new`."""
    return new.with_name(f"{new.name}.parts-{new.parent.parent.name.split('.')[-2]}")


def put_extras(folder: Path, target: Path) -> None:
    """Move the additional files of a staging folder next to their target, before the file that names them."""
    for part in (folder / NEW_NAME).iterdir():
        if part.name != target.name:
            part.rename(target.with_name(part.name))


def drop_extras(folder: Path, target: Path) -> None:
    """Remove the additional files that the target does not name and that no living process needs.

    Living processes are determined first: if a process ends between the two checks, the target names its files.
    """
    dead = [
        part
        for part in _sibling_folders(target, rf"{re.escape(target.name)}\.parts-{MARK}")
        if not _is_alive(part, target)
    ]
    for part in dead:
        if not _has_name(target, part.name):
            with suppress(FileNotFoundError):  # another process removes it as well
                part.rename(folder / NEW_NAME / part.name)


def _is_alive(part: Path, target: Path) -> bool:
    maker = _staging_path(target, part.name[-8:])
    if not maker.is_dir() or (lock := _lock_dead_folder(maker)) is None:
        return maker.is_dir()
    os.close(lock)
    return False


def _has_name(target: Path, name: str) -> bool:
    """Return True if a file contains a name."""
    try:
        with target.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(name.encode()) >= 0
    except (ValueError, FileNotFoundError):  # the file is empty, or was removed
        return False


# ---- the staging folder ----


def _staging_path(target: Path, mark: str) -> Path:
    return target.with_name(f".{target.name[:MAX_NAME]}.{mark}.new")


def _sibling_folders(target: Path, pattern: str) -> list[Path]:
    """Return the folders next to `target` whose names match a pattern."""
    with suppress(OSError), os.scandir(target.parent) as entries:
        return [
            Path(entry)
            for entry in entries
            if re.fullmatch(pattern, entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    return []


def _create_locked_folder(target: Path) -> tuple[Path, int]:
    """Create a staging folder; return it and its lock."""
    while True:
        folder = _staging_path(target, secrets.token_hex(4))
        folder.mkdir()
        try:
            lock = os.open(folder / LOCK_NAME, os.O_CREAT | os.O_RDWR)
        except FileNotFoundError:  # another process removed it as the folder of a dead process
            continue
        except BaseException:
            folder.rmdir()
            raise
        with suppress(OSError):
            if not try_lock(lock):
                os.close(lock)
                continue
        return folder, lock


def _lock_dead_folder(folder: Path) -> int | None:
    """Lock a staging folder whose process is dead, and return the lock.

    Return None if the process lives, or if that is unknown.
    """
    try:
        lock = os.open(folder / LOCK_NAME, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        with suppress(OSError):  # the folder has no contents yet, or no longer has any
            folder.rmdir()
        return None
    except OSError:
        return None
    with suppress(OSError):
        if try_lock(lock):
            return lock
    os.close(lock)
    return None


def try_lock(lock: int) -> bool:
    """Lock a file, and return True if this process now holds the lock.

    Raise OSError if the file system has no locks.
    """
    if sys.platform == "win32":
        raise OSError
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(lock).st_nlink > 0


def _finish_staging(folder: Path, lock: int) -> None:
    try:
        _restore_contents(folder)
        _remove_folder(folder)
    finally:
        os.close(lock)


def _restore_contents(folder: Path) -> None:
    """Move back all contents that were moved away and were not replaced."""
    if (folder / OLD_NAME).is_symlink():  # tfkit creates no such link: the contents of its target stay there
        return
    with suppress(FileNotFoundError):
        for old in (folder / OLD_NAME).iterdir():
            if not os.path.lexists(location := folder.with_name(old.name)):
                old.rename(location)


def _remove_folder(folder: Path) -> None:
    """Remove a staging folder, its lock last: if the process is killed here, the next write can still remove it."""
    for part in (NEW_NAME, OLD_NAME):
        shutil.rmtree(folder / part, ignore_errors=True)
    if not any((folder / part).exists() for part in (NEW_NAME, OLD_NAME)):
        with suppress(OSError):
            (folder / LOCK_NAME).unlink()
            folder.rmdir()


AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Constants of Linux: `man renameat2`."""
RENAME_SWAP = 2
"""The flag of macOS: `man renamex_np`."""
UNABLE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)
"""Error codes of a kernel, a sandbox or a file system that does not support the exchange."""


def exchange_paths(first: Path, second: Path) -> bool:
    """Exchange two files or folders of a file system. Return False if that is not supported; nothing has then changed.

    Raises:
        OSError: a file is missing, or may not be moved.
    """
    library: Any = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
    names = os.fsencode(first), os.fsencode(second)
    if hasattr(library, "renameat2"):
        failed = library.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE)
    elif hasattr(library, "renamex_np"):
        failed = library.renamex_np(*names, RENAME_SWAP)
    else:
        return False
    number = ctypes.get_errno() if failed else 0
    if failed and number not in UNABLE:
        raise OSError(number, os.strerror(number), str(first), None, str(second))
    return not failed
