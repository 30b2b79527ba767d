"""That something absurd is refused without much work."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cheaply(seconds: float) -> Iterator[None]:
    """Fail after more CPU time of this thread; what other tests left in memory is not searched for garbage."""
    gc.freeze()
    start = time.thread_time()
    try:
        yield
        assert time.thread_time() - start < seconds
    finally:
        gc.unfreeze()
