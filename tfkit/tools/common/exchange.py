"""Two names exchanged in one step, if the system can: neither is missing at any moment."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Any

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Constants of Linux: `man renameat2`."""
RENAME_SWAP = 2
"""The flag of macOS: `man renamex_np`."""
UNABLE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)
"""The errors of a kernel, a sandbox or a file system without such a call."""


def exchange(one: Path, other: Path) -> bool:
    """Exchange two files or folders of one file system; False if that is not possible, with nothing changed.

    Raises:
        OSError: one of them is missing, or may not be moved.
    """
    library: Any = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
    names = os.fsencode(one), os.fsencode(other)
    if hasattr(library, "renameat2"):
        failed = library.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE)
    elif hasattr(library, "renamex_np"):
        failed = library.renamex_np(*names, RENAME_SWAP)
    else:
        return False
    number = ctypes.get_errno() if failed else 0
    if failed and number not in UNABLE:
        raise OSError(number, os.strerror(number), str(one), None, str(other))
    return not failed
