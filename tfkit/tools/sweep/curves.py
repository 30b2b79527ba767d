"""The number of a run that is compared, over its steps, as its folder has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfkit.tools.sweep.arms import Cell
from tfkit.tools.train.history import lines
from tfkit.tools.train.record import Facts, read_facts


@dataclass(frozen=True)
class Curve:
    """The number of one run that is compared, over its steps.

    Attributes:
        seed: that of the run.
        folder: its folder.
        steps: the steps that it was evaluated at.
        values: the number at each.
        speed: positions read in a second, evaluations included; None where a process left no time.
        memory: the largest number of bytes in use; None where a process left none.
        bits: the values that decide its last digits and its speed: torch, device, threads.
    """

    seed: int
    folder: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    speed: float | None
    memory: int | None = None
    bits: Mapping[str, Any] = field(default_factory=dict)

    @property
    def last(self) -> float:
        """The last value; not a number if there is none."""
        return self.values[-1] if self.values else math.nan


def curve_of(cell: Cell, on: str) -> Curve:
    """The curve of a run as far as it is made."""
    points = {one["step"]: one[on] for one in lines(cell.folder) if isinstance(one.get(on), float)}
    facts = _facts(cell)
    memory = max((one["memory"] for one in facts.sessions if "memory" in one), default=None)
    speed = _speed(cell, facts)
    return Curve(cell.seed, str(cell.folder), tuple(points), tuple(points.values()), speed, memory, facts.bits)


def speed_of(cell: Cell) -> float | None:
    """Positions that a run read in a second, evaluations included; None where a process left no time."""
    return _speed(cell, _facts(cell))


def _speed(cell: Cell, facts: Facts) -> float | None:
    if any("seconds" not in one for one in facts.sessions):
        return None
    seconds: float = sum(one["seconds"] for one in facts.sessions)
    return facts.sessions[-1]["step"] * cell.run.tokens_of_step / seconds if seconds else None


def _facts(cell: Cell) -> Facts:
    facts = read_facts(cell.folder)
    assert facts is not None
    return facts
