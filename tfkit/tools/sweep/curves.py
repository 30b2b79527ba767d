"""The number of a run that is compared, over its steps, as its folder has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfkit.tools.sweep.arms import Cell
from tfkit.tools.train.history import lines
from tfkit.tools.train.record import Facts, read_facts
from tfkit.training.loop import DIVERGED


@dataclass(frozen=True)
class Curve:
    """The number of one run that is compared, over its steps.

    Attributes:
        seed: that of the run.
        folder: its folder.
        steps: the steps with a finite value.
        values: the value at each step.
        speed: positions read in a second, evaluations included; None where a process left no time.
        memory: the largest number of bytes in use; None where a process left none.
        bits: the values that decide its last digits and its speed: torch, device, threads.
        diverged: True if the run diverged, or if its last value is not finite.
    """

    seed: int
    folder: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    speed: float | None
    memory: int | None = None
    bits: Mapping[str, Any] = field(default_factory=dict)
    diverged: bool = False

    @property
    def last(self) -> float:
        """The last value; NaN if there is none, or if the run diverged: what it was before is no result."""
        return self.values[-1] if self.values and not self.diverged else math.nan


def curve_of(cell: Cell, on: str) -> Curve:
    """Return the curve of a run up to its last evaluation."""
    points = {line["step"]: line[on] for line in lines(cell.folder) if isinstance(line.get(on), float)}
    finite = {step: value for step, value in points.items() if math.isfinite(value)}
    facts = _facts(cell)
    diverged = facts.ended == DIVERGED or not all(map(math.isfinite, list(points.values())[-1:]))
    memory = max((session["memory"] for session in facts.sessions if "memory" in session), default=None)
    steps, values = tuple(finite), tuple(finite.values())
    return Curve(cell.seed, str(cell.folder), steps, values, _speed(cell, facts), memory, facts.bits, diverged)


def speed_of(cell: Cell) -> float | None:
    """Return the positions that a run trained on per second, evaluations included; None if it is not known."""
    return _speed(cell, _facts(cell))


def _speed(cell: Cell, facts: Facts) -> float | None:
    if any("seconds" not in session for session in facts.sessions):
        return None
    seconds: float = sum(session["seconds"] for session in facts.sessions)
    step = facts.sessions[-1]["step"]  # 0 if the run ended before its first step, which measures no speed
    return step * cell.run.tokens_of_step / seconds if step and seconds else None


def _facts(cell: Cell) -> Facts:
    facts = read_facts(cell.folder)
    assert facts is not None
    return facts
