"""A program in a separate process that cannot import tfkit, to test that written files do not need tfkit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self


class Isolated:
    """Sends requests to a program, one after the other, until its `with` block ends.

    The process imports its libraries while the caller continues. Use a single `Isolated` for several requests.

    Args:
        program: a Python file that reads lines of JSON: first the folders of Python's import path, then requests. It
            writes a line for each request.
        environment: environment variables in addition to the environment of this process.
    """

    def __init__(self, program: str, environment: Mapping[str, str] | None = None) -> None:
        self.program = program
        self.environment = {**os.environ, **(environment or {})}

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-I", self.program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=self.environment,
        )
        self._send([folder for folder in sys.path if folder])
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # torch would take a second to exit
        with suppress(BrokenPipeError):
            self._process.communicate()

    def kill(self) -> None:
        """End the process, also while it computes an answer."""
        self._process.kill()

    def answer(self, request: object) -> Any:
        """Return the answer to a request, or a text that describes how the process ended."""
        self._send(request)
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            return f"the process that ran it ended with status {self._process.wait()}"
        return json.loads(line)

    def _send(self, contents: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended, and there will be no answer
            print(json.dumps(contents), file=self._process.stdin, flush=True)
