"""Text that a plugin prints while it is loaded: it goes to standard error, so that results stay as they are."""

from __future__ import annotations

import io
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

_ONE_AT_A_TIME = threading.RLock()
"""Held while `sys.stdout` is another: two threads that put it back in the wrong order would leave it so."""


@contextmanager
def apart(plugin: str) -> Iterator[None]:
    """Redirect each line for standard output to standard error, with the plugin and the place."""
    lines = _Lines(plugin)
    with _ONE_AT_A_TIME, redirect_stdout(lines):
        try:
            yield
        finally:
            lines.end()


class _Lines(io.TextIOBase):
    def __init__(self, plugin: str) -> None:
        self._plugin = plugin
        self._line = ""

    def write(self, text: str) -> int:
        *whole, self._line = (self._line + text).split("\n")
        for line in whole:
            self._show(line)
        return len(text)

    def end(self) -> None:
        """Show a last line that was not ended."""
        if self._line:
            self._show(self._line)

    def _show(self, line: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
        print(f"plugin {self._plugin} prints: {line} ({frames[-1].filename}:{frames[-1].lineno})", file=sys.stderr)
