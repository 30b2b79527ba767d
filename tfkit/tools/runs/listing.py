"""The runs in folders as rows of a table. Their models and data are not read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.run.run_facts import read_facts
from tfkit.spec.folder import RUN
from tfkit.spec.source import plain_data, read
from tfkit.tools.common.history import read_history


@dataclass(frozen=True)
class ListedRun:
    """A run and its state.

    Attributes:
        folder: the run folder.
        name: the name of the run.
        step: the last step in its metrics; None before the first step.
        steps: the total number of steps; None before the run begins.
        ended: the reason why no step follows; None if the run can be resumed.
        latest: the last value of each metric.
    """

    folder: str
    name: str
    step: int | None
    steps: int | None
    ended: str | None
    latest: dict[str, float]


def listed_runs(folders: Iterable[Path]) -> list[ListedRun]:
    """Return the runs in folders, at any depth. Raise SpecError if a folder neither is nor contains a run folder."""
    runs = []
    for folder in folders:
        files = sorted(path for path in folder.rglob(RUN) if path.is_file())
        if not files:
            help = "name folders that `tfkit train` or `tfkit sweep` wrote"
            raise SpecError(Diagnostic(f"{quoted(str(folder))} contains no run", help=help))
        runs += [_listed_run(path.parent) for path in files]
    return runs


def _listed_run(folder: Path) -> ListedRun:
    root: Any = plain_data(read(folder / RUN))
    facts, curves = read_facts(folder), read_history(folder).curves
    steps = [step for points in curves.values() for step, _ in points]
    return ListedRun(
        folder=str(folder),
        name=str(root.get("name")),
        step=max(steps, default=None),
        steps=None if facts is None else facts.meaning.get("steps"),
        ended=None if facts is None else facts.ended,
        latest={name: points[-1][1] for name, points in curves.items()},
    )
