"""A process with torch but without tfkit: files that run there run wherever torch is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torch

from tfkit.tools.eject import runner
from tfkit.tools.eject.runner import CODE, GIVEN, Given


class Alone:
    """Runs ejected files, one after the other, until its `with` block ends.

    The process imports torch while the caller goes on; a caller with many files passes one `Alone` to each `check`.
    """

    def __enter__(self) -> Alone:
        self._process = subprocess.Popen(
            [sys.executable, "-I", runner.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self._say([place for place in sys.path if place])
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # torch would take a second to exit
        with suppress(BrokenPipeError):
            self._process.communicate()

    def wrong(self, text: str, facts: Given, folder: Path) -> str | None:
        """Describe an error in a file; None if there is none. `folder` is empty, and takes files for the process."""
        (folder / CODE).write_text(text, encoding="utf-8")
        torch.save(facts, folder / GIVEN)
        self._say(str(folder))
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            return f"the process that ran it ended with status {self._process.wait()}"
        error: str | None = json.loads(line)
        return error

    def _say(self, what: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended, and there will be no answer
            print(json.dumps(what), file=self._process.stdin, flush=True)
