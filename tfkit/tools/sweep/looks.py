"""The plan that results of a sweep were first shown with, and remarks on results of another plan.

A p-value belongs to a plan: these seeds, and this metric. Adding seeds until a verdict appears, or searching for a
metric with a verdict, gives more false alarms than 5%. `shown.json` in the folder of a sweep lists what was shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tfkit.errors import Diagnostic, SpecError, quoted, ranges
from tfkit.tools.common.atomic_files import write_file, writing
from tfkit.tools.sweep.result import Result

SHOWN = "shown.json"


@dataclass(frozen=True)
class Look:
    """Results that were shown.

    Attributes:
        on: the metric.
        seeds: the seeds of the sweep, with or without complete runs.
        runs: the folder names of the runs of compared arms, without baselines, which several sweeps may share.
    """

    on: str
    seeds: list[int]
    runs: list[str]


def plan_remarks(folder: Path, arms: Sequence[Result], on: str, seeds: Sequence[int]) -> Iterator[str]:
    """Yield remarks if these results are not those of the plan that was first shown, and add them to the list."""
    compared = [arm for arm in arms if arm.difference is not None]
    runs = {Path(curve.folder).name for arm in compared for curve in arm.curves}
    if not runs:
        return
    looks = _read(folder / SHOWN)
    look = Look(on, sorted(seeds), sorted(runs))
    if look not in looks:
        looks.append(look)
        with writing(folder / SHOWN):
            folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / SHOWN, json.dumps([asdict(entry) for entry in looks], indent=1) + "\n")
    related = [earlier for earlier in looks if not runs.isdisjoint(earlier.runs)]
    first, metrics = related[0], {earlier.on for earlier in related}
    if first.seeds != look.seeds:
        yield (
            f"the seeds were {ranges(first.seeds)} when results were first shown, and are {ranges(look.seeds)} now: "
            "changing the seeds until a verdict appears gives more false alarms than 5%"
        )
    if first.on != on:
        yield f"{first.on} was shown first: the best of {len(metrics)} metrics gives more false alarms than 5%"
    pairs = min(arm.difference.pairs for arm in compared if arm.difference)
    if pairs < len(seeds):
        yield f"{pairs} of {len(seeds)} seeds are complete: a verdict counts only with all seeds"


def _read(path: Path) -> list[Look]:
    """Return the results that were shown; raise SpecError if the file cannot be read."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(entries, list):
            raise TypeError("it must be a list")
        return [_look(**entry) for entry in entries]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, RecursionError) as error:
        message = f"cannot read {quoted(str(path))}: {error}"
        help = "remove the file; the sweep then does not know which results were shown"
        raise SpecError(Diagnostic(message, help=help)) from error


def _look(on: Any, seeds: Any, runs: Any) -> Look:
    lists = isinstance(seeds, list) and isinstance(runs, list)
    if not lists or not {type(seed) for seed in seeds} <= {int} or not {type(name) for name in (on, *runs)} <= {str}:
        raise TypeError("a value has the wrong type")
    return Look(on, seeds, runs)
