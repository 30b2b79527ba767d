"""The numbers and texts of a run, as its `metrics.jsonl` has them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.tools.train.record import METRICS

Points = Sequence[tuple[int, float]]
"""Steps, and the value after each."""


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
    """The history of the run in a folder."""
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
    """The lines of `metrics.jsonl`, without one that a process is still writing; raises SpecError for other lines."""
    path = folder / METRICS
    try:
        found = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise SpecError(Diagnostic(f"cannot read {quoted(str(path))}: {error}")) from error
    if not all(isinstance(one, dict) and isinstance(one.get("step"), int) for one in found):
        raise SpecError(Diagnostic(f"cannot read {quoted(str(path))}: a line has no `step`"))
    return found
