"""A limit of time and memory for the rejection of absurd inputs."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

MAX_SECONDS = 5.0
"""Seconds. Half of one is usual, two on a busy machine; what is read as a whole takes minutes."""


@contextmanager
def cheaply() -> Iterator[None]:
    """Fail after more CPU time of this thread, without that of searching for garbage."""
    gc.disable()
    start = time.thread_time()
    try:
        yield
        assert time.thread_time() - start < MAX_SECONDS
    finally:
        gc.enable()
