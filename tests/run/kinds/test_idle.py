"""A field is idle for a split if and only if the evaluated examples do not depend on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tfkit.run.contract import Examples

from .small import small_run

CALCULATOR = "{kind: calculator, problems: 60, test: 20}"
ROWS = "{kind: calculator, problems: 60, test: 20, layout: rows}"
TEXT = "{kind: text, files: tinyshakespeare}"
MASKED = f"{{kind: masked, of: {TEXT}}}"
SPLIT = "{train: 0.8, val: 0.2}"


@pytest.mark.parametrize(
    ("data", "length", "field", "change"),
    [
        (CALCULATOR, 50, "problems", "problems=90"),
        (CALCULATOR, 50, "split", f"split={SPLIT}"),
        (CALCULATOR, 50, "test", "test=10"),
        (CALCULATOR, 50, "reverse", "reverse=false"),
        (CALCULATOR, 50, "order", "order=sampled"),
        (CALCULATOR, 50, "length", "batch.length=40"),
        (ROWS, None, "loss_on", "loss_on=answer"),
        (ROWS, None, "problems", "problems=90"),
        (TEXT, 64, "order", "order=sampled"),
        (TEXT, 64, "split", f"split={SPLIT}"),
        (MASKED, 64, "choices", "choices=3"),
        (MASKED, 64, "share", "share=0.3"),
        (f"{{kind: masked, of: {CALCULATOR}}}", 50, "of.problems", "of.problems=90"),
        (f"{{kind: masked, of: {CALCULATOR}}}", 50, "split", f"split={SPLIT}"),
        (f"{{kind: masked, of: {CALCULATOR}}}", 50, "length", "batch.length=40"),
        (f"{{kind: masked, of: {MASKED}}}", 64, "of.choices", "of.choices=3"),
    ],
)
def test_idle_fields_change_no_example(data: str, length: int | None, field: str, change: str, tmp_path: Path) -> None:
    path = change if change.startswith("batch.") else f"data.{change}"
    before, after = (small_run(tmp_path, data, *sets, length=length) for sets in ((), (path,)))
    for split in before.data.splits:
        first, other = (_read(run.data.examples(split, "sequential"), 200) for run in (before, after))
        same = all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
        assert (field in before.config.data.idle(split)) == same, split


def test_a_problem_of_the_test_is_the_same_in_every_layout(tmp_path: Path) -> None:
    stream, rows = small_run(tmp_path, CALCULATOR, length=50), small_run(tmp_path, ROWS)
    first, other = (_read(run.data.examples("test", "sequential"), 20) for run in (stream, rows))
    assert all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert all({"layout", "length"} <= run.config.data.idle("test") for run in (stream, rows))
    assert all({"layout", "length"}.isdisjoint(run.config.data.idle("val")) for run in (stream, rows))


def _read(examples: Examples, limit: int) -> list[NDArray[np.int64]]:
    """The number of examples, and the inputs and targets of the first ones."""
    batch = examples.batch(np.arange(min(len(examples), limit)))
    return [np.array(len(examples)), *batch.inputs.values(), batch.targets]
