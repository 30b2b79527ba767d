"""The numbers and texts of a run, read from its `metrics.jsonl`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.spec.header import Malformed, open_regular, parse_object
from tfkit.tools.train.record import METRICS

Points = Sequence[tuple[int, float]]
"""Pairs of a step and the value after that step."""


@dataclass(frozen=True)
class History:
    """The numbers and texts of a run.

    Attributes:
        curves: the values of each number by its name: `loss`, `lr`, `grad_norm`, `val.loss`.
        texts: step, name and text of each note: `sample`, `spike`.
    """

    curves: Mapping[str, Points]
    texts: Sequence[tuple[int, str, str]]

    @property
    def latest(self) -> dict[str, float]:
        """The last value of each number."""
        return {name: points[-1][1] for name, points in self.curves.items()}


def history(folder: Path) -> History:
    """Read the history of the run in a folder."""
    curves: dict[str, list[tuple[int, float]]] = {}
    texts = []
    for noted in lines(folder):
        step = noted.pop("step")
        for name, value in noted.items():
            if isinstance(value, str):
                texts.append((step, name, value))
            elif math.isfinite(value):
                curves.setdefault(name, []).append((step, value))
    return History(curves, texts)


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl`, without an incomplete last line that a process is still writing.

    Raises SpecError for a line without `step`, and for values that are neither numbers nor texts.
    """
    path = folder / METRICS
    if not os.path.lexists(path):
        return []
    with open_regular(path) as file:
        try:
            values = [parse_object(line, max_values=None) for line in file.read().split(b"\n")[:-1]]
        except (OSError, Malformed) as error:
            raise SpecError(Diagnostic(f"cannot read {quoted(str(path))}: {error}")) from error
    for number, line in enumerate(values, start=1):
        if type(line.get("step")) is not int:
            raise SpecError(Diagnostic(f"cannot read {quoted(str(path))}: line {number:,} has no `step`"))
        if name := next((name for name, value in line.items() if type(value) not in (int, float, str)), None):
            message = f"{quoted(name)} of line {number:,} must be a number or a text"
            raise SpecError(Diagnostic(f"cannot read {quoted(str(path))}: {message}"))
    return values
