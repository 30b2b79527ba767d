"""A branch continues a checkpoint of another run, with different steps, rates or data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import tfkit
from tfkit.errors import SpecError
from tfkit.run.checked_run import load_run
from tfkit.tools.train.train import train

from ...sampling import chosen
from .runs import PLUGINS, same, write_run

EVERY = "checkpoint={every: 2, last: 9}"


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """The file of a run that was trained in the folder `parent`, with a checkpoint every two steps."""
    path = write_run(tmp_path)
    train(path, output=tmp_path / "parent", sets=[EVERY, "model.dropout=0.2"], quiet=True)
    return path


def branch(path: Path, name: str, *sets: str) -> Path:
    """Train a branch of the run; return its folder."""
    output = path.parent / name
    train(path, output=output, sets=[EVERY, "model.dropout=0.2", *sets], quiet=True)
    return output


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_a_branch_with_equal_settings_gives_the_bits_of_the_run(parent: Path) -> None:
    folder = parent.parent / "parent"
    output = branch(parent, "equal", f"branch={{run: {folder}, step: 4}}")
    assert same(tfkit.build(folder).state_dict(), tfkit.build(output).state_dict())
    expected = losses(folder)
    assert losses(output) == {step: expected[step] for step in (5, 6, 7, 8)}
    first = json.loads((output / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 4
    assert first["branch"].startswith("step 4 of ")


def test_a_branch_may_change_steps_and_rate(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = parent.parent / "parent"
    output = branch(parent, "longer", f"branch={folder}", "steps=10", "optimizer.lr=1e-3")
    assert [*losses(output)] == [9, 10]
    partial = parent.parent / "partial"
    sets = [EVERY, "model.dropout=0.2", f"branch={folder}", "steps=10", "optimizer.lr=1e-3"]
    train(parent, output=partial, sets=sets, stop_after=9)
    assert "branch: step 8 of " in capsys.readouterr().err
    train(parent, output=partial, sets=sets)
    assert "branch: " not in capsys.readouterr().err  # it continues its own checkpoint
    assert same(tfkit.build(partial).state_dict(), tfkit.build(output).state_dict())


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["branch={run: PARENT, step: 5}"], "no checkpoint of step 5"),
        (["branch={run: PARENT, step: 8}"], "must have a later last step; got 8"),
        (["branch=nowhere"], "`branch` must be the folder of a run"),
        (["branch={run: PARENT, step: 4}", "weights=PARENT"], "`weights` has no effect"),
        (["branch={run: PARENT, step: 4}", "optimizer={kind: sgd, lr: 0.1}"], "it has the optimizer adamw"),
        (["branch={run: PARENT, step: 4}", "model.d_model=32"], "must have the tensors of the model"),
    ],
)
def test_a_branch_that_does_not_fit_is_one_error(parent: Path, sets: list[str], message: str) -> None:
    sets = [text.replace("PARENT", str(parent.parent / "parent")) for text in sets]
    with pytest.raises(SpecError, match=message) as error:
        branch(parent, "refused", *sets)
    assert len(error.value.diagnostics) == 1


def test_a_branch_of_a_later_checkpoint_is_a_different_run(parent: Path) -> None:
    output = branch(parent, "other", f"branch={{run: {parent.parent / 'parent'}, step: 4}}")
    with pytest.raises(SpecError, match="has a different run"):
        branch(parent, output.name, f"branch={{run: {parent.parent / 'parent'}, step: 6}}")


SOURCES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "step rotated away": ("branch={run: SOURCE, step: 4}", lambda source: shutil.rmtree(source / "step-4")),
    "run moved": ("branch={run: SOURCE, step: 4}", lambda source: source.rename(source.with_name("moved"))),
    "latest step of a run that went on": (
        "branch=SOURCE",
        lambda source: train(source, sets=[EVERY], output=source, quiet=True),
    ),
    "latest step of a run that moved": ("branch=SOURCE", lambda source: source.rename(source.with_name("moved"))),
    "weights removed": ("weights=SOURCE/step-4", lambda source: shutil.rmtree(source / "step-4")),
    "weights damaged": ("weights=SOURCE/step-4", lambda source: (source / "step-4/model.safetensors").write_bytes(b"")),
}


QUICK_CASES = ("latest step of a run that went on", "weights removed")


@pytest.mark.parametrize("case", chosen(SOURCES, QUICK_CASES))
def test_a_run_needs_its_source_until_its_first_checkpoint(parent: Path, case: str) -> None:
    start, change = SOURCES[case]
    source = parent.parent / "source"
    train(parent, output=source, sets=[EVERY, "model.dropout=0.2"], stop_after=4, quiet=True)
    start = start.replace("SOURCE", str(source))
    expected = branch(parent, "expected", start)
    sets = [EVERY, "model.dropout=0.2", start]
    train(parent, output=parent.parent / "stopped", sets=sets, stop_after=6, quiet=True)
    train(parent, output=parent.parent / "begun", sets=sets, stop_after=5, quiet=True)
    (parent.parent / "begun/latest").unlink()  # as a process leaves it that is killed before its first checkpoint
    for path in (parent.parent / "begun").glob("step-*"):
        shutil.rmtree(path)
    change(source)
    output = branch(parent, "stopped", start)
    assert same(tfkit.build(expected).state_dict(), tfkit.build(output).state_dict())
    assert losses(output) == losses(expected)
    if "went on" not in case:
        with pytest.raises(SpecError):
            branch(parent, "begun", start)
    with pytest.raises(SpecError):  # a different step is a different run, whether or not it exists
        branch(parent, "stopped", f"branch={{run: {source}, step: 3}}")


def test_a_branch_may_have_a_large_step(parent: Path) -> None:
    run = load_run(parent, PLUGINS, sets=["branch={run: nowhere, step: 5000}"])
    assert run.config.branch is not None
    assert run.config.branch.step == 5000


def test_a_branch_of_the_latest_checkpoint_keeps_it_when_the_run_goes_on(parent: Path) -> None:
    folder = parent.parent / "going"
    sets = [EVERY, "model.dropout=0.2"]
    train(parent, output=folder, sets=sets, stop_after=4, quiet=True)
    output = parent.parent / "follower"
    train(parent, output=output, sets=[*sets, f"branch={folder}"], stop_after=6, quiet=True)
    train(parent, output=folder, sets=sets, quiet=True)
    train(output, output=output, quiet=True)
    assert [*losses(output)] == [5, 6, 7, 8]
