"""Signals that end a process as exceptions, so that unfinished files are removed before it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NAMES = ("SIGTERM", "SIGHUP")


class Ended(KeyboardInterrupt):
    """The process was told to end; `number` is that of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def ending() -> Iterator[None]:
    """Within, a signal to end raises `Ended`, once; one that is handled or ignored (`nohup`) is left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    every = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
    ours = [one for one in every if signal.getsignal(one) is signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> None:
        for one in ours:
            signal.signal(one, signal.SIG_IGN)
        raise Ended(number)

    for one in ours:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one in ours:
            signal.signal(one, signal.SIG_DFL)
