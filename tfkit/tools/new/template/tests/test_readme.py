"""The commands of README.md print what it shows."""

import re
import shlex
from pathlib import Path

import pytest
from tfkit.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ tfkit (.*)\n((?:(?!\$ |```).*\n)*)", README, re.MULTILINE)


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=lambda text: text.partition("\n")[0])
def test_a_command_prints_what_is_shown(
    command: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(shlex.split(command)) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in output.splitlines() if line != "..." and line not in printed] == []
