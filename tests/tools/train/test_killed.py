"""`kill -9` at any moment, in saves too: the run that is started again ends with the same bytes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.tools.common.moments import moments, restored
from tests.training.runs import write_run
from tfkit.cli import main

from .killed import check_latest, killed_at_random
from .test_folder import SETS, contents

SAMPLE = 6
TIMES = 20


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)


def train(folder: str) -> int:
    return main(["train", "small.yaml", "-o", folder, *SETS])


def check_moments(most: int | None) -> None:
    """Whatever a killed process left in its folder, the next one ends with the bytes of an uninterrupted run."""
    with moments(Path("whole")) as found:
        assert train("whole") == 0
    wanted = contents("whole")
    assert len(found) > 40
    chosen = found if most is None else random.Random(len(found)).sample(found, most)
    for number, state in enumerate(chosen):
        folder = restored(state, Path(f"again-{number}"))
        check_latest(folder)
        assert train(str(folder)) == 0
        assert contents(str(folder)) == wanted, sorted(state)


def test_killed_at_some_moments() -> None:
    check_moments(SAMPLE)


@pytest.mark.slow
def test_killed_at_every_moment() -> None:
    check_moments(None)


@pytest.mark.slow
def test_killed_at_random(tmp_path: Path) -> None:
    complete, _ = killed_at_random(["small.yaml", *SETS], tmp_path, TIMES)
    for folder in complete:
        assert contents(str(folder)) == contents("whole"), folder
