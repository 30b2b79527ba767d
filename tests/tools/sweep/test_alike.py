"""What tells evaluations apart is what they read; what training alone reads does not."""

from __future__ import annotations

from pathlib import Path

import pytest

import tfkit
from tfkit.run.checked_run import Run, load_run
from tfkit.tools.sweep.equal import evaluation_differences

SHIPPED = Path(__file__).parents[3] / "specs" / "runs" / "calculator.yaml"
EVAL = "eval={every: 1, splits: {val: all, test: all}}"


@pytest.fixture(scope="module")
def published() -> Run:
    return run()


def run(*sets: str) -> Run:
    plugins = tfkit.load_plugins(entry_points=False)
    return load_run(SHIPPED, plugins, sets=("data.problems=300", "data.test=20", "steps=2", EVAL, *sets))


LAYOUT, LENGTH = "data.layout: stream -> rows", "batch.length: 128 -> null"
ROWS = ("data.layout=rows", "batch={sequences: 4}")


@pytest.mark.parametrize(
    ("sets", "on_test", "on_val"),
    [
        ((), [], []),
        (("optimizer.lr=1e-2", "data.order=shuffled"), [], []),
        (ROWS, [], [LAYOUT, LENGTH]),
        ((*ROWS, "data.loss_on=answer"), [], [LAYOUT, "data.loss_on: all -> answer", LENGTH]),
        (("data.problems=400",), [], ["data.problems: 300 -> 400"]),
        (("data.test=30",), ["data.test: 20 -> 30"], []),
        (("data.reverse=false",), ["data.reverse: true -> false"], ["data.reverse: true -> false"]),
    ],
)
def test_a_split_is_told_apart_by_what_it_depends_on(
    published: Run, sets: tuple[str, ...], on_test: list[str], on_val: list[str]
) -> None:
    other = run(*sets)
    assert evaluation_differences(published, other, "test.loss") == on_test
    assert evaluation_differences(published, other, "val.loss") == on_val
