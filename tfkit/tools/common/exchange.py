"""Exchanges two names in one step, if the system supports it: neither is missing at any moment."""

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


def exchange(first: Path, second: Path) -> bool:
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
