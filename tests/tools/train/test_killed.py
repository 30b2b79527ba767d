"""`kill -9` at any moment, including saves: the restarted run ends with equal bytes."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.training.runs import write_run
from tests.tools.common.moments import State, moments, restored
from tfkit.cli import main
from tfkit.spec.folder import LATEST, STEP

from .test_folder import SETS, contents

ROOT = Path(__file__).parents[3]
SAMPLE = 2
TIMES = 20


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)


def train(folder: str) -> int:
    return main(["train", "small.yaml", "-o", folder, *SETS])


def check_saved(state: State) -> None:
    """The checkpoint to continue from is whole, and so is each newer one: a save leaves all or nothing."""
    latest = (state.get(LATEST) or b"step-0").decode().strip()
    saved = {int(match[1]) for path in (*state, latest) if (match := STEP.fullmatch(path.partition("/")[0]))} - {0}
    for step in saved:
        if step >= int(latest.removeprefix("step-")):
            files = {path.partition("/")[2] for path in state if path.startswith(f"step-{step}/")}
            assert files >= {"model.safetensors", "optimizer.safetensors", "state.json", "spec.yaml"}, step


def check_moments(limit: int | None) -> None:
    """Whatever a killed process left in its folder, the next one ends with the bytes of an uninterrupted run."""
    with moments(Path("whole")) as states:
        assert train("whole") == 0
    expected = contents("whole")
    assert len(states) > 40
    for state in states:
        check_saved(state)
    sample = states if limit is None else random.Random(len(states)).sample(states, limit)
    for number, state in enumerate(sample):
        folder = restored(state, Path(f"again-{number}"))
        assert train(str(folder)) == 0
        assert contents(str(folder)) == expected, sorted(state)


def test_killed_at_some_moments() -> None:
    check_moments(SAMPLE)


@pytest.mark.slow
def test_killed_at_every_moment() -> None:
    check_moments(None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("times", "case"),
    [(TIMES, "text"), *((10, case) for case in ("distillation", "pairs", "labelled", "choices", "mixture"))],
)
def test_killed_at_random(times: int, case: str) -> None:
    """In a process of its own: one that has computed gradients cannot be forked."""
    words = [sys.executable, "-m", "tests.tools.train.killed", str(times), case]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
