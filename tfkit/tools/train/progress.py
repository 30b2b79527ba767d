"""The progress of a run: a bar on a terminal, a line for each evaluation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from tfkit.commands import TABLE_WIDTH
from tfkit.run.contract import Callback, Training

if TYPE_CHECKING:
    from rich.progress import Progress


LOOP = ("loss", "lr", "grad_norm")
"""Numbers that the training loop reports at every step; all other numbers come from callbacks."""


class TrainingProgress(Callback):
    """Measures the time of steps, without evaluations and checkpoints, and shows progress unless `quiet`."""

    def __init__(self, tokens_before: Callable[[int], float], *, quiet: bool) -> None:
        self.first = self.last = 0
        """Number of the last step before this process, and of the current step."""
        self.seconds = 0.0
        """Total time of the steps of this process."""
        self.numbers: dict[str, float] = {}
        """The latest number of each name."""
        self._tokens = tokens_before
        self._quiet = quiet
        self._since: float | None = None
        self._bar: Progress | None = None
        self._task: Any = None

    @property
    def tokens_per_second(self) -> float | None:
        """Positions per second of training; None before the first step."""
        tokens = self._tokens(self.last + 1) - self._tokens(self.first + 1)
        return tokens / self.seconds if self.seconds else None

    def on_start(self, training: Training) -> None:
        self.first = self.last = training.step
        if not self._quiet and sys.stderr.isatty():
            self._bar = _progress_bar()
            self._task = self._bar.add_task("", total=training.steps, completed=training.step, rate="", loss="")
            self._bar.start()
        if training.step:
            self.note(f"continued after step {training.step:,}")
        self._since = time.perf_counter()

    def on_step(self, training: Training, numbers: Mapping[str, float]) -> None:
        now = time.perf_counter()
        self.seconds += now - (self._since or now)
        self._since, self.last = now, training.step
        self.numbers |= numbers
        if self._bar is not None:
            speed = f"{self.tokens_per_second or 0:,.0f} tokens/s"
            logged = [
                f"  {name} {number:.4g}" for name, number in numbers.items() if name not in LOOP and "/" not in name
            ]
            loss = f"loss {numbers['loss']:.3f}  lr {numbers['lr']:.1e}{''.join(logged)}"
            self._bar.update(self._task, completed=training.step, loss=loss, rate=speed)

    def on_eval(self, training: Training, numbers: Mapping[str, float]) -> None:
        self._since = time.perf_counter()
        self.numbers |= numbers
        texts = [f"{name} {number:.4f}" for name, number in numbers.items()]
        for line in _wrapped_lines(f"step {training.step:>7,}", texts):
            self.note(line)

    def on_end(self, training: Training) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.say(f"warning: {text}")

    def note(self, text: str) -> None:
        """Print a text unless `quiet`."""
        if not self._quiet:
            self.say(text)

    def say(self, text: str) -> None:
        """Print a text, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(text)
        else:
            click.echo(text, err=True)


def _wrapped_lines(head: str, parts: Iterable[str]) -> Iterator[str]:
    """Break the parts after the head into lines. Parts that exceed the width are indented below the first part."""
    line = head
    for part in parts:
        if len(line) + 2 + len(part) > TABLE_WIDTH and len(line) > len(head):
            yield line
            line = " " * len(head)
        line += f"  {part}"
    yield line


def _progress_bar() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from tfkit.commands import console

    return Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
        console=console(stderr=True),
        transient=True,
    )
