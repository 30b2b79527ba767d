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


class _LinkedText:
    """A text in `linecache`: each of its globals refers to it."""


_SOURCES: weakref.WeakValueDictionary[str, _LinkedText] = weakref.WeakValueDictionary()
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
            source = _SOURCES[file] = _LinkedText()
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


def _folder() -> str | None:
    """Return the folder of the files, None if the home folder of the user is unknown. Relative paths are ignored."""
    caches = os.environ.get(CACHE, ""), os.path.join(os.environ.get("XDG_CACHE_HOME", ""), "tfkit"), "~/.cache/tfkit"
    folders = [os.path.join(os.path.expanduser(cache), "code") for cache in caches]
    return next((folder for folder in folders if os.path.isabs(folder)), None)


def _write(data: bytes, name: str) -> str | None:
    """Write a file unless it exists with these contents, and return its path; None if it cannot be written."""
    if (folder := _folder()) is None:
        return None
    path = os.path.join(folder, name)
    temporary = f"{path}.{os.getpid()}.{threading.get_ident()}"
    try:
        with suppress(FileNotFoundError), open(path, "rb") as stream:
            if stream.read() == data:
                return path
        os.makedirs(folder, exist_ok=True)
        with open(temporary, "xb") as stream:
            stream.write(data)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        return None
    return path
