"""A process that answers one request at a time, so that contenders in several environments can take turns.

Requests and answers are lines of JSON. Each environment has a separate interpreter. The worker measures the time, so
the cost of other processes and of the pipe is not included.

Workers keep the memory that they have freed. By default, glibc returns large blocks to the kernel immediately: the
kernel then spends a tenth of a training step on clearing pages, whose number depends on the history of the heap.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from measure import ROOT, environment
from peers import FILES

Answer = dict[str, Any]
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


class Worker:
    """The coordinator's end of a worker: starts `command`, whose process calls `serve`.

    Raise `RuntimeError` with the last line of the process's standard error if it fails.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            env={**environment(), **KEEP_MEMORY},
            cwd=ROOT,
        )

    def ask(self, what: str, **details: object) -> Answer:
        """Send one request and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"what": what, **details}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        status = self._process.wait()
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit status {status}"

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        self._complaints.close()


def serve(answer: Callable[[str, Answer], Answer]) -> None:
    """Answer each request until the coordinator closes the pipe: the worker's end.

    Output of libraries is redirected to standard error.
    """
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)
        for line in sys.stdin:
            request = json.loads(line)
            print(json.dumps(answer(request.pop("what"), request)), file=replies, flush=True)


def interpreter(text: str) -> tuple[str, str]:
    """Parse the NAME=PATH of `--python`."""
    name, _, path = text.partition("=")
    if name not in FILES or not path:
        raise argparse.ArgumentTypeError(f"write NAME=PATH with one of {', '.join(FILES)}")
    if not (program := shutil.which(path)):
        raise argparse.ArgumentTypeError(f"no program {path}")
    return name, os.path.abspath(program)  # not resolved: Python finds its environment through the link
