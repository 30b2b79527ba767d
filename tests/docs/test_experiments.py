"""Every table of `docs/experiments.md` is what its command makes of the runs that are kept beside the page."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tfkit.cli import main

from ..sampling import some

DOCS = Path(__file__).parents[2] / "docs"
KEPT = DOCS / "experiments"
TEXT = (DOCS / "experiments.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^tfkit ((?:sweep|runs) .*docs/experiments.*)$", TEXT, re.MULTILINE)


@pytest.mark.parametrize("command", some(COMMANDS, 1))
def test_tables_are_those_of_the_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(KEPT, tmp_path / "docs" / "experiments")
    monkeypatch.chdir(tmp_path)
    main([*command.split(), "--so-far", "--markdown"])
    printed = capsys.readouterr().out
    assert "|" in printed
    assert [line for line in printed.splitlines() if line not in TEXT.splitlines()] == []


def test_records_name_no_place() -> None:
    assert COMMANDS
    for path in KEPT.rglob("run.json"):
        facts = json.loads(path.read_text(encoding="utf-8"))
        assert facts["ended"] == "finished"
        assert {one["command"] for one in facts["sessions"]} == {f"tfkit train {path.parent.name}"}
