"""The numbers and texts of a run, read from its `metrics.jsonl`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.spec.header import Malformed, open_regular, parse_object, quoted_path, read_error

METRICS = "metrics.jsonl"
MAX_INTEGER = 2**63 - 1

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


def read_history(folder: Path) -> History:
    """Read the history of the run in a folder."""
    curves: dict[str, list[tuple[int, float]]] = {}
    texts = []
    for noted in read_metric_lines(folder):
        step = noted.pop("step")
        for name, value in noted.items():
            if isinstance(value, str):
                texts.append((step, name, value))
            elif math.isfinite(value):
                curves.setdefault(name, []).append((step, value))
    return History(curves, texts)


def read_metric_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl`, without an incomplete last line that a process is still writing.

    Raises SpecError for a line that is not a JSON object with a `step`, and for values that are neither numbers nor
    texts.
    """
    path = folder / METRICS
    if not os.path.lexists(path):
        return []
    with open_regular(path) as file:
        try:
            texts = file.read().split(b"\n")[:-1]
        except OSError as error:
            raise read_error(path, error) from error
    values = []
    for number, text in enumerate(texts, start=1):
        try:
            values.append(_checked_line(parse_object(text)))
        except Malformed as error:
            raise SpecError(Diagnostic(f"cannot read {quoted_path(path)}, line {number:,}: {error}")) from error
    return values


def _checked_line(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of `metrics.jsonl` if its values have the types that tfkit writes."""
    if type(line.get("step")) is not int:
        raise Malformed("it has no `step`")
    for name, value in line.items():
        if type(value) not in (int, float, str):
            raise Malformed(f"{quoted(name)} must be a number or a text")
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise Malformed(f"{quoted(name)} must be an integer of at most 64 bits")
    return line
