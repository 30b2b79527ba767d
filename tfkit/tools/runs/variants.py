"""Variants: runs whose settings are equal except for the seed, named after the values that distinguish them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tfkit.graph.run import Run
from tfkit.graph.run_meaning import Value
from tfkit.tools.sweep.arms import Cell
from tfkit.tools.sweep.equal import NONE, word_of

SEED = "seed"
KINDS = ("kind", "block")
"""Keys whose values say more than the fields beside them."""


@dataclass(frozen=True)
class Variant:
    """The runs of one meaning, one for each seed."""

    name: str
    cells: tuple[Cell, ...]

    @property
    def run(self) -> Run:
        """The first of them."""
        return self.cells[0].run


def variants(cells: Iterable[Cell]) -> list[Variant]:
    """The variants of runs, each where its first run is."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(json.dumps(sorted(_seedless(cell.run).items())), []).append(cell)
    names = _names([group[0].run for group in groups.values()])
    return [Variant(name, tuple(group)) for name, group in zip(names, groups.values(), strict=True)]


def _names(runs: Sequence[Run]) -> list[str]:
    """The values that tell each run from the first one, and from all others; a run alone has its own name.

    The first one is named by its own values in those places.
    """
    if len(runs) == 1:
        return [runs[0].config.name]
    values = [_seedless(run) for run in runs]
    paths = _telling(values)
    labels = _labels(paths, values)
    first = [word_of(path, values[0]) for path in paths]
    made = []
    for number, one in enumerate(values):
        words = [word_of(path, one) for path in paths]
        told = [word != other for word, other in zip(words, first, strict=True)]
        if number == 0:
            told = [word != NONE for word in words]
        parts = [f"{label} {word}".strip() for label, word, keep in zip(labels, words, told, strict=True) if keep]
        made.append(", ".join(parts) or f"{labels[0]} {words[0]}")
    return made


def _telling(values: Sequence[Mapping[str, Value]]) -> list[str]:
    """As few paths as tell all apart: kinds first, then in their order."""
    paths = sorted(dict.fromkeys(path for one in values for path in one), key=lambda path: not _is_kind(path))
    chosen: list[str] = []
    groups = 1
    for path in paths:
        finer = len({tuple(word_of(one, each) for one in (*chosen, path)) for each in values})
        if finer > groups:
            chosen, groups = [*chosen, path], finer
    return chosen


def _seedless(run: Run) -> dict[str, Value]:
    return {path: value for path, value in run.meaning.values.items() if path != SEED}


def _is_kind(path: str) -> bool:
    return path.rpartition(".")[2] in KINDS


def _labels(paths: Sequence[str], values: Sequence[Mapping[str, Value]]) -> list[str]:
    """The word before the value of each path: its last key; none before a kind that all have."""
    keys = [_key(path) for path in paths]
    return [
        "" if _is_kind(path) and all(path in one for one in values) else path if keys.count(key) > 1 else key
        for path, key in zip(paths, keys, strict=True)
    ]


def _key(path: str) -> str:
    """The last key of a path, or the slot of a kind; with the key before it for a place in a list."""
    keys = path.split(".")[: -1 if _is_kind(path) else None]
    start = next(index for index in range(len(keys) - 1, -1, -1) if not keys[index].isdigit())
    return ".".join(keys[start:])
