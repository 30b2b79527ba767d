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


class Asked:
    """True from the first signal on; `number` is that of the signal."""

    number: int | None = None

    def __call__(self) -> bool:
        return self.number is not None


@contextmanager
def asked_to_end() -> Iterator[Asked]:
    """Within, the first signal to end, or interrupt from the keyboard, is only noted; a second one ends at once."""
    asked = Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    numbers = [getattr(signal, name) for name in (*NAMES, "SIGINT") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) is not signal.SIG_IGN}

    def note(number: int, frame: FrameType | None) -> None:
        asked.number = number
        for one, handler in before.items():
            signal.signal(one, handler)

    for one in before:
        signal.signal(one, note)
    try:
        yield asked
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
