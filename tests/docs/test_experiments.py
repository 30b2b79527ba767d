"""The tables of pages about experiments equal the output of their commands for the stored runs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.run.training.runs import RECURRENT
from tfkit.cli import main

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
