"""Signals that end a process as exceptions, so that unfinished files are removed before it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NAMES = ("SIGTERM", "SIGHUP")


class Ended(KeyboardInterrupt):
    """A signal asked the process to end; `number` is the signal number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def end_on_signal() -> Iterator[None]:
    """Raise `Ended` at the first signal to end. Signals that are already handled or ignored (`nohup`) do not change."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
    ours = [caught for caught in numbers if signal.getsignal(caught) is signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> None:
        for caught in ours:
            signal.signal(caught, signal.SIG_IGN)
        raise Ended(number)

    for caught in ours:
        signal.signal(caught, end)
    try:
        yield
    finally:
        for caught in ours:
            signal.signal(caught, signal.SIG_DFL)


class EndRequest:
    """A callable that returns True from the first signal on; `number` is the signal number."""

    number: int | None = None

    def __call__(self) -> bool:
        return self.number is not None


@contextmanager
def asked_to_end() -> Iterator[EndRequest]:
    """Record the first signal to end or keyboard interrupt. A second signal ends the process immediately."""
    request = EndRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    numbers = [getattr(signal, name) for name in (*NAMES, "SIGINT") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) is not signal.SIG_IGN}

    def note(number: int, frame: FrameType | None) -> None:
        request.number = number
        for caught, handler in before.items():
            signal.signal(caught, handler)

    for caught in before:
        signal.signal(caught, note)
    try:
        yield request
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
