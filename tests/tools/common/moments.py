"""States of a folder before each system call that changes a file: what a killed process can leave behind.

Of a killed process nothing runs any more, so that nothing is lost by going on instead: one run shows all moments.
"""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tfkit.tools.common import atomic_files

State = dict[str, bytes | None]
"""Of each path below a folder its bytes; None for a folder."""
CALLS = [(os, name) for name in ("open", "fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "remove")]
CALLS += [(io, "open"), (builtins, "open"), (atomic_files, "exchange_paths")]


def state_of(folder: Path) -> State:
    """What is in a folder."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def restored(state: State, folder: Path) -> Path:
    """A new folder in which all is as it was."""
    folder.mkdir()
    for name, content in state.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
    return folder


@contextmanager
def moments(folder: Path) -> Iterator[list[State]]:
    """All states that a folder has while the block runs, without repetitions in a row, the last one after it."""
    result: list[State] = []
    busy = False

    def look() -> None:
        nonlocal busy
        if not busy:
            busy = True
            state = state_of(folder)
            if not result or result[-1] != state:
                result.append(state)
            busy = False

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if "dir_fd" in kwargs or not isinstance(args[0], str | Path) or str(args[0]).startswith(str(folder)):
                look()
            return call(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in CALLS:
            patch.setattr(owner, name, watched(getattr(owner, name)))
        yield result
    look()
