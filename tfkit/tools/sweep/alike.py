"""The values that two runs must share for their numbers to be those of one evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from tfkit.graph.run import CONTENT, SUFFIX, Run
from tfkit.graph.run_meaning import Value

LETTERS = 8
"""Digits of a digest in a text."""
NONE = "none"
"""The word for a value that a run does not have."""


def unlike(base: Run, own: Run, on: str) -> list[str]:
    """The values in which the evaluations of two runs differ: `batch.length: 12 -> 8`."""
    before, after = (_evaluated(run, on) for run in (base, own))
    texts = {path: (word_of(path, before), word_of(path, after)) for path in {**before, **after}}
    return [f"{path}: {old} -> {new}" for path, (old, new) in texts.items() if old != new]


def _evaluated(run: Run, on: str) -> dict[str, Value]:
    """The values that an evaluation depends on beside the weights, by their paths."""
    split, _, kind = on.partition(".")
    evaluations = run.config.eval
    assert evaluations is not None
    metric = f"eval.metrics.{[one.kind_name() for one in evaluations.metrics].index(kind)}"
    parts = ["data", CONTENT, "batch.length", f"eval.splits.{split}", metric]
    if evaluations.splits[split].batches != "all":
        parts.append("batch.sequences")
    idle = ["batch.length" if field == "length" else f"data.{field}" for field in run.config.data.idle(split)]
    return {
        path.replace(metric, f"eval.{kind}"): value
        for path, value in run.meaning.values.items()
        if _within(path, parts) and not _within(path, idle)
    }


def _within(path: str, parts: Iterable[str]) -> bool:
    """True if a path is one of some, or inside one."""
    return f"{path}.".startswith(tuple(f"{part}." for part in parts))


def word_of(path: str, values: Mapping[str, Value]) -> str:
    """A value as YAML has it, `null` or `0.001`; `none` where there is no such value."""
    if path not in values:
        return NONE
    value = values[path]
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:LETTERS] if path.endswith(SUFFIX) else text
