"""Generated code as files: tracebacks, debuggers and tools for coverage read the lines of code from a file.

The name of a file contains the digest of its text, so equal code of all models and processes is one file. tfkit runs
the text that it has just generated, and never a file.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import re
import threading
import weakref
from contextlib import suppress
from typing import Any

CACHE = "TFKIT_CACHE"
"""The environment variable with the folder of caches."""


class _Source:
    """A text in `linecache`: each of its globals refers to it."""


_SOURCES: weakref.WeakValueDictionary[str, _Source] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


def run_text(text: str, name: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a text and return its globals, `names`. Debuggers, TorchScript and tracebacks find the text by its file.

    If the file cannot be written, they find the text as long as globals of an equal text exist.
    """
    data = text.encode()
    digest = hashlib.sha256(data).hexdigest()[:12]
    file = _write(data, f"{re.sub('[^0-9A-Za-z]+', '_', name)[:80]}_{digest}.py") or f"<tfkit {name} {digest}>"
    with _LOCK:
        if (source := _SOURCES.get(file)) is None:
            source = _SOURCES[file] = _Source()
            weakref.finalize(source, _forget, file)
        # TorchScript compiles this text, even if someone has changed or removed the file in the meantime.
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names |= {"__tfkit_source__": source, "__file__": file}  # Python's module `trace` reads `__file__`
    exec(compile(text, file, "exec", dont_inherit=True), names)
    return names


def _forget(file: str) -> None:
    """Remove a text whose globals are gone, unless an equal text was run in the meantime."""
    if file not in _SOURCES:
        linecache.cache.pop(file, None)


def _folder() -> str:
    """Return the folder of the files: an absolute path, unless nothing defines the home folder of the user."""
    if folder := os.environ.get(CACHE):
        return os.path.abspath(os.path.join(os.path.expanduser(folder), "code"))
    caches = os.environ.get("XDG_CACHE_HOME", "")
    # By the XDG specification, a relative path is ignored.
    return os.path.join(caches if os.path.isabs(caches) else os.path.expanduser("~/.cache"), "tfkit", "code")


def _write(data: bytes, name: str) -> str | None:
    """Write a file unless it exists with these contents, and return its path; None if it cannot be written."""
    if not os.path.isabs(folder := _folder()):
        return None
    path = os.path.join(folder, name)
    temporary = f"{path}.{os.getpid()}.{threading.get_ident()}"
    try:
        if _contents(path) != data:
            os.makedirs(folder, exist_ok=True)
            with open(temporary, "xb") as stream:
                stream.write(data)
            os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        return None
    return path


def _contents(path: str) -> bytes | None:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except FileNotFoundError:
        return None
