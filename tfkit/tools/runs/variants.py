"""Variants: runs whose settings are equal except for the seed, named after the values that distinguish them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tfkit.run.checked_run import Run
from tfkit.run.run_meaning import Value
from tfkit.tools.sweep.arms import SweepRun
from tfkit.tools.sweep.equal import NONE, word_of

SEED = "seed"
KINDS = ("kind", "block")
"""Keys whose values identify a component better than the fields next to them."""


@dataclass(frozen=True)
class Variant:
    """Runs with equal settings, one for each seed."""

    name: str
    runs: tuple[SweepRun, ...]

    @property
    def run(self) -> Run:
        """The first run."""
        return self.runs[0].run


def variants(runs: Iterable[SweepRun]) -> list[Variant]:
    """Group runs into variants, in the order of their first runs."""
    groups: dict[str, list[SweepRun]] = {}
    for sweep_run in runs:
        groups.setdefault(json.dumps(sorted(_seedless(sweep_run.run).items())), []).append(sweep_run)
    names = _names([group[0].run for group in groups.values()])
    return [Variant(name, tuple(group)) for name, group in zip(names, groups.values(), strict=True)]


def _names(runs: Sequence[Run]) -> list[str]:
    """Name each run after the values in which it differs from the first run; a single run keeps its name.

    The first run is named after its values at those paths, which distinguish all runs.
    """
    if len(runs) == 1:
        return [runs[0].config.name]
    values = [_seedless(run) for run in runs]
    paths = _telling(values)
    labels = _labels(paths, values)
    first = [word_of(path, values[0]) for path in paths]
    names = []
    for number, run_values in enumerate(values):
        words = [word_of(path, run_values) for path in paths]
        kept = [word != other for word, other in zip(words, first, strict=True)]
        if number == 0:
            kept = [word != NONE for word in words]
        parts = [f"{label} {word}".strip() for label, word, keep in zip(labels, words, kept, strict=True) if keep]
        names.append(", ".join(parts) or f"{labels[0]} {words[0]}")
    return names


def _telling(values: Sequence[Mapping[str, Value]]) -> list[str]:
    """Choose paths whose values distinguish all runs, kinds first; skip a path that separates no more runs."""
    paths = sorted(
        dict.fromkeys(path for run_values in values for path in run_values), key=lambda path: not _is_kind(path)
    )
    chosen: list[str] = []
    groups = 1
    for path in paths:
        finer = len({tuple(word_of(name, run_values) for name in (*chosen, path)) for run_values in values})
        if finer > groups:
            chosen, groups = [*chosen, path], finer
    return chosen


def _seedless(run: Run) -> dict[str, Value]:
    return {path: value for path, value in run.meaning.values.items() if path != SEED}


def _is_kind(path: str) -> bool:
    return path.rpartition(".")[2] in KINDS


def _labels(paths: Sequence[str], values: Sequence[Mapping[str, Value]]) -> list[str]:
    """Return the word before the value of each path: its last key, or nothing for a kind that all runs have."""
    keys = [_key(path) for path in paths]
    shared = {path for path in paths if _is_kind(path) and all(path in run_values for run_values in values)}
    labels = [path if keys.count(key) > 1 else key for path, key in zip(paths, keys, strict=True)]
    return ["" if path in shared else label for path, label in zip(paths, labels, strict=True)]


def _key(path: str) -> str:
    """Return the last key of a path, or the slot of a kind; an index in a list keeps the key before it."""
    keys = path.split(".")[: -1 if _is_kind(path) else None]
    start = next(index for index in range(len(keys) - 1, -1, -1) if not keys[index].isdigit())
    return ".".join(keys[start:])
