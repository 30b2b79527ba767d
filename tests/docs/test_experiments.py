"""The tables of pages about experiments equal the output of their commands for the stored runs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.run.training.runs import RECURRENT, WITH_PLUGINS
from tfkit.cli import main
from tfkit.run.checked_run import load_run
from tools import keep_runs
from tools.keep_runs import STATED

from ..sampling import some

DOCS = Path(__file__).parents[2] / "docs"
EXPERIMENTS = DOCS / "experiments"
TEXTS = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("experiments", "hybrids")}
COMMAND = re.compile(r"^tfkit ((?:sweep|runs) .*docs/experiments.*)$", re.MULTILINE)
COMMANDS = [(page, command) for page, text in TEXTS.items() for command in COMMAND.findall(text)]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), some(COMMANDS, 1))
def test_tables_are_those_of_the_runs(
    page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(EXPERIMENTS, tmp_path / "docs" / "experiments")
    monkeypatch.chdir(tmp_path)
    main([*command.split(), "--so-far", "--markdown", "--plugin-dir", str(RECURRENT), "--no-plugins"])
    printed = capsys.readouterr().out
    assert "|" in printed
    assert [line for line in printed.splitlines() if line not in TEXTS[page].splitlines()] == []


def test_records_name_no_place() -> None:
    assert {page for page, _ in COMMANDS} == {*TEXTS}
    for path in EXPERIMENTS.rglob("run.json"):
        facts = json.loads(path.read_text(encoding="utf-8"))
        assert facts["ended"] == "finished"
        assert {value["command"] for value in facts["sessions"]} == {f"tfkit train {path.parent.name}"}
        assert not any("code" in session for session in facts["sessions"])  # later code may show the tables


# ---- stated results ----


@pytest.mark.parametrize("name", STATED)
def test_stated_results_are_reached_by_the_records(name: str) -> None:
    (record,) = keep_runs.records_of(name)
    assert STATED[name].reached(keep_runs.last_figure(record, STATED[name].metric))
    assert keep_runs.table_row(name) in (DOCS / "objectives.md").read_text(encoding="utf-8").splitlines()
    assert str(DOCS.parent) not in (record / "run.yaml").read_text(encoding="utf-8")
    assert json.loads((record / "run.json").read_text(encoding="utf-8"))["environment"]["git"]


@pytest.mark.slow
@pytest.mark.parametrize("name", STATED)
def test_records_of_stated_results_are_those_of_the_shipped_runs(name: str) -> None:
    assert [record.name for record in keep_runs.records_of(name)] == [load_run(name, WITH_PLUGINS).digest[:16]]


def test_a_result_that_is_not_reached_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has finished, so that it is not trained. Its record replaces the record of an earlier version."""
    name = "diffusion_addition"
    (record,) = keep_runs.records_of(name)
    shutil.copytree(record, tmp_path / "out" / name)
    shutil.copytree(record, tmp_path / "runs" / "earlier")
    commands: list[list[str]] = []
    monkeypatch.setattr(keep_runs, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(keep_runs.subprocess, "run", lambda command, **_: commands.append(command))
    assert keep_runs.reach([name], tmp_path / "out") == []
    assert commands[0][-4:] == ["train", name, "-o", tmp_path / "out" / name]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [record.name]
    lines = (record / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    later = {"step": 1200, "val.decoded_exact_match": 0.979}
    (tmp_path / "out" / name / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(later), ""]))
    assert keep_runs.reach([name], tmp_path / "out") == [name]
